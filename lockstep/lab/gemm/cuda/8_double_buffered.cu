// Two tiles of each: while one is multiplied, the next is on its way from global memory into registers, and is
// then put into the other. One barrier a tile instead of two, and the wait for memory is hidden.

#define ROWS 128
#define COLUMNS 128
#define DEPTH 8

extern "C" __global__ void __launch_bounds__(256) gemm(const float *A, const float *B, float *C) {
    __shared__ __align__(16) float a[2][DEPTH][ROWS], b[2][DEPTH][COLUMNS];
    const int t = threadIdx.x, x = t % 16 * 4, y = t / 16 * 4;
    const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    const int a_row = t / 2, a_k = t % 2 * 4, b_k = t / 32, b_column = t % 32 * 4;
    float sum[8][8] = {};
    float4 next_a = load4(A, top + a_row, a_k, M, K), next_b = load4(B, b_k, left + b_column, K, N);
    for (int first = 0, now = 0; first < K; first += DEPTH, now ^= 1) {
        a[now][a_k][a_row] = next_a.x, a[now][a_k + 1][a_row] = next_a.y;
        a[now][a_k + 2][a_row] = next_a.z, a[now][a_k + 3][a_row] = next_a.w;
        *reinterpret_cast<float4 *>(&b[now][b_k][b_column]) = next_b;
        __syncthreads();
        next_a = load4(A, top + a_row, first + DEPTH + a_k, M, K);
        next_b = load4(B, first + DEPTH + b_k, left + b_column, K, N);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float own_a[8], own_b[8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<float4 *>(own_a + 4 * half) =
                    *reinterpret_cast<float4 *>(&a[now][k][y + 64 * half]);
                *reinterpret_cast<float4 *>(own_b + 4 * half) =
                    *reinterpret_cast<float4 *>(&b[now][k][x + 64 * half]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[i][j] += own_a[i] * own_b[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store4(C, top + y + i % 4 + i / 4 * 64, left + x + 64 * half, M, N,
                   *reinterpret_cast<float4 *>(&sum[i][4 * half]));
}
