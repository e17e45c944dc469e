// What all kernels share. The shape is known to the compiler: N images of C channels, H × W; K filters of R ×
// R; results of P × Q; STRIDE, PADDING, DILATION, GROUPS. All tensors are NCHW. Values are fp32, or bf16 if
// BF16 is 1; sums are fp32 always.

#define CG (C / GROUPS)  // channels of a group
#define KG (K / GROUPS)  // filters of a group
#define TAPS (R * R)
#define THREADS 256

#if BF16
typedef unsigned short Value;
struct __align__(8) Value4 { Value x, y, z, w; };
__device__ __forceinline__ float as_float(Value value) { return __uint_as_float((unsigned)value << 16); }
__device__ __forceinline__ Value as_value(float value) {  // to the nearest, ties to even
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef float Value;
typedef float4 Value4;
__device__ __forceinline__ float as_float(Value value) { return value; }
__device__ __forceinline__ Value as_value(float value) { return value; }
#endif

// Where an index lies in a tensor of four dimensions, of which it needs the last three.
struct Place {
    int a, b, y, x;
    __device__ __forceinline__ Place(int index, int second, int height, int width)
        : a(index / (second * height * width)), b(index / (height * width) % second),
          y(index / width % height), x(index % width) {}
};

__device__ __forceinline__ bool within(int y, int x, int height, int width) {
    return (unsigned)y < (unsigned)height && (unsigned)x < (unsigned)width;
}

__device__ __forceinline__ int own_index() { return blockIdx.x * THREADS + threadIdx.x; }
