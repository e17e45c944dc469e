// A tile of C in registers: ROWS rows of two vectors. A and B are packed, so that it reads both in order: of a
// panel of A the ROWS values of one k lie together, of a panel of B the WIDTH values of one k.
// GCC and Clang know vectors of any length, and use what the processor has: four values at once by NEON, eight
// by AVX2, sixteen by AVX-512.

#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LENGTH 16
#define ROWS 12
#elif defined(__AVX2__)
#define LENGTH 8
#define ROWS 6
#else
#define LENGTH 4
#define ROWS 8
#endif
#if LENGTH == 4
#define VECTORS 3
#else
#define VECTORS 2
#endif
#define WIDTH (VECTORS * LENGTH)
#define DEPTH 256   // of a panel
#define HEIGHT 192  // rows of A that are packed at once: with DEPTH they fit a core's cache

typedef float Vector __attribute__((vector_size(4 * LENGTH)));

static long least(long a, long b) { return a < b ? a : b; }

static Vector load(const float *at) {
    Vector found;
    memcpy(&found, at, sizeof found);
    return found;
}

// The tile's sums over one panel, added to C; of a tile at the edge only what C has.
static void multiply_tile(const float *a, const float *b, float *C, long N, long rows, long columns, long depth) {
    Vector sum[ROWS][VECTORS] = {};
    for (long k = 0; k < depth; ++k) {
        Vector own[VECTORS];
        for (int v = 0; v < VECTORS; ++v) own[v] = load(b + k * WIDTH + v * LENGTH);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sum[i][v] += a[k * ROWS + i] * own[v];
    }
    for (int i = 0; i < ROWS && i < rows; ++i) {
        float *row = C + i * N, *own = (float *)sum[i];
        for (long j = 0; j < least(columns, WIDTH); ++j) row[j] += own[j];
    }
}

// Columns of B side by side, WIDTH at a time, zeros beyond its edge.
static void pack_b(const float *B, float *to, long N, long columns, long depth) {
    for (long j = 0; j < columns; j += WIDTH)
        for (long k = 0; k < depth; ++k)
            for (long n = 0; n < WIDTH; ++n) *to++ = j + n < columns ? B[k * N + j + n] : 0.0f;
}

static void pack_a(const float *A, float *to, long K, long rows, long depth) {
    for (long i = 0; i < rows; i += ROWS)
        for (long k = 0; k < depth; ++k)
            for (long n = 0; n < ROWS; ++n) *to++ = i + n < rows ? A[(i + n) * K + k] : 0.0f;
}

// Rows `first` to `last` of C by one thread, for the panel of B that begins at row k0.
static void multiply_rows(const float *A, const float *b, float *a, float *C, long first, long last, long N, long K,
                          long k0) {
    const long depth = least(DEPTH, K - k0);
    for (long i0 = first; i0 < last; i0 += HEIGHT) {
        const long rows = least(HEIGHT, last - i0);
        pack_a(A + i0 * K + k0, a, K, rows, depth);
        for (long j = 0; j < N; j += WIDTH)
            for (long i = 0; i < rows; i += ROWS)
                multiply_tile(a + i * depth, b + j * depth, C + (i0 + i) * N + j, N, rows - i, N - j, depth);
    }
}
