// Every move is of 16 bytes: from global memory, to and from shared memory, and back. A quarter of the
// instructions for the same bytes. Needs tile.cuh.

#define ROWS 128
#define COLUMNS 128
#define DEPTH 8

extern "C" __global__ void __launch_bounds__(256) gemm(const float *A, const float *B, float *C) {
    __shared__ __align__(16) float a[DEPTH][ROWS], b[DEPTH][COLUMNS];
    const int t = threadIdx.x, x = t % 16 * 4, y = t / 16 * 4;  // two runs of 4 each way, 64 apart
    const int top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    const int a_row = t / 2, a_k = t % 2 * 4, b_k = t / 32, b_column = t % 32 * 4;
    float sum[8][8] = {};
    for (int first = 0; first < K; first += DEPTH) {
        const float4 from_a = load4(A, top + a_row, first + a_k, M, K);
        a[a_k][a_row] = from_a.x, a[a_k + 1][a_row] = from_a.y;
        a[a_k + 2][a_row] = from_a.z, a[a_k + 3][a_row] = from_a.w;
        *reinterpret_cast<float4 *>(&b[b_k][b_column]) = load4(B, first + b_k, left + b_column, K, N);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float own_a[8], own_b[8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<float4 *>(own_a + 4 * half) = *reinterpret_cast<float4 *>(&a[k][y + 64 * half]);
                *reinterpret_cast<float4 *>(own_b + 4 * half) = *reinterpret_cast<float4 *>(&b[k][x + 64 * half]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[i][j] += own_a[i] * own_b[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store4(C, top + y + i % 4 + i / 4 * 64, left + x + 64 * half, M, N,
                   *reinterpret_cast<float4 *>(&sum[i][4 * half]));
}
