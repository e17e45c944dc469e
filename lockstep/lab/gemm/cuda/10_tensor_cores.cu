// Tensor cores: one instruction of a warp multiplies 16 × 16 by 16 × 8 values of bf16, and adds in fp32. Four
// tiles are in shared memory or on their way, copied there by `cp.async` without passing through registers.
// Rows are padded by 16 bytes, so that the eight rows of a small matrix lie in different banks.

#define ROWS 128
#define COLUMNS 256
#define DEPTH 32
#define STAGES 4
#define WARPS_X 4  // 2 × 4 warps, each 64 × 64
#define A_STRIDE (DEPTH + 8)
#define B_STRIDE (COLUMNS + 8)
#define A_SIZE (ROWS * A_STRIDE)
#define B_SIZE (DEPTH * B_STRIDE)

extern "C" __global__ void __launch_bounds__(256) gemm(const bf16 *A, const bf16 *B, bf16 *C) {
    extern __shared__ __align__(16) bf16 shared[];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int y = warp / WARPS_X * 64, x = warp % WARPS_X * 64;
    const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS, tiles = (K + DEPTH - 1) / DEPTH;
    float sum[4][8][4] = {};

    auto fetch = [&](int tile) {
        if (tile < tiles) {
            bf16 *a = shared + tile % STAGES * (A_SIZE + B_SIZE), *b = a + A_SIZE;
#pragma unroll
            for (int n = t; n < ROWS * DEPTH / 8; n += 256) {
                const int row = n / (DEPTH / 8), k = n % (DEPTH / 8) * 8;
                copy8(a + row * A_STRIDE + k, A, top + row, tile * DEPTH + k, M, K);
            }
#pragma unroll
            for (int n = t; n < DEPTH * COLUMNS / 8; n += 256) {
                const int k = n / (COLUMNS / 8), column = n % (COLUMNS / 8) * 8;
                copy8(b + k * B_STRIDE + column, B, tile * DEPTH + k, left + column, K, N);
            }
        }
        end_group();  // an empty one too, so that groups count tiles
    };

    for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);
    for (int tile = 0; tile < tiles; ++tile) {
        wait_groups<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);  // into the tile that all have left behind
        const bf16 *a = shared + tile % STAGES * (A_SIZE + B_SIZE), *b = a + A_SIZE;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned own_a[4][4], own_b[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_matrices(own_a[i], a + (y + i * 16 + lane % 16) * A_STRIDE + k + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                load_transposed(own_b[j], b + (k + lane % 16) * B_STRIDE + x + j * 16 + lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    multiply_add(sum[i][j], own_a[i], own_b[j / 2][j % 2 * 2], own_b[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int row = top + y + i * 16 + lane / 4, column = left + x + j * 8 + lane % 4 * 2;
            store2(C, row, column, sum[i][j][0], sum[i][j][1]);
            store2(C, row + 8, column, sum[i][j][2], sum[i][j][3]);
        }
}
