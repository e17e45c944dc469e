// The product of im2col, whose columns never exist: a block gathers the part of them that it multiplies from
// the images on the way to shared memory. Forward, and with IS_DATA 1 the data gradient, whose columns come
// from the gradient of the result. Needs gemm_tile.cuh.
// - A thread gathers for one column only: where that lies in the images is computed once.
// - Weights arrive in the order in which they are read, (channels / RUN, R, R, RUN, rows): if RUN is DEPTH, a
//   step has one tap, and whether that tap lies inside the image is asked once a step.
// - With a stride, an element of the data gradient meets only some taps. A block computes elements that meet
//   the same ones, and steps over the others.

#if IS_DATA
#define SOURCE_CHANNELS KG
#define SOURCE_H P
#define SOURCE_W Q
#define RESULT_CHANNELS CG
#define RESULT_H H
#define RESULT_W W
#define CLASSES STRIDE  // each way; an element's place modulo the stride
#else
#define SOURCE_CHANNELS CG
#define SOURCE_H H
#define SOURCE_W W
#define RESULT_CHANNELS KG
#define RESULT_H P
#define RESULT_W Q
#define CLASSES 1
#endif
#define CLASS_H ((RESULT_H + CLASSES - 1) / CLASSES)
#define CLASS_W ((RESULT_W + CLASSES - 1) / CLASSES)
#define RUN (SOURCE_CHANNELS % DEPTH == 0 ? DEPTH : 1)
#define ALL_DEPTH (SOURCE_CHANNELS * TAPS)
#define STEPS ((ALL_DEPTH + DEPTH - 1) / DEPTH)
#define ROW_TILES ((RESULT_CHANNELS + ROWS - 1) / ROWS)
#define FETCHES_A ((ROWS * DEPTH / 4 + THREADS - 1) / THREADS)
#define FETCHES_B (COLUMNS * DEPTH / THREADS)
#define NOWHERE (-(1 << 28))

// How far tap `r` lies from where a column begins, along one axis; NOWHERE if the class does not meet it.
__device__ __forceinline__ int tap_shift(int r, int own_class) {
#if IS_DATA
    const int from = own_class + PADDING - r * DILATION;
    return from % STRIDE == 0 ? from / STRIDE : NOWHERE;
#else
    return r * DILATION;
#endif
}

struct Operands {
    const Value *weight, *source;  // source: of this thread's image, the group's first channel
    int top, begin_y, begin_x, class_y, class_x;
    float4 next_a[FETCHES_A];
    float next_b[FETCHES_B];
    bool is_met[FETCHES_B];

    __device__ __forceinline__ int from(int step) const {
        if (CLASSES > 1 && RUN == DEPTH)
            while (step < STEPS && (tap_shift(step % TAPS / R, class_y) == NOWHERE ||
                                    tap_shift(step % TAPS % R, class_x) == NOWHERE))
                ++step;
        return step;
    }

    // Reads without a branch: what lies outside reads the first value instead, and is kept as zero.
    __device__ __forceinline__ void fetch(int step) {
#pragma unroll
        for (int i = 0; i < FETCHES_A; ++i) {
            const int at = threadIdx.x + i * THREADS, k = step * DEPTH + at / (ROWS / 4);
            const bool is_there = at < ROWS * DEPTH / 4 && (ALL_DEPTH % DEPTH == 0 || k < ALL_DEPTH);
            next_a[i] = is_there ? fetch4(k, top + at % (ROWS / 4) * 4) : float4{};
        }
#pragma unroll
        for (int i = 0; i < FETCHES_B; ++i) {
            const int k = threadIdx.x / COLUMNS + i * (THREADS / COLUMNS);
            const int tap = RUN == DEPTH ? step % TAPS : (step * DEPTH + k) % TAPS;
            const int c = RUN == DEPTH ? step / TAPS * DEPTH + k : (step * DEPTH + k) / TAPS;
            const int y = begin_y + tap_shift(tap / R, class_y), x = begin_x + tap_shift(tap % R, class_x);
            is_met[i] = (RUN == DEPTH || c < SOURCE_CHANNELS) && within(y, x, SOURCE_H, SOURCE_W);
            const int channel = RUN == DEPTH || is_met[i] ? c * SOURCE_H * SOURCE_W : 0;
            next_b[i] = as_float(source[channel + (is_met[i] ? y * SOURCE_W + x : 0)]);
        }
    }

    __device__ __forceinline__ float4 fetch4(int k, int row) const {
        const Value *at = weight + (size_t)k * RESULT_CHANNELS + row;
        if (RESULT_CHANNELS % 4 == 0) {
            if (RESULT_CHANNELS % ROWS != 0 && row >= RESULT_CHANNELS) return float4{};
            const Value4 found = *reinterpret_cast<const Value4 *>(at);
            return float4{as_float(found.x), as_float(found.y), as_float(found.z), as_float(found.w)};
        }
        float4 found = {};
        if (row < RESULT_CHANNELS) found.x = as_float(at[0]);
        if (row + 1 < RESULT_CHANNELS) found.y = as_float(at[1]);
        if (row + 2 < RESULT_CHANNELS) found.z = as_float(at[2]);
        if (row + 3 < RESULT_CHANNELS) found.w = as_float(at[3]);
        return found;
    }

    __device__ __forceinline__ void keep(float (*a)[A_PITCH], float (*b)[B_PITCH]) const {
#pragma unroll
        for (int i = 0; i < FETCHES_A; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at < ROWS * DEPTH / 4)
                *reinterpret_cast<float4 *>(&a[at / (ROWS / 4)][at % (ROWS / 4) * 4]) = next_a[i];
        }
#pragma unroll
        for (int i = 0; i < FETCHES_B; ++i)
            b[threadIdx.x / COLUMNS + i * (THREADS / COLUMNS)][threadIdx.x % COLUMNS] =
                is_met[i] ? next_b[i] : 0.0f;
    }
};

// A block: x, the tile of the result; y, the group; z, the class.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
implicit_gemm(const Value *given, const Value *weight, Value *result) {
    const int group = blockIdx.y, left = blockIdx.x / ROW_TILES * COLUMNS;
    Operands operands;
    operands.top = blockIdx.x % ROW_TILES * ROWS;
    operands.class_y = blockIdx.z / CLASSES, operands.class_x = blockIdx.z % CLASSES;
    operands.weight = weight + (size_t)group * ALL_DEPTH * RESULT_CHANNELS;
    const int column = left + threadIdx.x % COLUMNS;
    const Place own(column, 1, CLASS_H, CLASS_W);
    operands.begin_y = IS_DATA ? own.y : own.y * STRIDE - PADDING;
    operands.begin_x = IS_DATA ? own.x : own.x * STRIDE - PADDING;
    const int image = min(own.a, N - 1);
    operands.source = given + (size_t)(image * GROUPS + group) * SOURCE_CHANNELS * SOURCE_H * SOURCE_W;
    if (column >= N * CLASS_H * CLASS_W) operands.begin_y = NOWHERE;

    float sum[OWN_ROWS][OWN_COLUMNS] = {};
    multiply_tile(operands, 0, STEPS, sum);

#pragma unroll
    for (int j = 0; j < OWN_COLUMNS; ++j) {
        const Place at(left + own_column(j), 1, CLASS_H, CLASS_W);
        const int y = at.y * CLASSES + operands.class_y, x = at.x * CLASSES + operands.class_x;
        if (at.a >= N || y >= RESULT_H || x >= RESULT_W) continue;
        Value *to = result + ((size_t)(at.a * GROUPS + group) * RESULT_CHANNELS * RESULT_H + y) * RESULT_W + x;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int row = operands.top + own_row(i);
            if (row < RESULT_CHANNELS) to[row * RESULT_H * RESULT_W] = as_value(sum[i][j]);
        }
    }
}
