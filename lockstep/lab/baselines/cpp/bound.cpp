// What the compiler can do at best: multiply-adds of vectors with nothing around them. As many sums as keep the
// processor busy, each in a register; what they multiply comes from two lines of the first cache. Needs tile.h.

constexpr int SUMS = LENGTH == 8 ? 12 : 24;  // registers: 16 with AVX2, 32 with NEON and AVX-512

extern "C" double multiply_add(long rounds) {
    float values[2 * LENGTH];
    for (int i = 0; i < 2 * LENGTH; ++i) values[i] = 1.0f / (rounds + i);
    Vector sum[SUMS];
    const Vector b = load(values);
    for (int i = 0; i < SUMS; ++i) sum[i] = b * (float)i;  // each another, or the compiler computes one
    for (long round = 0; round < rounds; ++round) {
        const Vector a = load(values + (round & 1) * LENGTH);  // another each time, or rounds are folded
#pragma GCC unroll 32
        for (int i = 0; i < SUMS; ++i) sum[i] += a * b;
    }
    double total = 0.0;
    for (int i = 0; i < SUMS; ++i)
        for (int l = 0; l < LENGTH; ++l) total += sum[i][l];
    return total;
}

// Operations of one round.
extern "C" long round_operations() { return 2L * LENGTH * SUMS; }
