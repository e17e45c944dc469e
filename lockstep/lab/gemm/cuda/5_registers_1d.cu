// A thread computes 8 elements below each other. A value of B is read from shared memory once for 8
// multiplications instead of for one: what held the rung before back was reading, not multiplying.

#define ROWS 64
#define COLUMNS 64
#define DEPTH 8
#define OWN 8

extern "C" __global__ void __launch_bounds__(512) gemm(const float *A, const float *B, float *C) {
    __shared__ float a[ROWS][DEPTH], b[DEPTH][COLUMNS];
    const int t = threadIdx.x, x = t % COLUMNS, y = t / COLUMNS * OWN;
    const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    float sum[OWN] = {};
    for (int first = 0; first < K; first += DEPTH) {
        const int i = t / DEPTH, k0 = t % DEPTH;  // 512 threads, 512 values of each tile
        a[i][k0] = top + i < M && first + k0 < K ? A[(size_t)(top + i) * K + first + k0] : 0.0f;
        const int k1 = t / COLUMNS, j = t % COLUMNS;
        b[k1][j] = first + k1 < K && left + j < N ? B[(size_t)(first + k1) * N + left + j] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const float value = b[k][x];
#pragma unroll
            for (int i = 0; i < OWN; ++i) sum[i] += a[y + i][k] * value;
        }
        __syncthreads();
    }
    for (int i = 0; i < OWN; ++i)
        if (top + y + i < M && left + x < N) C[(size_t)(top + y + i) * N + left + x] = sum[i];
}
