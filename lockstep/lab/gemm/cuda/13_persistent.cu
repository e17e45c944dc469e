// A persistent grid: as many blocks as multiprocessors, each takes tile after tile of the result. Copies for the
// next tile run while the last one is written, and tiles are taken in squares, so that those computed at one time
// share rows of A and columns of B in the cache. Two blocks form a cluster: they have the same columns of B, each
// copies half of them, and the copy engine hands it to both. Results leave through shared memory and the copy
// engine too.

#define ROWS 128  // two warpgroups, 64 rows each
#define COLUMNS 256
#define STAGES 4
#define A_SIZE (ROWS * BOX)
#define B_SIZE (BOX * COLUMNS)
#define SQUARE 16  // tiles in a column of a square
#define TILES_Y ((M + 2 * ROWS - 1) / (2 * ROWS) * 2)  // even: a cluster takes two
#define TILES_X ((N + COLUMNS - 1) / COLUMNS)
#define DEPTHS ((K + BOX - 1) / BOX)

// Which rows and columns the tile of a cluster's number has; the second block is one tile below the first.
__device__ __forceinline__ void place(int pair, int block, int &top, int &left) {
    const int in_square = SQUARE / 2 * TILES_X, first = pair / in_square * SQUARE;
    const int high = min(SQUARE, TILES_Y - first) / 2, rest = pair % in_square;
    top = (first + rest % high * 2 + block) * ROWS;
    left = rest / high * COLUMNS;
}

// Four 8 × 8 matrices to shared memory; every thread gives the address of one row.
__device__ __forceinline__ void store_matrices(bf16 *at, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)),
                 "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B,
         const __grid_constant__ TensorMap C) {
    extern __shared__ __align__(1024) bf16 shared[];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    const int group = threadIdx.x / 128, block = blockIdx.x % 2;
    bf16 *results = shared + STAGES * (A_SIZE + B_SIZE);

    if (!threadIdx.x) {
        for (int n = 0; n < STAGES; ++n) init_barrier(&full[n], 1), init_barrier(&empty[n], 4);
        show_barriers();
    }
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    int stage = 0, round = 0, top, left;
    auto advance = [&] { if (++stage == STAGES) stage = 0, round ^= 1; };

    if (group == 0) {  // copies
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            for (int pair = blockIdx.x / 2; pair < TILES_Y / 2 * TILES_X; pair += gridDim.x / 2) {
                place(pair, block, top, left);
                for (int tile = 0; tile < DEPTHS; ++tile, advance()) {
                    bf16 *a = shared + stage * (A_SIZE + B_SIZE), *b = a + A_SIZE;
                    wait_for(&empty[stage], round ^ 1);  // in both blocks: a copy goes to both
                    expect_bytes(&full[stage], (A_SIZE + B_SIZE) * 2);
                    for (int n = 0; n < ROWS; n += BOX) copy_box(a + n * BOX, A, tile * BOX, top + n, &full[stage]);
                    for (int n = block * COLUMNS / 2; n < (block + 1) * COLUMNS / 2; n += BOX)
                        copy_box_to_both(b + n * BOX, B, left + n, tile * BOX, &full[stage]);
                }
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int t = threadIdx.x % 128, lane = t % 32, warp = t / 32;
        bf16 *own = results + (group - 1) * 2 * 64 * BOX;  // two boxes: one is filled while one leaves
        for (int pair = blockIdx.x / 2; pair < TILES_Y / 2 * TILES_X; pair += gridDim.x / 2) {
            float sum[128] = {};
            place(pair, block, top, left);
            for (int tile = 0; tile < DEPTHS; ++tile, advance()) {
                const bf16 *a = shared + stage * (A_SIZE + B_SIZE);
                wait_for(&full[stage], round);
                multiply_tile(sum, a + (group - 1) * BOX * BOX, a + A_SIZE);
                wait_products<0>();  // the other warpgroup keeps the tensor cores busy
                if (t < 2) arrive_at(&empty[stage], t);  // in both blocks
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / BOX; ++n) {
                bf16 *box = own + n % 2 * 64 * BOX;
                const int row = warp * 16 + lane % 16;
                if (t == 0) wait_stores_read<1>();  // what was in this box has left
                asm volatile("bar.sync %0, 128;" ::"r"(group));
#pragma unroll
                for (int j = 0; j < 4; ++j) {  // 16 columns: 8 × 8 matrices above and below, left and right
                    const float *own_sum = sum + n * 32 + j * 8;
                    store_matrices(box + row * BOX + ((j * 2 + lane / 16) ^ (row % 8)) * 8,
                                   round2(own_sum[0], own_sum[1]), round2(own_sum[2], own_sum[3]),
                                   round2(own_sum[4], own_sum[5]), round2(own_sum[6], own_sum[7]));
                }
                show_to_copies();
                asm volatile("bar.sync %0, 128;" ::"r"(group));
                if (t == 0) store_box(C, box, left + n * BOX, top + (group - 1) * 64), end_stores();
            }
        }
        if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");  // no arrival comes too late
}
