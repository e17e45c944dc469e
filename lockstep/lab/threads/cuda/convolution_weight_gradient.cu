// Convolution 3 × 3 with padding 1, gradients of its weights and biases.
//
// Few results, and each is a sum over all pixels of all images: with an item for each result most threads
// would have nothing to do. So the sum is cut into H × W parts, whatever the number of threads: an item
// sums one pixel over all images, for 8 filters, 2 channels and all 9 taps at once, 144 sums in registers.
// Parts of a sum are written side by side, and add_parts of sums.cu adds them in their order. Neighbouring
// threads have neighbouring pixels. Needs common.cuh, and CO divisible by 8.

#define FILTERS 8
#define CHANNELS (CI % 2 ? 1 : 2)

extern "C" __global__ void __launch_bounds__(256)
    convolution_weight_gradient(const float *input, const float *gradient, float *weight_parts,
                                float *bias_parts, int images) {
    for (EACH(item, CO / FILTERS * (CI / CHANNELS) * H * W)) {
        const int pixel = item % (H * W), x = pixel % W, y = pixel / W;
        const int channel = item / (H * W) % (CI / CHANNELS) * CHANNELS;
        const int filter = item / (H * W * (CI / CHANNELS)) * FILTERS;
        const float *source = input + channel * H * W + pixel, *given = gradient + filter * H * W + pixel;
        float sum[FILTERS][CHANNELS][9] = {};

        for (int image = 0; image < images; ++image) {
            float around[CHANNELS][9];
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
                for (int tap = 0; tap < 9; ++tap) {
                    const int i = tap / 3 - 1, j = tap % 3 - 1;
                    const bool is_inside = y + i >= 0 && y + i < H && x + j >= 0 && x + j < W;
                    const float *at = source + (size_t)image * CI * H * W + (c * H + i) * W + j;
                    around[c][tap] = is_inside ? *at : 0.0f;
                }
#pragma unroll
            for (int f = 0; f < FILTERS; ++f) {
                const float own = given[(size_t)image * CO * H * W + f * H * W];
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
                    for (int tap = 0; tap < 9; ++tap) sum[f][c][tap] += own * around[c][tap];
            }
        }

#pragma unroll
        for (int f = 0; f < FILTERS; ++f)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
                for (int tap = 0; tap < 9; ++tap) {
                    const int result = ((filter + f) * CI + channel + c) * 9 + tap;
                    weight_parts[(size_t)result * H * W + pixel] = sum[f][c][tap];
                }

        if (channel == 0)
            for (int f = 0; f < FILTERS; ++f) {
                float bias = 0.0f;
                for (int image = 0; image < images; ++image)
                    bias += given[(size_t)image * CO * H * W + f * H * W];
                bias_parts[(filter + f) * H * W + pixel] = bias;
            }
    }
}
