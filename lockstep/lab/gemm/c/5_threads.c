// The rows of C are dealt to threads; each packs its own rows of A, and all read the same panel of B. No two
// threads write the same value, so the bits are those of one thread. Needs panel.h.

#include <pthread.h>

typedef struct {
    const float *A, *b;
    float *C;
    long first, last, N, K, k0;
} Part;

static void *work(void *given) {
    const Part *own = given;
    float *a = malloc(sizeof(float) * (HEIGHT + ROWS) * DEPTH);
    multiply_rows(own->A, own->b, a, own->C, own->first, own->last, own->N, own->K, own->k0);
    free(a);
    return 0;
}

void gemm(const float *A, const float *B, float *C, long M, long N, long K, long threads) {
    float *b = malloc(sizeof(float) * (N + WIDTH) * DEPTH);
    pthread_t started[1024];
    Part parts[1024];
    threads = threads < 1 ? 1 : least(threads, 1024);
    memset(C, 0, sizeof(float) * M * N);
    for (long k0 = 0; k0 < K; k0 += DEPTH) {
        pack_b(B + k0 * N, b, N, N, least(DEPTH, K - k0));
        for (long t = 0; t < threads; ++t) {
            parts[t] = (Part){A, b, C, M * t / threads, M * (t + 1) / threads, N, K, k0};
            if (t) pthread_create(&started[t], 0, work, &parts[t]);
        }
        work(&parts[0]);
        for (long t = 1; t < threads; ++t) pthread_join(started[t], 0);
    }
    free(b);
}
