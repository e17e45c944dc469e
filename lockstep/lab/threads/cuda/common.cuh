// What all kernels share: the loop that deals work items to T threads, wide loads, and a pixel's
// neighbours.
//
// Thread t of T does the items t, t + T, t + 2 T, … So T decides who does an item, and never how: an item
// computes its results in one fixed order, and no two items share a result. That is why every T gives the
// same bits.

// The inside of a kernel's `for`.
#define EACH(item, count) \
    int item = blockIdx.x * blockDim.x + threadIdx.x; item < (count); item += gridDim.x * blockDim.x

struct alignas(8) Two {
    float at[2];
};
struct alignas(16) Four {
    float at[4];
};

__device__ inline Two load2(const float *from) { return *reinterpret_cast<const Two *>(from); }
__device__ inline Four load4(const float *from) { return *reinterpret_cast<const Four *>(from); }

#ifdef H
// The 4 × 4 values around a square of 2 × 2 pixels whose first is (y, x); outside of the image they are 0.
__device__ inline void load_around(const float *pixel, int y, int x, float around[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool in_rows = (i > 0 || y > 0) && (i < 3 || y + 2 < H);
            const bool in_columns = (j > 0 || x > 0) && (j < 3 || x + 2 < W);
            around[i][j] = in_rows && in_columns ? pixel[(i - 1) * W + j - 1] : 0.0f;
        }
}
#endif
