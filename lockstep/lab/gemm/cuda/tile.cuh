// Four neighbouring values at once: `load4` from global memory, zeros beyond the edge; `store4` back.
// Where rows are not a multiple of four long, their values are not aligned, and are moved one by one. M, N and
// K are known to the compiler, which leaves out what a shape does not need.

__device__ __forceinline__ float4 load4(const float *from, int row, int column, int rows, int columns) {
    const float *at = from + (size_t)row * columns + column;
    if (columns % 4 == 0)
        return row < rows && column < columns ? *reinterpret_cast<const float4 *>(at) : float4{};
    float4 found = {};
    if (row < rows) {
        if (column < columns) found.x = at[0];
        if (column + 1 < columns) found.y = at[1];
        if (column + 2 < columns) found.z = at[2];
        if (column + 3 < columns) found.w = at[3];
    }
    return found;
}

__device__ __forceinline__ void store4(float *to, int row, int column, int rows, int columns, float4 value) {
    float *at = to + (size_t)row * columns + column;
    if (row >= rows) return;
    if (columns % 4 == 0) {
        if (column < columns) *reinterpret_cast<float4 *>(at) = value;
        return;
    }
    if (column < columns) at[0] = value.x;
    if (column + 1 < columns) at[1] = value.y;
    if (column + 2 < columns) at[2] = value.z;
    if (column + 3 < columns) at[3] = value.w;
}
