// Convolution 3 × 3 with padding 1, forward: CI channels of H × W pixels become CO.
//
// A work item is a square of 2 × 2 pixels of 4 filters: 16 sums that stay in registers. Each value it reads
// is used for several of them, so it multiplies far more often than it reads, and one thread has 16 chains
// to work on at once. Neighbouring threads have neighbouring squares, and read the same weights. Needs
// common.cuh.

#define WIDE (CI % 4 ? 1 : 4)  // channels taken together: their weights lie side by side, four to a load

struct alignas(4 * WIDE) Weights {
    float at[WIDE];
};

extern "C" __global__ void __launch_bounds__(256)
    convolution_forward(const float *input, const float *weight, const float *bias, float *output,
                        int images) {
    for (EACH(item, images * (CO / 4) * (H / 2) * (W / 2))) {
        const int x = item % (W / 2) * 2, y = item / (W / 2) % (H / 2) * 2;
        const int map = item / (W / 2 * (H / 2)), filter = map % (CO / 4) * 4, image = map / (CO / 4);
        const float *source = input + (size_t)image * CI * H * W + y * W + x;
        float sum[4][2][2];
#pragma unroll
        for (int f = 0; f < 4; ++f)
            sum[f][0][0] = sum[f][0][1] = sum[f][1][0] = sum[f][1][1] = bias[filter + f];

        for (int channel = 0; channel < CI; channel += WIDE) {
            float around[WIDE][4][4];
#pragma unroll
            for (int c = 0; c < WIDE; ++c) load_around(source + (channel + c) * H * W, y, x, around[c]);
            const float *first = weight + (filter * CI + channel) * 9;
#pragma unroll
            for (int run = 0; run < 9; ++run)
#pragma unroll
                for (int f = 0; f < 4; ++f) {
                    const Weights w = *reinterpret_cast<const Weights *>(first + f * CI * 9 + run * WIDE);
#pragma unroll
                    for (int v = 0; v < WIDE; ++v) {
                        const int c = (run * WIDE + v) / 9, tap = (run * WIDE + v) % 9;
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            sum[f][i / 2][i % 2] += w.at[v] * around[c][i / 2 + tap / 3][i % 2 + tap % 3];
                    }
                }
        }

        float *target = output + ((size_t)image * CO + filter) * H * W + y * W + x;
#pragma unroll
        for (int f = 0; f < 4; ++f)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<Two *>(target + (f * H + i) * W) = {sum[f][i][0], sum[f][i][1]};
    }
}
