// The definition, as it stands: one thread computes one element of the result, and walks over all products
// that belong to it. Neighbouring threads read neighbouring values, but every value comes from memory or a
// cache each time it is used. Needs conv.cuh.

extern "C" __global__ void __launch_bounds__(THREADS)
forward(const Value *images, const Value *weight, Value *result) {
    if (own_index() >= N * K * P * Q) return;
    const Place at(own_index(), K, P, Q);
    const Value *image = images + (size_t)(at.a * C + at.b / KG * CG) * H * W;
    const Value *filter = weight + at.b * CG * TAPS;
    float sum = 0;
    for (int c = 0; c < CG; ++c)
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < R; ++s) {
                const int y = at.y * STRIDE - PADDING + r * DILATION;
                const int x = at.x * STRIDE - PADDING + s * DILATION;
                if (within(y, x, H, W))
                    sum += as_float(image[(c * H + y) * W + x]) * as_float(filter[(c * R + r) * R + s]);
            }
    result[own_index()] = as_value(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
data_gradient(const Value *result_gradient, const Value *weight, Value *image_gradient) {
    if (own_index() >= N * C * H * W) return;
    const Place at(own_index(), C, H, W);
    const int group = at.b / CG;
    const Value *gradient = result_gradient + (size_t)(at.a * K + group * KG) * P * Q;
    const Value *filter = weight + (group * KG * CG + at.b % CG) * TAPS;
    float sum = 0;
    for (int k = 0; k < KG; ++k)
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < R; ++s) {
                const int y = at.y + PADDING - r * DILATION, x = at.x + PADDING - s * DILATION;
                if (y % STRIDE == 0 && x % STRIDE == 0 && within(y / STRIDE, x / STRIDE, P, Q))
                    sum += as_float(gradient[(k * P + y / STRIDE) * Q + x / STRIDE]) *
                           as_float(filter[(k * CG * R + r) * R + s]);
            }
    image_gradient[own_index()] = as_value(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const Value *images, const Value *result_gradient, Value *gradient) {
    if (own_index() >= K * CG * TAPS) return;
    const Place at(own_index(), CG, R, R);
    float sum = 0;
    for (int n = 0; n < N; ++n) {
        const Value *image = images + (size_t)(n * C + at.a / KG * CG + at.b) * H * W;
        const Value *of_result = result_gradient + (size_t)(n * K + at.a) * P * Q;
        for (int p = 0; p < P; ++p) {
            float row = 0;  // a sum of sums: rounding grows with the longest, not with all
            for (int q = 0; q < Q; ++q) {
                const int y = p * STRIDE - PADDING + at.y * DILATION;
                const int x = q * STRIDE - PADDING + at.x * DILATION;
                if (within(y, x, H, W)) row += as_float(image[y * W + x]) * as_float(of_result[p * Q + q]);
            }
            sum += row;
        }
    }
    gradient[own_index()] = as_value(sum);
}
