// A block copies a tile of A and one of B to shared memory, and each value serves 32 threads. The tiles are
// flat arrays, filled by columns: the 32 threads of a warp write 32 values apart, all to one bank, one after
// another. Shared memory that is used like this can be slower than none.

extern "C" __global__ void gemm(const float *A, const float *B, float *C) {
    __shared__ float a[32 * 32], b[32 * 32];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    float sum = 0.0f;
    for (int first = 0; first < K; first += 32) {
        a[x * 32 + y] = row < M && first + x < K ? A[(size_t)row * K + first + x] : 0.0f;
        b[x * 32 + y] = first + y < K && column < N ? B[(size_t)(first + y) * N + column] : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; ++k) sum += a[k * 32 + y] * b[x * 32 + k];
        __syncthreads();
    }
    if (row < M && column < N) C[(size_t)row * N + column] = sum;
}
