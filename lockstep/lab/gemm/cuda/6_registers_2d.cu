// A thread computes 8 × 8 elements: 16 values read from shared memory serve 64 multiplications. A lies
// transposed in shared memory, so that a thread's 8 values of it are neighbours.

#define ROWS 128
#define COLUMNS 128
#define DEPTH 8
#define OWN 8

extern "C" __global__ void __launch_bounds__(256) gemm(const float *A, const float *B, float *C) {
    __shared__ float a[DEPTH][ROWS], b[DEPTH][COLUMNS];
    const int t = threadIdx.x, x = t % 16 * OWN, y = t / 16 * OWN;
    const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    float sum[OWN][OWN] = {};
    for (int first = 0; first < K; first += DEPTH) {
#pragma unroll
        for (int n = t; n < ROWS * DEPTH; n += 256) {
            const int i = n / DEPTH, k = n % DEPTH;
            a[k][i] = top + i < M && first + k < K ? A[(size_t)(top + i) * K + first + k] : 0.0f;
        }
#pragma unroll
        for (int n = t; n < DEPTH * COLUMNS; n += 256) {
            const int k = n / COLUMNS, j = n % COLUMNS;
            b[k][j] = first + k < K && left + j < N ? B[(size_t)(first + k) * N + left + j] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float own_a[OWN], own_b[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i) own_a[i] = a[k][y + i];
#pragma unroll
            for (int j = 0; j < OWN; ++j) own_b[j] = b[k][x + j];
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j) sum[i][j] += own_a[i] * own_b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < OWN; ++i)
        for (int j = 0; j < OWN; ++j)
            if (top + y + i < M && left + x + j < N) C[(size_t)(top + y + i) * N + left + x + j] = sum[i][j];
}
