// What a Hopper GPU has beside: a copy engine that brings whole tiles (TMA), barriers that count its bytes, and
// products of a warpgroup (four warps) that read their operands from shared memory.
// A tile in shared memory has rows of 128 bytes, in which 16-byte pieces are swapped by the row's number
// (swizzled): eight rows read at one place meet eight different sets of banks. Copy engine and products agree.

struct alignas(64) TensorMap { char opaque[128]; };  // where a matrix lies, and how large a box is

#define BOX 64  // values in a row of a tile: 128 bytes

__device__ __forceinline__ void init_barrier(unsigned long long *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(unsigned long long *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned long long *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// The same barrier of another block of the cluster. What was only read needs no fence, and with ".release.cluster"
// every arrival would wait for all of the GPU's memory.
__device__ __forceinline__ void arrive_at(unsigned long long *barrier, int block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
                 "r"(block) : "memory");
}
__device__ __forceinline__ void wait_for(unsigned long long *barrier, int parity) {
    asm volatile("{ .reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN; }" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// A box of the matrix to shared memory; the barrier counts its bytes. Zeros beyond the edge.
__device__ __forceinline__ void copy_box(void *to, const TensorMap &map, int column, int row,
                                         unsigned long long *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(barrier)), "r"(column), "r"(row) : "memory");
}
// The same to two blocks of a cluster at once, and to the barrier of each.
__device__ __forceinline__ void copy_box_to_both(void *to, const TensorMap &map, int column, int row,
                                                 unsigned long long *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(barrier)), "r"(column), "r"(row), "h"((unsigned short)3) : "memory");
}
// A box from shared memory to the matrix; what lies beyond the edge is not written.
__device__ __forceinline__ void store_box(const TensorMap &map, const void *from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Where an operand lies, for the product. `near` and `far` are bytes between its groups of eight rows and between
// its boxes; the last bits say that 16-byte pieces are swapped within 128 bytes.
__device__ __forceinline__ unsigned long long describe(const void *at, int far, int near) {
    return (unsigned long long)(shared_address(at) >> 4 & 0x3fff) | (unsigned long long)(far >> 4) << 16 |
           (unsigned long long)(near >> 4) << 32 | 1ull << 62;
}

#define SUMS8(n) "+f"(sum[n]), "+f"(sum[n + 1]), "+f"(sum[n + 2]), "+f"(sum[n + 3]), "+f"(sum[n + 4]), \
                 "+f"(sum[n + 5]), "+f"(sum[n + 6]), "+f"(sum[n + 7])
#define SUMS32(n) SUMS8(n), SUMS8(n + 8), SUMS8(n + 16), SUMS8(n + 24)

// 64 × 16 by 16 × 256: A by rows, B by rows too (so it is "transposed" for the tensor core). A thread holds 128
// sums: for every eight columns two of row lane / 4 and two of the row eight below.
__device__ __forceinline__ void multiply_256(float (&sum)[128], unsigned long long a, unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,"
        "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,"
        "%124,%125,%126,%127}, %128, %129, 1, 1, 1, 0, 1;"
        : SUMS32(0), SUMS32(32), SUMS32(64), SUMS32(96) : "l"(a), "l"(b));
}

// A tile of A (64 rows) by one of B (256 columns), both 64 deep.
__device__ __forceinline__ void multiply_tile(float (&sum)[128], const bf16 *a, const bf16 *b) {
    begin_products();
#pragma unroll
    for (int k = 0; k < BOX; k += 16)
        multiply_256(sum, describe(a + k, 0, 8 * BOX * 2), describe(b + k * BOX, BOX * BOX * 2, 8 * BOX * 2));
    end_products();
}

// A warpgroup's 64 × 256 sums to the matrix, from registers.
__device__ __forceinline__ void store_sums(bf16 *C, const float (&sum)[128], int top, int left) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        const int row = top + warp * 16 + lane / 4, column = left + j * 8 + lane % 4 * 2;
        store2(C, row, column, sum[j * 4], sum[j * 4 + 1]);
        store2(C, row + 8, column, sum[j * 4 + 2], sum[j * 4 + 3]);
    }
}
