// One thread computes one element of C, and reads a row of A and a column of B from global memory.
// Neighbouring threads take neighbouring rows, so a warp's reads of A are K values apart: each is a memory
// transaction of its own, of which 4 of 32 bytes are used.

extern "C" __global__ void gemm(const float *A, const float *B, float *C) {
    const int row = blockIdx.y * 16 + threadIdx.x, column = blockIdx.x * 16 + threadIdx.y;
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += A[(size_t)row * K + k] * B[(size_t)k * N + column];
    C[(size_t)row * N + column] = sum;
}
