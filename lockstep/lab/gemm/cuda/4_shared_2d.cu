// The same tiles as arrays of rows: a warp writes a row, one value to each bank, and reads one value of A,
// which all threads get at once, and a row of B. No thread waits for a bank.

extern "C" __global__ void gemm(const float *A, const float *B, float *C) {
    __shared__ float a[32][32], b[32][32];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    float sum = 0.0f;
    for (int first = 0; first < K; first += 32) {
        a[y][x] = row < M && first + x < K ? A[(size_t)row * K + first + x] : 0.0f;
        b[y][x] = first + y < K && column < N ? B[(size_t)(first + y) * N + column] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; ++k) sum += a[y][k] * b[k][x];
        __syncthreads();
    }
    if (row < M && column < N) C[(size_t)row * N + column] = sum;
}
