// The sum that defines a convolution, as seven loops. The innermost runs along a row of the result, where
// neighbours read neighbours, so that the compiler makes vectors of it. Every multiplication reads a value of the
// image again, and reads and writes a result: that traffic, not arithmetic, is what it costs.
// Images come padded, so that no loop asks where the edge is.

typedef struct {
    long batch, groups, inside, outside;  // channels and filters of a group
    long height, width;                   // of a padded image
    long rows, columns;                   // of a result
    long kernel, stride, dilation;
} Sizes;

// For every row of a result, and every value of a filter that a row of the image meets there:
#define FOR_ALL_ROWS                                          \
    for (long n = 0; n < z->batch; ++n)                       \
        for (long g = 0; g < z->groups; ++g)                  \
            for (long k = 0; k < z->outside; ++k)             \
                for (long c = 0; c < z->inside; ++c)          \
                    for (long r = 0; r < z->kernel; ++r)      \
                        for (long s = 0; s < z->kernel; ++s)  \
                            for (long p = 0; p < z->rows; ++p)
#define IMAGE_ROW                                                                                                    \
    (image + s * z->dilation +                                                                                       \
     (((n * z->groups + g) * z->inside + c) * z->height + p * z->stride + r * z->dilation) * z->width)
#define RESULT_ROW (result + (((n * z->groups + g) * z->outside + k) * z->rows + p) * z->columns)
#define FILTER_VALUE (weight + (((g * z->outside + k) * z->inside + c) * z->kernel + r) * z->kernel + s)

void direct_forward(const float *image, const float *weight, float *result, const Sizes *z) {
    FOR_ALL_ROWS {
        const float *restrict x = IMAGE_ROW, w = *FILTER_VALUE;
        float *restrict y = RESULT_ROW;
        const long columns = z->columns, stride = z->stride;
        for (long q = 0; q < columns; ++q) y[q] += w * x[q * stride];
    }
}

void direct_data(const float *result, const float *weight, float *image, const Sizes *z) {
    FOR_ALL_ROWS {
        const float *restrict y = RESULT_ROW, w = *FILTER_VALUE;
        float *restrict x = IMAGE_ROW;
        const long columns = z->columns, stride = z->stride;
        for (long q = 0; q < columns; ++q) x[q * stride] += w * y[q];
    }
}

// The compiler may not change the order of one sum. LANES sums beside each other are a vector.
#define LANES 16

static float dot(const float *x, const float *y, long count, long stride) {
    float sums[LANES] = {0}, total = 0;
    long q = 0;
    if (stride == 1)
        for (; q + LANES <= count; q += LANES)
            for (int v = 0; v < LANES; ++v) sums[v] += x[q + v] * y[q + v];
    for (; q < count; ++q) total += x[q * stride] * y[q];
    for (int v = 0; v < LANES; ++v) total += sums[v];
    return total;
}

void direct_weight(const float *image, const float *result, float *weight, const Sizes *z) {
    FOR_ALL_ROWS *FILTER_VALUE += dot(IMAGE_ROW, RESULT_ROW, z->columns, z->stride);
}
