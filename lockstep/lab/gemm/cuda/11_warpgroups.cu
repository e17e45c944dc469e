// Products of a warpgroup (wgmma): four warps multiply 64 × 16 by 16 × 256 in one instruction that reads A and B
// from shared memory, so no thread loads them into registers. The copy engine (TMA) brings the tiles: one thread
// asks for a box, and a barrier tells when its bytes are there.

#define ROWS 128  // two warpgroups, 64 rows each
#define COLUMNS 256
#define STAGES 4
#define A_SIZE (ROWS * BOX)
#define B_SIZE (BOX * COLUMNS)

extern "C" __global__ void __launch_bounds__(256)
    gemm(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, bf16 *C) {
    extern __shared__ __align__(1024) bf16 shared[];
    __shared__ unsigned long long full[STAGES];
    const int group = threadIdx.x / 128, top = blockIdx.y * ROWS, left = blockIdx.x * COLUMNS;
    const int tiles = (K + BOX - 1) / BOX;
    float sum[128] = {};

    auto fetch = [&](int tile) {
        if (threadIdx.x || tile >= tiles) return;
        bf16 *a = shared + tile % STAGES * (A_SIZE + B_SIZE), *b = a + A_SIZE;
        unsigned long long *barrier = &full[tile % STAGES];
        expect_bytes(barrier, (A_SIZE + B_SIZE) * 2);
        for (int n = 0; n < ROWS; n += BOX) copy_box(a + n * BOX, A, tile * BOX, top + n, barrier);
        for (int n = 0; n < COLUMNS; n += BOX) copy_box(b + n * BOX, B, left + n, tile * BOX, barrier);
    };

    if (!threadIdx.x) {
        for (int n = 0; n < STAGES; ++n) init_barrier(&full[n], 1);
        show_barriers();
    }
    __syncthreads();
    for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);
    for (int tile = 0; tile < tiles; ++tile) {
        const bf16 *a = shared + tile % STAGES * (A_SIZE + B_SIZE);
        wait_for(&full[tile % STAGES], tile / STAGES % 2);
        multiply_tile(sum, a + group * BOX * BOX, a + A_SIZE);
        wait_products<1>();  // the tile before is done with
        __syncthreads();
        fetch(tile + STAGES - 1);
    }
    wait_products<0>();
    store_sums(C, sum, top + group * 64, left);
}
