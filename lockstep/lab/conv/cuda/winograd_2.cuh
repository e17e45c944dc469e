// The matrices of F(2 × 2, 3 × 3): polynomials are met at 0, 1, −1 and infinity.
#if TILE == 2
#define PATCH_MATRIX {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}}
#define FILTER_MATRIX {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}}
#define RESULT_MATRIX {{1, 1, 1, 0}, {0, 1, -1, -1}}
#endif
