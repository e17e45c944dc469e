// A fully connected layer, IN values to OUT: forward, and the gradients of input, weights and biases.
//
// All are products of matrices, and a work item is a tile of 4 × 4 results, or 4 × 1 where OUT is not
// divisible by 4. The forward sum over IN is long and its results are few, so it is cut into PARTS parts,
// whatever the number of threads; linear_sum adds them in their order. Needs common.cuh, and IN divisible
// by 4 × PARTS.

#define TILE (OUT % 4 ? 1 : 4)  // outputs that an item takes together

extern "C" __global__ void __launch_bounds__(256)
    linear_parts(const float *input, const float *weight, float *parts, int images) {
    const int groups = (images + 3) / 4;
    for (EACH(item, PARTS * groups * (OUT / TILE))) {
        const int output = item % (OUT / TILE) * TILE, image = item / (OUT / TILE) % groups * 4;
        const int part = item / (OUT / TILE * groups);
        float sum[4][TILE] = {};
        for (int k = part * (IN / PARTS); k < (part + 1) * (IN / PARTS); k += 4) {
            Four value[4], w[TILE];
#pragma unroll
            for (int n = 0; n < 4; ++n) value[n] = load4(input + (size_t)min(image + n, images - 1) * IN + k);
#pragma unroll
            for (int o = 0; o < TILE; ++o) w[o] = load4(weight + (output + o) * IN + k);
#pragma unroll
            for (int v = 0; v < 4; ++v)
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int o = 0; o < TILE; ++o) sum[n][o] += value[n].at[v] * w[o].at[v];
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int o = 0; o < TILE; ++o)
                if (image + n < images) parts[((image + n) * OUT + output + o) * PARTS + part] = sum[n][o];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    linear_sum(const float *parts, const float *bias, float *result, int images) {
    for (EACH(item, images * OUT)) {
        float sum = bias[item % OUT];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) sum += parts[item * PARTS + part];
        result[item] = HAS_RELU && sum <= 0.0f ? 0.0f : sum;
    }
}

// In place: where the layer gave 0, its gradient is 0.
extern "C" __global__ void __launch_bounds__(256)
    relu_gradient(const float *result, float *gradient, int images) {
    for (EACH(item, images * OUT))
        if (!(result[item] > 0.0f)) gradient[item] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(256)
    linear_data_gradient(const float *gradient, const float *weight, float *result, int images) {
    for (EACH(item, (images + 3) / 4 * (IN / 4))) {
        const int k = item % (IN / 4) * 4, image = item / (IN / 4) * 4;
        Four sum[4] = {};
        for (int o = 0; o < OUT; ++o) {
            const Four w = load4(weight + o * IN + k);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float given = gradient[min(image + n, images - 1) * OUT + o];
#pragma unroll
                for (int v = 0; v < 4; ++v) sum[n].at[v] += given * w.at[v];
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (image + n < images) *reinterpret_cast<Four *>(result + (size_t)(image + n) * IN + k) = sum[n];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    linear_weight_gradient(const float *input, const float *gradient, float *result, int images) {
    for (EACH(item, OUT / TILE * (IN / 4))) {
        const int k = item % (IN / 4) * 4, output = item / (IN / 4) * TILE;
        Four sum[TILE] = {};
        for (int image = 0; image < images; ++image) {
            const Four value = load4(input + (size_t)image * IN + k);
#pragma unroll
            for (int o = 0; o < TILE; ++o) {
                const float given = gradient[image * OUT + output + o];
#pragma unroll
                for (int v = 0; v < 4; ++v) sum[o].at[v] += given * value.at[v];
            }
        }
#pragma unroll
        for (int o = 0; o < TILE; ++o) *reinterpret_cast<Four *>(result + (output + o) * IN + k) = sum[o];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    linear_bias_gradient(const float *gradient, float *result, int images) {
    for (EACH(item, OUT)) {
        float sum = 0.0f;
        for (int image = 0; image < images; ++image) sum += gradient[image * OUT + item];
        result[item] = sum;
    }
}
