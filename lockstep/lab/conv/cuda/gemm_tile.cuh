// The product behind both files of implicit GEMM: a block computes ROWS × COLUMNS of the result, a thread up
// to 8 × 8 of them in registers. While one step of DEPTH is multiplied, the next is on its way from memory
// into registers, and is then put into the other half of shared memory. Needs conv.cuh.
// `operands` says what the matrices are: fetch(step) reads, keep(a, b) puts into shared memory, from(step) is
// the next step that has anything to add.

#define RUNS_Y (ROWS / 64)
#define RUNS_X (COLUMNS / 64)
#define OWN_ROWS (4 * RUNS_Y)
#define OWN_COLUMNS (4 * RUNS_X)
#define A_PITCH (ROWS + 4)  // the 4 put neighbouring depths into other banks
#define B_PITCH (COLUMNS + 4)

// A warp's threads share a tile of 4 by 8 runs of 4, so that they read few values from shared memory.
__device__ __forceinline__ int own_row(int i) {
    return (threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8) * 4 + i % 4 + i / 4 * 64;
}
__device__ __forceinline__ int own_column(int j) {
    return (threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8) * 4 + j % 4 + j / 4 * 64;
}

template <class Operands>
__device__ __forceinline__ void multiply_tile(Operands &operands, int first, int last,
                                              float (&sum)[OWN_ROWS][OWN_COLUMNS]) {
    __shared__ __align__(16) float a[2][DEPTH][A_PITCH], b[2][DEPTH][B_PITCH];
    int step = operands.from(first);
    if (step < last) operands.fetch(step);
    for (int now = 0; step < last; now ^= 1) {
        operands.keep(a[now], b[now]);
        __syncthreads();
        step = operands.from(step + 1);
        if (step < last) operands.fetch(step);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float own_a[OWN_ROWS], own_b[OWN_COLUMNS];
#pragma unroll
            for (int run = 0; run < RUNS_Y; ++run)
                *reinterpret_cast<float4 *>(own_a + 4 * run) =
                    *reinterpret_cast<float4 *>(&a[now][k][own_row(4 * run)]);
#pragma unroll
            for (int run = 0; run < RUNS_X; ++run)
                *reinterpret_cast<float4 *>(own_b + 4 * run) =
                    *reinterpret_cast<float4 *>(&b[now][k][own_column(4 * run)]);
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < OWN_COLUMNS; ++j) sum[i][j] += own_a[i] * own_b[j];
        }
    }
}
