// The same loops over blocks of B that fit a core's cache: 128 rows of 512 values are 256 KB. They are read from
// memory once for all rows of A instead of once for each.

#define DEPTH 128
#define COLUMNS 512

static long least(long a, long b) { return a < b ? a : b; }

void gemm(const float *A, const float *B, float *C, long M, long N, long K, long threads) {
    for (long n = 0; n < M * N; ++n) C[n] = 0.0f;
    for (long j0 = 0; j0 < N; j0 += COLUMNS)
        for (long k0 = 0; k0 < K; k0 += DEPTH)
            for (long i = 0; i < M; ++i)
                for (long k = k0; k < least(k0 + DEPTH, K); ++k) {
                    const float value = A[i * K + k];
                    for (long j = j0; j < least(j0 + COLUMNS, N); ++j) C[i * N + j] += value * B[k * N + j];
                }
}
