// A tile of C stays in registers while a panel of A and one of B pass by: a value of A serves two or three
// vectors of B, and a vector of B as many rows as there are registers for. Both are copied into the order in
// which they are read. Needs panel.h.

void gemm(const float *A, const float *B, float *C, long M, long N, long K, long threads) {
    float *a = malloc(sizeof(float) * (HEIGHT + ROWS) * DEPTH);
    float *b = malloc(sizeof(float) * (N + WIDTH) * DEPTH);
    memset(C, 0, sizeof(float) * M * N);
    for (long k0 = 0; k0 < K; k0 += DEPTH) {
        pack_b(B + k0 * N, b, N, N, least(DEPTH, K - k0));
        multiply_rows(A, b, a, C, 0, M, N, K, k0);
    }
    free(a), free(b);
}
