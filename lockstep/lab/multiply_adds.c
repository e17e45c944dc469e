// As many multiply-adds as one core can do: twelve sums that do not wait for each other, all in registers.

typedef float vector __attribute__((vector_size(
#ifdef __AVX512F__
    64
#elif defined(__AVX__)
    32
#else
    16
#endif
    )));

#define SUMS 12

#ifdef __aarch64__
#define VECTOR_REGISTER "w"
#elif defined(__AVX512F__)
#define VECTOR_REGISTER "v"
#else
#define VECTOR_REGISTER "x"
#endif

static volatile float sink;

// Returns how many operations it did.
double multiply_adds(long rounds) {
    vector sum[SUMS], factor = {}, step = {};
    for (int n = 0; n < SUMS; ++n) sum[n] = (vector){} + (float)n;
    factor += 0.999f, step += 0.5f;
    for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int n = 0; n < SUMS; ++n) sum[n] += factor * step;
        __asm__ volatile("" : "+" VECTOR_REGISTER(factor));  // so that the product is not taken out of the loop
    }
    for (int n = 1; n < SUMS; ++n) sum[0] += sum[n];
    sink = sum[0][0];
    return 2.0 * rounds * SUMS * sizeof(vector) / sizeof(float);
}
