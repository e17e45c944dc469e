// Neighbouring threads take neighbouring columns. A warp's reads of B and writes of C are now one run of
// memory, and all of its reads of A are the same value: the hardware makes few transactions of them.

extern "C" __global__ void gemm(const float *A, const float *B, float *C) {
    const int row = blockIdx.y * 32 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += A[(size_t)row * K + k] * B[(size_t)k * N + column];
    C[(size_t)row * N + column] = sum;
}
