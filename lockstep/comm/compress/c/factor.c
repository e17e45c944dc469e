/* Products with thin factors, each in one pass over the matrix; every sum has one order on every processor.

   Matrices are [rows, columns]. Factors are padded to a multiple of 4 columns, and transposed on the side of the
   matrix's columns: P [rows, wide], Q [wide, columns]. A sum over columns has 16 partial sums, of every 16th column,
   added in pairs; one over rows goes from the first row to the last.
   Nothing here may be contracted or reordered: compile with -ffp-contract=off and without -ffast-math. */

#include <string.h>

#define WIDTH 16

typedef float Vector __attribute__((vector_size(4 * WIDTH)));

static inline Vector load(const float *from)
{
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline Vector load_part(const float *from, long count)
{
    float room[WIDTH] = {0};
    memcpy(room, from, 4 * (size_t)count);
    return load(room);
}

static inline void store(float *to, Vector value)
{
    memcpy(to, &value, sizeof value);
}

static inline float sum_of(Vector value)
{
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            value[i] = value[i] + value[i + half];
    return value[0];
}

/* P = matrix · Qᵀ of two rows, which may be one and the same. */
static void project_rows(
    long columns, long wide, const float *a, const float *b, const float *restrict q, float *p_a, float *p_b)
{
    long even = columns - columns % WIDTH, rest = columns - even;
    for (long k = 0; k < wide; k += 4) {
        const float *side = q + k * columns;
        Vector sums_a[4] = {{0}}, sums_b[4] = {{0}};
        for (long c = 0; c < even; c += WIDTH) {
            Vector x = load(a + c), y = load(b + c);
            for (int n = 0; n < 4; n++) {
                Vector factor = load(side + n * columns + c);
                sums_a[n] += x * factor;
                sums_b[n] += y * factor;
            }
        }
        for (int n = 0; n < 4; n++) {
            if (rest) {
                Vector factor = load_part(side + n * columns + even, rest);
                sums_a[n] += load_part(a + even, rest) * factor;
                sums_b[n] += load_part(b + even, rest) * factor;
            }
            p_a[k + n] = sum_of(sums_a[n]);
            p_b[k + n] = sum_of(sums_b[n]);
        }
    }
}

/* matrix = gradient + remembered, and P = matrix · Qᵀ. */
void add_project(
    long rows, long columns, long wide, const float *grad, const float *kept, const float *q, float *restrict matrix,
    float *p)
{
    for (long r = 0; r < rows; r += 2) {
        long second = r + 1 < rows ? r + 1 : r;
        for (long i = r * columns; i < (second + 1) * columns; i++)
            matrix[i] = grad[i] + kept[i];
        project_rows(columns, wide, matrix + r * columns, matrix + second * columns, q, p + r * wide, p + second * wide);
    }
}

/* Q += Pᵀ · matrix of 8 rows, or of fewer. */
static void add_rows(
    long number, long columns, long wide, const float *restrict matrix, const float *restrict p, float *restrict q)
{
    long even = columns - columns % WIDTH;
    for (long k = 0; k < wide; k += 4) {
        float *side = q + k * columns;
        for (long c = 0; c < even; c += WIDTH) {
            Vector sums[4];
            for (int n = 0; n < 4; n++)
                sums[n] = load(side + n * columns + c);
            for (long r = 0; r < number; r++) {
                Vector x = load(matrix + r * columns + c);
                for (int n = 0; n < 4; n++)
                    sums[n] += x * p[r * wide + k + n];
            }
            for (int n = 0; n < 4; n++)
                store(side + n * columns + c, sums[n]);
        }
        for (long c = even; c < columns; c++)
            for (int n = 0; n < 4; n++)
                for (long r = 0; r < number; r++)
                    side[n * columns + c] += matrix[r * columns + c] * p[r * wide + k + n];
    }
}

/* Q = Pᵀ · matrix. */
void find_along(long rows, long columns, long wide, const float *matrix, const float *p, float *q)
{
    memset(q, 0, 4 * (size_t)(wide * columns));
    for (long r = 0; r < rows; r += 8)
        add_rows(rows - r < 8 ? rows - r : 8, columns, wide, matrix + r * columns, p + r * wide, q);
}

/* P · Q, or if a matrix is given what it has beside that, which may be written over it. */
void multiply(long rows, long columns, long wide, const float *p, const float *q, const float *matrix, float *found)
{
    long even = columns - columns % WIDTH;
    for (long r = 0; r < rows; r++) {
        const float *mine = p + r * wide, *before = matrix ? matrix + r * columns : NULL;
        float *row = found + r * columns;
        for (long c = 0; c < even; c += WIDTH) {
            Vector sum = load(q + c) * mine[0];
            for (long k = 1; k < wide; k++)
                sum += load(q + k * columns + c) * mine[k];
            store(row + c, before ? load(before + c) - sum : sum);
        }
        for (long c = even; c < columns; c++) {
            float sum = q[c] * mine[0];
            for (long k = 1; k < wide; k++)
                sum += q[k * columns + c] * mine[k];
            row[c] = before ? before[c] - sum : sum;
        }
    }
}
