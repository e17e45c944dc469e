// The 32 threads of a warp share a tile of their own, as nearly square as it goes, so that together they read
// the fewest values from shared memory: most reads are of a value that other threads of the warp want too, and
// the hardware hands it to all of them. Larger tiles: 16 × 8 elements a thread. Needs tile.cuh.

#ifndef ROWS
#define ROWS 128
#define COLUMNS 256
#define DEPTH 8
#define WARP_ROWS 64
#define WARP_COLUMNS 64
#define LANES_Y 4
#endif
#define LANES_X (32 / LANES_Y)
#define THREADS (ROWS / WARP_ROWS * (COLUMNS / WARP_COLUMNS) * 32)
#define RUNS_Y (WARP_ROWS / LANES_Y / 4)
#define RUNS_X (WARP_COLUMNS / LANES_X / 4)
#define LOADS_A (ROWS * DEPTH / 4 / THREADS)
#define LOADS_B (COLUMNS * DEPTH / 4 / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS) gemm(const float *A, const float *B, float *C) {
    __shared__ __align__(16) float a[2][DEPTH][ROWS + 4], b[2][DEPTH][COLUMNS];  // + 4: other banks by k
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const int y = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS + lane / LANES_X * 4;
    const int x = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS + lane % LANES_X * 4;
    const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    float sum[4 * RUNS_Y][4 * RUNS_X] = {};
    float4 next_a[LOADS_A], next_b[LOADS_B];

    auto fetch = [&](int first) {
#pragma unroll
        for (int n = 0; n < LOADS_A; ++n) {
            const int at = t + n * THREADS;
            next_a[n] = load4(A, top + at / (DEPTH / 4), first + at % (DEPTH / 4) * 4, M, K);
        }
#pragma unroll
        for (int n = 0; n < LOADS_B; ++n) {
            const int at = t + n * THREADS;
            next_b[n] = load4(B, first + at / (COLUMNS / 4), left + at % (COLUMNS / 4) * 4, K, N);
        }
    };

    fetch(0);
    for (int first = 0, now = 0; first < K; first += DEPTH, now ^= 1) {
#pragma unroll
        for (int n = 0; n < LOADS_A; ++n) {
            const int at = t + n * THREADS, row = at / (DEPTH / 4), k = at % (DEPTH / 4) * 4;
            a[now][k][row] = next_a[n].x, a[now][k + 1][row] = next_a[n].y;
            a[now][k + 2][row] = next_a[n].z, a[now][k + 3][row] = next_a[n].w;
        }
#pragma unroll
        for (int n = 0; n < LOADS_B; ++n) {
            const int at = t + n * THREADS;
            *reinterpret_cast<float4 *>(&b[now][at / (COLUMNS / 4)][at % (COLUMNS / 4) * 4]) = next_b[n];
        }
        __syncthreads();
        if (first + DEPTH < K) fetch(first + DEPTH);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float own_a[4 * RUNS_Y], own_b[4 * RUNS_X];
#pragma unroll
            for (int run = 0; run < RUNS_Y; ++run)
                *reinterpret_cast<float4 *>(own_a + 4 * run) =
                    *reinterpret_cast<float4 *>(&a[now][k][y + run * 4 * LANES_Y]);
#pragma unroll
            for (int run = 0; run < RUNS_X; ++run)
                *reinterpret_cast<float4 *>(own_b + 4 * run) =
                    *reinterpret_cast<float4 *>(&b[now][k][x + run * 4 * LANES_X]);
#pragma unroll
            for (int i = 0; i < 4 * RUNS_Y; ++i)
#pragma unroll
                for (int j = 0; j < 4 * RUNS_X; ++j) sum[i][j] += own_a[i] * own_b[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * RUNS_Y; ++i)
#pragma unroll
        for (int run = 0; run < RUNS_X; ++run)
            store4(C, top + y + i % 4 + i / 4 * 4 * LANES_Y, left + x + run * 4 * LANES_X, M, N,
                   *reinterpret_cast<float4 *>(&sum[i][4 * run]));
}
