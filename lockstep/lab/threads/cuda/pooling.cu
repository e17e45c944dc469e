// ReLU and the maximum of every square of 2 × 2 pixels: H × W pixels become H/2 × W/2.
//
// A work item is a square. Of the two, the order does not matter: the largest value is taken if it is above
// 0. `maps` is the number of images times channels. Needs common.cuh.

extern "C" __global__ void __launch_bounds__(256)
    pooling_forward(const float *input, float *output, int maps) {
    for (EACH(item, maps * (H / 2) * (W / 2))) {
        const float *square = input + (size_t)(item / (W / 2)) * 2 * W + item % (W / 2) * 2;
        const Two above = load2(square), below = load2(square + W);
        const float most = fmaxf(fmaxf(above.at[0], above.at[1]), fmaxf(below.at[0], below.at[1]));
        output[item] = most <= 0.0f ? 0.0f : most;
    }
}

// The gradient goes to the first pixel that has the largest value, if that is above 0; the others get 0. It
// takes the place of the values, which nobody needs any more.
extern "C" __global__ void __launch_bounds__(256)
    pooling_gradient(const float *gradient, float *values, int maps) {
    for (EACH(item, maps * (H / 2) * (W / 2))) {
        float *square = values + (size_t)(item / (W / 2)) * 2 * W + item % (W / 2) * 2;
        const Two above = load2(square), below = load2(square + W);
        const float pixel[4] = {above.at[0], above.at[1], below.at[0], below.at[1]};
        int chosen = 0;
        float most = pixel[0];
#pragma unroll
        for (int i = 1; i < 4; ++i)
            if (pixel[i] > most) most = pixel[i], chosen = i;
        const float given = most > 0.0f ? gradient[item] : 0.0f;
        *reinterpret_cast<Two *>(square) = {chosen == 0 ? given : 0.0f, chosen == 1 ? given : 0.0f};
        *reinterpret_cast<Two *>(square + W) = {chosen == 2 ? given : 0.0f, chosen == 3 ? given : 0.0f};
    }
}
