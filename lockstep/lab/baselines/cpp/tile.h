// The two inner loops of the network. All its work is in products of matrices, and both loops keep a tile of a
// product in registers. GCC and Clang know vectors of any length, and use what the processor has.
#include <cstring>

#if defined(__AVX512F__)
constexpr int LENGTH = 16, VECTORS = 2, ROWS = 8;  // with 12 the compiler runs out of registers
#elif defined(__AVX2__)
constexpr int LENGTH = 8, VECTORS = 2, ROWS = 6;
#else
constexpr int LENGTH = 4, VECTORS = 4, ROWS = 6;
#endif
constexpr int WIDTH = VECTORS * LENGTH;  // columns of a tile: 16 or 32, which divides all numbers of channels

typedef float Vector __attribute__((vector_size(4 * LENGTH)));

typedef int Mask __attribute__((vector_size(4 * LENGTH)));

static inline Vector load(const float *at) {
    Vector found;
    memcpy(&found, at, sizeof found);
    return found;
}

template <class Any, class Value>
static inline void store(Any *at, Value value) {
    memcpy(at, &value, sizeof value);
}

// What is summed before: a row for each row of C, or with a step of 0 the same (the bias) for all.
struct Begin {
    const float *at;
    long row;
};

// The left factor: row i begins at at + i * row, and goes on for `lines` pieces of `depth` values.
struct Left {
    const float *at;
    long row, line, lines;
};

// R rows of C = begin + A · B. B is packed: WIDTH values for each value of a row of A.
template <int R>
static void multiply_tile(Left a, const float *b, long depth, float *c, long c_row, Begin begin) {
    Vector sum[R][VECTORS];
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) sum[i][v] = load(begin.at + i * begin.row + v * LENGTH);
    for (long line = 0; line < a.lines; ++line, a.at += a.line)
        for (long k = 0; k < depth; ++k, b += WIDTH) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                const Vector own = load(b + v * LENGTH);
#pragma GCC unroll 16
                for (int i = 0; i < R; ++i) sum[i][v] += a.at[i * a.row + k] * own;
            }
        }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) store(c + i * c_row + v * LENGTH, sum[i][v]);
}

// As many rows as there are in tiles of R; what is left is moved up to.
template <int R>
static void multiply_tiles(long &rows, Left &a, const float *b, long depth, float *&c, long c_row, Begin &begin) {
    for (; rows >= R; rows -= R, a.at += R * a.row, c += R * c_row, begin.at += R * begin.row)
        multiply_tile<R>(a, b, depth, c, c_row, begin);
}

// Any number of rows: ROWS at a time, then fewer.
static void multiply_rows(long rows, Left a, const float *b, long depth, float *c, long c_row, Begin begin) {
    multiply_tiles<ROWS>(rows, a, b, depth, c, c_row, begin);
    multiply_tiles<4>(rows, a, b, depth, c, c_row, begin);
    multiply_tiles<1>(rows, a, b, depth, c, c_row, begin);
}

// R rows and WIDTH columns of C += Aᵀ · B, summed over `height` lines of `width` samples (pixels, or images of a
// batch). A sample of A begins `a_step` after the one before, and a line `a_line`. B is a panel: WIDTH values for
// each sample.
template <int R>
static void add_outer(const float *a, long a_step, long a_line, const float *b, long height, long width, float *c,
                      long c_row) {
    Vector sum[R][VECTORS];
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) sum[i][v] = load(c + i * c_row + v * LENGTH);
    for (long y = 0; y < height; ++y) {
        const float *own_a = a + y * a_line;
        for (long x = 0; x < width; ++x, own_a += a_step, b += WIDTH) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                const Vector own = load(b + v * LENGTH);
#pragma GCC unroll 16
                for (int i = 0; i < R; ++i) sum[i][v] += own_a[i] * own;
            }
        }
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) store(c + i * c_row + v * LENGTH, sum[i][v]);
}
