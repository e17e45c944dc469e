// Convolution 3 × 3 with padding 1, gradient of its input: CO channels of gradients become CI.
//
// The forward pass turned round: filters are summed over, and the taps count backwards. A work item is a
// square of 2 × 2 pixels of 4 input channels, whose weights in a filter are 36 values side by side: 9 loads
// of four. Needs common.cuh, and CI divisible by 4.

extern "C" __global__ void __launch_bounds__(256)
    convolution_data_gradient(const float *gradient, const float *weight, float *result, int images) {
    for (EACH(item, images * (CI / 4) * (H / 2) * (W / 2))) {
        const int x = item % (W / 2) * 2, y = item / (W / 2) % (H / 2) * 2;
        const int map = item / (W / 2 * (H / 2)), channel = map % (CI / 4) * 4, image = map / (CI / 4);
        const float *source = gradient + (size_t)image * CO * H * W + y * W + x;
        float sum[4][2][2] = {};

        for (int filter = 0; filter < CO; ++filter) {
            float around[4][4];
            load_around(source + filter * H * W, y, x, around);
#pragma unroll
            for (int run = 0; run < 9; ++run) {
                const Four w = load4(weight + (filter * CI + channel) * 9 + run * 4);
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const int c = (run * 4 + v) / 9, tap = (run * 4 + v) % 9;
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sum[c][i / 2][i % 2] += w.at[v] * around[i / 2 + 2 - tap / 3][i % 2 + 2 - tap % 3];
                }
            }
        }

        float *target = result + ((size_t)image * CI + channel) * H * W + y * W + x;
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<Two *>(target + (c * H + i) * W) = {sum[c][i][0], sum[c][i][1]};
    }
}
