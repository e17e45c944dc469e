// The two inner loops change places. The innermost one walks along a row of B and a row of C, whose values are
// neighbours: the caches bring 16 at once, and the compiler can multiply several at once.

void gemm(const float *A, const float *B, float *C, long M, long N, long K, long threads) {
    for (long i = 0; i < M; ++i) {
        for (long j = 0; j < N; ++j) C[i * N + j] = 0.0f;
        for (long k = 0; k < K; ++k) {
            const float value = A[i * K + k];
            for (long j = 0; j < N; ++j) C[i * N + j] += value * B[k * N + j];
        }
    }
}
