// Three loops as the formula has them: an element of C after another. The innermost loop walks down a column of
// B, so each of its reads is from another line of memory, of which 4 of 64 bytes are used.

void gemm(const float *A, const float *B, float *C, long M, long N, long K, long threads) {
    for (long i = 0; i < M; ++i)
        for (long j = 0; j < N; ++j) {
            float sum = 0.0f;
            for (long k = 0; k < K; ++k) sum += A[i * K + k] * B[k * N + j];
            C[i * N + j] = sum;
        }
}
