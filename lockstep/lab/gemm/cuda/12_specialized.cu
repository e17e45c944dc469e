// Warps with roles: one warpgroup only asks for copies, two only multiply. Nobody stops to meet the others: a
// barrier for each stage says "full", another "empty". The copying warps give registers back, and the multiplying
// ones take them.

#define ROWS 128  // two warpgroups, 64 rows each
#define COLUMNS 256
#define STAGES 4
#define A_SIZE (ROWS * BOX)
#define B_SIZE (BOX * COLUMNS)

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, bf16 *C) {
    extern __shared__ __align__(1024) bf16 shared[];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    const int group = threadIdx.x / 128, top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    const int tiles = (K + BOX - 1) / BOX;

    if (!threadIdx.x) {
        for (int n = 0; n < STAGES; ++n) init_barrier(&full[n], 1), init_barrier(&empty[n], 2);
        show_barriers();
    }
    __syncthreads();
    if (group == 0) {  // copies
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x) return;
        for (int tile = 0; tile < tiles; ++tile) {
            const int stage = tile % STAGES;
            bf16 *a = shared + stage * (A_SIZE + B_SIZE), *b = a + A_SIZE;
            wait_for(&empty[stage], tile / STAGES % 2 ^ 1);  // all are empty at first
            expect_bytes(&full[stage], (A_SIZE + B_SIZE) * 2);
            for (int n = 0; n < ROWS; n += BOX) copy_box(a + n * BOX, A, tile * BOX, top + n, &full[stage]);
            for (int n = 0; n < COLUMNS; n += BOX) copy_box(b + n * BOX, B, left + n, tile * BOX, &full[stage]);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    float sum[128] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        const bf16 *a = shared + tile % STAGES * (A_SIZE + B_SIZE);
        wait_for(&full[tile % STAGES], tile / STAGES % 2);
        multiply_tile(sum, a + (group - 1) * BOX * BOX, a + A_SIZE);
        wait_products<1>();  // the tile before is done with
        if (tile && threadIdx.x % 128 == 0) arrive(&empty[(tile - 1) % STAGES]);
    }
    wait_products<0>();
    store_sums(C, sum, top + (group - 1) * 64, left);
}
