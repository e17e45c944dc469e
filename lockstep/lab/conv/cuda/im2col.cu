// A convolution as a product of matrices that exist: every patch of the images becomes a column, so that
// filters by columns is the forward pass. A value of the images is written R × R times; that is the price for
// the fastest product there is. The way back adds what the columns say of each value, in one order. Needs
// conv.cuh.
// Columns are stored as (C, R, R, N, P, Q): neighbouring threads write neighbouring values.

extern "C" __global__ void __launch_bounds__(THREADS) to_columns(const Value *images, Value *columns) {
    const int position = own_index(), c = blockIdx.y;
    if (position >= N * P * Q) return;
    const Place at(position, 1, P, Q);
    const Value *image = images + (size_t)(at.a * C + c) * H * W;
    Value *column = columns + (size_t)c * TAPS * N * P * Q + position;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < R; ++s) {
            const int y = at.y * STRIDE - PADDING + r * DILATION, x = at.x * STRIDE - PADDING + s * DILATION;
            column[(size_t)(r * R + s) * N * P * Q] = within(y, x, H, W) ? image[y * W + x] : as_value(0);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
from_columns(const float *columns, Value *image_gradient) {
    if (own_index() >= N * C * H * W) return;
    const Place at(own_index(), C, H, W);
    const float *column = columns + ((size_t)at.b * TAPS * N + at.a) * P * Q;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < R; ++s) {
            const int y = at.y + PADDING - r * DILATION, x = at.x + PADDING - s * DILATION;
            if (y % STRIDE == 0 && x % STRIDE == 0 && within(y / STRIDE, x / STRIDE, P, Q))
                sum += column[(size_t)(r * R + s) * N * P * Q + y / STRIDE * Q + x / STRIDE];
        }
    image_gradient[own_index()] = as_value(sum);
}
