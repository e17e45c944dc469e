// im2col without the columns: the matrix B of the product exists only as places in an image. Element (k, j) is
// image[at_row[k] + at_column[j]], and is read when a panel of B is packed, which a fast product does anyway.
// So nothing R² times the size of the image is ever written to memory. Needs panel.h of the GEMM ladder.

static void gather_b(const float *image, const int *at_row, const int *at_column, float *to, long columns,
                     long depth) {
    for (long j = 0; j < columns; j += WIDTH) {
        int at[WIDTH];
        const long count = least(WIDTH, columns - j);
        for (long n = 0; n < WIDTH; ++n) at[n] = at_column[j + least(n, count - 1)];
        for (long k = 0; k < depth; ++k, to += WIDTH) {
            const float *from = image + at_row[k];
            for (long n = 0; n < WIDTH; ++n) to[n] = from[at[n]];
        }
    }
}

// C += A B for every image of a batch: M × K by K × N. A step of 0 takes the same matrix for all images.
void gathered_gemm(const float *A, const float *image, const int *at_row, const int *at_column, float *C,
                   const long *sizes) {
    const long M = sizes[0], N = sizes[1], K = sizes[2], batch = sizes[3];
    const long a_step = sizes[4], image_step = sizes[5], c_step = sizes[6];
    float *a = malloc(sizeof(float) * (HEIGHT + ROWS) * DEPTH);
    float *b = malloc(sizeof(float) * (N + WIDTH) * DEPTH);
    for (long n = 0; n < batch; ++n)
        for (long k0 = 0; k0 < K; k0 += DEPTH) {
            gather_b(image + n * image_step, at_row + k0, at_column, b, N, least(DEPTH, K - k0));
            multiply_rows(A + n * a_step, b, a, C + n * c_step, 0, M, N, K, k0);
        }
    free(a), free(b);
}
