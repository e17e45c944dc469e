// Lets g++ compile a CUDA kernel's source and run it on a CPU, one block after another.
// The threads of a block are contexts that take turns: each runs until it waits at a barrier.
// `reversed` starts them in the opposite order, which shows a barrier that is missing.
// Kernels may use static shared memory, __syncthreads, __syncwarp, shuffles and atomicAdd.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct uint3 { unsigned x, y, z; };
#define VECTOR_TYPES(of, name)                                                                               \
    struct alignas(2 * sizeof(of)) name##2 { of x, y; };                                                     \
    struct alignas(4 * sizeof(of)) name##4 { of x, y, z, w; };                                               \
    inline name##2 make_##name##2(of x, of y) { return {x, y}; }                                             \
    inline name##4 make_##name##4(of x, of y, of z, of w) { return {x, y, z, w}; }
VECTOR_TYPES(float, float)
VECTOR_TYPES(int, int)
VECTOR_TYPES(unsigned, uint)
VECTOR_TYPES(unsigned short, ushort)

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace on_cpu {
enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
const int MOST_THREADS = 1024, STACK_BYTES = 128 << 10;
struct Thread {
    ucontext_t context;
    State state;
    uint3 index;
    uint64_t said;  // what a shuffle reads from another thread
};
static Thread threads[MOST_THREADS];
static char *stacks;
static ucontext_t scheduler;
static int now, count;
static void (*body)(void **);
static void **given;

inline void wait(State state) {
    threads[now].state = state;
    swapcontext(&threads[now].context, &scheduler);
}
inline void run_body() {
    body(given);
    wait(DONE);
}
inline bool release(int first, int last, State state) {  // true: some thread waited, and now goes on
    bool any = false;
    for (int t = first; t < last; ++t)
        if (threads[t].state == state) any = true;
        else if (threads[t].state != DONE) return false;
    for (int t = first; t < last; ++t)
        if (threads[t].state == state) threads[t].state = READY;
    return any;
}
inline void run_block(bool reversed) {
    for (int t = 0; t < count; ++t) {
        Thread &thread = threads[t];
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks + size_t(t) * STACK_BYTES;
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_body, 0);
        thread.state = READY;
        thread.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    }
    for (bool goes_on = true; goes_on;) {
        for (int i = 0; i < count; ++i) {
            now = reversed ? count - 1 - i : i;
            if (threads[now].state != READY) continue;
            threadIdx = threads[now].index;
            swapcontext(&scheduler, &threads[now].context);
        }
        goes_on = release(0, count, AT_BLOCK_BARRIER);
        for (int t = 0; t < count; t += warpSize)
            goes_on |= release(t, t + warpSize < count ? t + warpSize : count, AT_WARP_BARRIER);
    }
    for (int t = 0; t < count; ++t)
        if (threads[t].state != DONE) {
            fprintf(stderr, "thread %d waits at a barrier that others never reach\n", t);
            abort();
        }
}
template <class... Types, size_t... I>
void call(void (*kernel)(Types...), void **values, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<Types> *>(values[I])...);
}
template <auto kernel, class... Types> void call_with(void (*)(Types...), void **values) {
    call(kernel, values, std::index_sequence_for<Types...>());
}
// `sizes`: the grid's three, then the block's three. `values`: a pointer to each argument.
template <auto kernel> int launch(const unsigned *sizes, void **values, int reversed) {
    gridDim = {sizes[0], sizes[1], sizes[2]}, blockDim = {sizes[3], sizes[4], sizes[5]};
    count = blockDim.x * blockDim.y * blockDim.z, given = values;
    if (count > MOST_THREADS) return 1;
    body = [](void **values) { call_with<kernel>(kernel, values); };
    stacks = static_cast<char *>(malloc(size_t(count) * STACK_BYTES));
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(reversed);
    free(stacks);
    return 0;
}
}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::AT_BLOCK_BARRIER); }
inline void __syncwarp(unsigned = ~0u) { on_cpu::wait(on_cpu::AT_WARP_BARRIER); }
inline void __threadfence() {}

template <class T> T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    using namespace on_cpu;
    const int me = now, from = me / width * width + (lane & (width - 1));
    memcpy(&threads[me].said, &value, sizeof(T));
    __syncwarp();
    T found;
    memcpy(&found, &threads[from].said, sizeof(T));
    __syncwarp();
    return found;
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return __shfl_sync(mask, value, (on_cpu::now % width) ^ lanes, width);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = on_cpu::now % width + by;
    return __shfl_sync(mask, value, lane < width ? lane : lane - int(by), width);
}
template <class T> T atomicAdd(T *at, T value) {
    const T before = *at;
    *at += value;
    return before;
}

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T __ldg(const T *at) { return *at; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float value) { return __float_as_uint(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
