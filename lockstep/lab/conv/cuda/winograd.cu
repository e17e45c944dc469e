// F(TILE × TILE, 3 × 3): a tile of the result and the patch under it, TILE + 2 values wide, are transformed
// so that a convolution becomes one product for each of the patch's SIZE × SIZE places. TILE 2 takes 16
// multiplications for 4 results that have 36; TILE 4 takes 36 for 16 that have 144, and rounds more. These
// kernels transform to and fro, each in one pass over memory; between them, for every place, stands a product
// of matrices: filters by channels times channels by tiles. Needs winograd_2.cuh and winograd_4.cuh.
// Transformed patches are stored as (place, part, channel, tile of the part). Neighbouring threads take
// neighbouring tiles. PARTS cuts the weight gradient's long sum over tiles, as in implicit_gemm_weight.cu.

#define SIZE (TILE + 2)
#define PLACES (SIZE * SIZE)
#define TILES_Y ((P + TILE - 1) / TILE)
#define TILES_X ((Q + TILE - 1) / TILE)

// A tile's part of a row, stored at once where rows allow.
struct __align__(TILE * sizeof(Value)) Run { Value values[TILE]; };

// to = matrix · from · matrixᵀ. What is zero in the matrix costs nothing: the compiler knows it.
template <int out, int in>
__device__ __forceinline__ void sandwich(const float (&matrix)[out][in], const float (&from)[in][in],
                                         float (&to)[out][out]) {
    float half[out][in];
#pragma unroll
    for (int i = 0; i < out; ++i)
#pragma unroll
        for (int j = 0; j < in; ++j) {
            half[i][j] = 0;
#pragma unroll
            for (int k = 0; k < in; ++k)
                if (matrix[i][k] != 0) half[i][j] += matrix[i][k] * from[k][j];
        }
#pragma unroll
    for (int i = 0; i < out; ++i)
#pragma unroll
        for (int j = 0; j < out; ++j) {
            to[i][j] = 0;
#pragma unroll
            for (int k = 0; k < in; ++k)
                if (matrix[j][k] != 0) to[i][j] += matrix[j][k] * half[i][k];
        }
}

template <int out, int in>
__device__ __forceinline__ void transpose(const float (&from)[in][out], float (&to)[out][in]) {
#pragma unroll
    for (int i = 0; i < out; ++i)
#pragma unroll
        for (int j = 0; j < in; ++j) to[i][j] = from[j][i];
}

__device__ __forceinline__ void store_places(const float (&from)[SIZE][SIZE], Value *to, size_t apart) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) to[i * apart] = as_value(from[i / SIZE][i % SIZE]);
}

// Which tile a thread has: block x runs over the tiles of a part, y over channels, z over parts.
struct OwnTile {
    int n, y, x;
    bool is_stored, is_real;
    __device__ __forceinline__ OwnTile() {
        const int tile = blockIdx.z * PART_TILES + own_index();
        n = tile / (TILES_Y * TILES_X), y = tile / TILES_X % TILES_Y * TILE, x = tile % TILES_X * TILE;
        is_stored = own_index() < PART_TILES, is_real = n < N;
    }
};

__device__ __forceinline__ size_t place_of(int channel, int channels) {
    return ((size_t)blockIdx.z * channels + channel) * PART_TILES + own_index();
}

extern "C" __global__ void __launch_bounds__(THREADS) transform_images(const Value *images, Value *to) {
    const OwnTile own;
    if (!own.is_stored) return;
    float patch[SIZE][SIZE], found[SIZE][SIZE];
    const Value *image = images + (size_t)(own.n * C + blockIdx.y) * H * W;
#pragma unroll
    for (int i = 0; i < SIZE; ++i)
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            const int y = own.y - PADDING + i, x = own.x - PADDING + j;
            patch[i][j] = own.is_real && within(y, x, H, W) ? as_float(image[y * W + x]) : 0.0f;
        }
    const float matrix[SIZE][SIZE] = PATCH_MATRIX;
    sandwich(matrix, patch, found);
    store_places(found, to + place_of(blockIdx.y, C), (size_t)PARTS * C * PART_TILES);
}

// Filters are stored as (place, K, CG). IS_ROTATED: for the data gradient, which meets the taps in reverse.
extern "C" __global__ void __launch_bounds__(THREADS) transform_filters(const Value *weight, Value *to) {
    if (own_index() >= K * CG) return;
    float filter[3][3], found[SIZE][SIZE];
#pragma unroll
    for (int i = 0; i < 9; ++i)
        filter[i / 3][i % 3] = as_float(weight[own_index() * 9 + (IS_ROTATED ? 8 - i : i)]);
    const float matrix[SIZE][3] = FILTER_MATRIX;
    sandwich(matrix, filter, found);
    store_places(found, to + own_index(), K * CG);
}

extern "C" __global__ void __launch_bounds__(THREADS)
transform_results_back(const float *from, Value *result) {
    const OwnTile own;
    if (!own.is_stored || !own.is_real) return;
    float product[SIZE][SIZE], found[TILE][TILE];
    const float *at = from + place_of(blockIdx.y, K);
#pragma unroll
    for (int i = 0; i < PLACES; ++i) product[i / SIZE][i % SIZE] = at[(size_t)i * PARTS * K * PART_TILES];
    const float matrix[TILE][SIZE] = RESULT_MATRIX;
    sandwich(matrix, product, found);
    Value *to = result + ((size_t)(own.n * K + blockIdx.y) * P + own.y) * Q + own.x;
#pragma unroll
    for (int i = 0; i < TILE; ++i) {
        if (own.y + i >= P) break;
        Run run;
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            run.values[j] = as_value(found[i][j]);
            if (Q % TILE != 0 && own.x + j < Q) to[i * Q + j] = run.values[j];
        }
        if (Q % TILE == 0) *reinterpret_cast<Run *>(to + i * Q) = run;
    }
}

// The weight gradient goes the same ways backward: what was computed by a matrix comes back by its transpose.
extern "C" __global__ void __launch_bounds__(THREADS) transform_gradients(const Value *gradient, Value *to) {
    const OwnTile own;
    if (!own.is_stored) return;
    float tile[TILE][TILE], found[SIZE][SIZE];
    const Value *from = gradient + (size_t)(own.n * K + blockIdx.y) * P * Q;
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            const int y = own.y + i, x = own.x + j;
            tile[i][j] = own.is_real && y < P && x < Q ? as_float(from[y * Q + x]) : 0.0f;
        }
    const float of_result[TILE][SIZE] = RESULT_MATRIX;
    float matrix[SIZE][TILE];
    transpose(of_result, matrix);
    sandwich(matrix, tile, found);
    store_places(found, to + place_of(blockIdx.y, K), (size_t)PARTS * K * PART_TILES);
}

extern "C" __global__ void __launch_bounds__(THREADS)
transform_filters_back(const float *from, Value *gradient) {
    if (own_index() >= K * CG) return;
    float product[SIZE][SIZE] = {}, found[3][3];
#pragma unroll
    for (int i = 0; i < PLACES; ++i)
        for (int part = 0; part < PARTS; ++part)
            product[i / SIZE][i % SIZE] += from[((size_t)i * PARTS + part) * K * CG + own_index()];
    const float of_filter[SIZE][3] = FILTER_MATRIX;
    float matrix[3][SIZE];
    transpose(of_filter, matrix);
    sandwich(matrix, product, found);
#pragma unroll
    for (int i = 0; i < 9; ++i) gradient[own_index() * 9 + i] = as_value(found[i / 3][i % 3]);
}
