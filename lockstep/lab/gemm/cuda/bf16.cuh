// bf16 as 16 bits, copies to shared memory that run beside computing, and the tensor cores' instructions.
// M, N and K are known to the compiler: rows that are a multiple of eight values long are moved 16 bytes at a
// time, others one value at a time.

typedef unsigned short bf16;

__device__ __forceinline__ unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }

// Eight values to shared memory, zeros beyond the edge.
__device__ __forceinline__ void copy8(bf16 *to, const bf16 *from, int row, int column, int rows, int columns) {
    if (columns % 8 == 0) {
        const bool is_inside = row < rows && column < columns;
        const bf16 *at = is_inside ? from + (size_t)row * columns + column : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(at),
                     "r"(is_inside ? 16 : 0));
        return;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
        to[n] = row < rows && column + n < columns ? from[(size_t)row * columns + column + n] : (bf16)0;
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;"); }
template <int left>
__device__ __forceinline__ void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(left)); }

// Four 8 × 8 matrices, the rows of which lie at the addresses that the 32 threads give.
__device__ __forceinline__ void load_matrices(unsigned (&into)[4], const bf16 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3]) : "r"(shared_address(at)));
}
__device__ __forceinline__ void load_transposed(unsigned (&into)[4], const bf16 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3]) : "r"(shared_address(at)));
}

// 16 × 16 by 16 × 8, added to sums in fp32.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two sums as bf16, rounded to nearest.
__device__ __forceinline__ unsigned round2(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ void store2(bf16 *C, int row, int column, float low, float high) {
    if (row >= M || column >= N) return;
    const unsigned both = round2(low, high);
    bf16 *at = C + (size_t)row * N + column;
    if (N % 2 == 0) {
        *reinterpret_cast<unsigned *>(at) = both;
        return;
    }
    at[0] = (bf16)both;
    if (column + 1 < N) at[1] = (bf16)(both >> 16);
}
