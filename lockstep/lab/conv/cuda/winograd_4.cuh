// The matrices of F(4 × 4, 3 × 3): polynomials are met at 0, 1, −1, 2, −2 and infinity. Powers of 2 up to 8
// stand beside 1, so that digits are lost which smaller tiles keep.
#if TILE == 4
#define PATCH_MATRIX                                                                                         \
    {{4, 0, -5, 0, 1, 0}, {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},                                        \
     {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}}
#define FILTER_MATRIX                                                                                        \
    {{1 / 4.f, 0, 0}, {-1 / 6.f, -1 / 6.f, -1 / 6.f}, {-1 / 6.f, 1 / 6.f, -1 / 6.f},                         \
     {1 / 24.f, 1 / 12.f, 1 / 6.f}, {1 / 24.f, -1 / 12.f, 1 / 6.f}, {0, 0, 1}}
#define RESULT_MATRIX {{1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}}
#endif
