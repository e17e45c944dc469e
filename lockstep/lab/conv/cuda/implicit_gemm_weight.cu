// The weight gradient as a product whose matrices never exist: filters by positions (the gradient of the
// result) times positions by channels and taps (gathered from the images). There are few results and a long
// sum over all positions of all images, so the sum is cut into PARTS that run side by side, and then added in
// their order: the bits do not depend on which part ends first. Needs gemm_tile.cuh.
// Neighbouring threads take neighbouring positions, and keep the same rows and columns at every step.

#define POSITIONS (N * P * Q)
#define STEPS ((POSITIONS + DEPTH - 1) / DEPTH)
#define ALL_COLUMNS (CG * TAPS)
#define ROW_TILES ((KG + ROWS - 1) / ROWS)
#define FETCHES_A (ROWS * DEPTH / THREADS)
#define FETCHES_B (COLUMNS * DEPTH / THREADS)
#define APART (THREADS / DEPTH)  // rows or columns between those of a thread
#define NOWHERE (-(1 << 28))

struct Operands {
    const Value *images, *gradient;
    int rows_left, offset[FETCHES_B], tap_y[FETCHES_B], tap_x[FETCHES_B];
    float next_a[FETCHES_A], next_b[FETCHES_B];
    bool is_a[FETCHES_A], is_b[FETCHES_B];

    __device__ __forceinline__ int from(int step) const { return step; }

    // Reads without a branch: what lies outside reads the first value instead, and is kept as zero.
    __device__ __forceinline__ void fetch(int step) {
        const int position = step * DEPTH + threadIdx.x % DEPTH;
        const bool is_there = POSITIONS % DEPTH == 0 || position < POSITIONS;
        const Place at(is_there ? position : 0, 1, P, Q);
        const Value *row = gradient + (size_t)at.a * K * P * Q + at.y * Q + at.x;
        const Value *image = images + (size_t)at.a * C * H * W;
        const int y = at.y * STRIDE - PADDING, x = at.x * STRIDE - PADDING;
#pragma unroll
        for (int i = 0; i < FETCHES_A; ++i) {
            is_a[i] = is_there && (KG % ROWS == 0 || i * APART < rows_left);
            next_a[i] = as_float(row[KG % ROWS == 0 || is_a[i] ? i * APART * P * Q : 0]);
        }
#pragma unroll
        for (int i = 0; i < FETCHES_B; ++i) {
            is_b[i] = is_there && within(y + tap_y[i], x + tap_x[i], H, W);
            next_b[i] = as_float(image[is_b[i] ? y * W + x + offset[i] : 0]);
        }
    }

    __device__ __forceinline__ void keep(float (*a)[A_PITCH], float (*b)[B_PITCH]) const {
        const int k = threadIdx.x % DEPTH, first = threadIdx.x / DEPTH;
#pragma unroll
        for (int i = 0; i < FETCHES_A; ++i) a[k][first + i * APART] = is_a[i] ? next_a[i] : 0.0f;
#pragma unroll
        for (int i = 0; i < FETCHES_B; ++i) b[k][first + i * APART] = is_b[i] ? next_b[i] : 0.0f;
    }
};

// A block: x, the tile of the result; y, the group; z, the part. Parts are stored as (PARTS, K, CG, R, R).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
part_of_weight_gradient(const Value *images, const Value *gradient, float *parts) {
    const int group = blockIdx.y, part = blockIdx.z;
    const int top = blockIdx.x % ROW_TILES * ROWS, left = blockIdx.x / ROW_TILES * COLUMNS;
    const int own = threadIdx.x / DEPTH;
    Operands operands;
    operands.images = images + (size_t)group * CG * H * W;
    operands.gradient = gradient + (size_t)(group * KG + min(top + own, KG - 1)) * P * Q;
    operands.rows_left = KG - top - own;
#pragma unroll
    for (int i = 0; i < FETCHES_B; ++i) {
        const int column = left + own + i * APART;
        const Place tap(column, 1, R, R);
        operands.tap_y[i] = column < ALL_COLUMNS ? tap.y * DILATION : NOWHERE;
        operands.tap_x[i] = tap.x * DILATION;
        operands.offset[i] = (tap.a * H + tap.y * DILATION) * W + tap.x * DILATION;
    }

    float sum[OWN_ROWS][OWN_COLUMNS] = {};
    const int first = (long long)STEPS * part / PARTS, last = (long long)STEPS * (part + 1) / PARTS;
    multiply_tile(operands, first, last, sum);

#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < OWN_COLUMNS; ++j) {
            const int row = top + own_row(i), column = left + own_column(j);
            if (row < KG && column < ALL_COLUMNS)
                parts[((size_t)part * K + group * KG + row) * ALL_COLUMNS + column] = sum[i][j];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) add_parts(const float *parts, Value *gradient) {
    const int at = own_index();
    if (at >= K * ALL_COLUMNS) return;
    float sum = 0;
    for (int part = 0; part < PARTS; ++part) sum += parts[(size_t)part * K * ALL_COLUMNS + at];
    gradient[at] = as_value(sum);
}
