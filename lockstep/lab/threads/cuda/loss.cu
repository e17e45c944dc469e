// Softmax and cross-entropy over CLASSES scores: each image's share of the mean loss, and the gradient of
// the scores.
//
// A work item is an image. The largest score is taken from all, so that no power overflows. The shares are
// the parts of the loss, which add_parts of sums.cu adds. Needs common.cuh.

extern "C" __global__ void __launch_bounds__(256)
    softmax_cross_entropy(const float *scores, const int *labels, float *losses, float *gradient,
                          int images) {
    for (EACH(image, images)) {
        const float *own = scores + image * CLASSES;
        float most = own[0], power[CLASSES], sum = 0.0f;
        for (int c = 1; c < CLASSES; ++c) most = fmaxf(most, own[c]);
#pragma unroll
        for (int c = 0; c < CLASSES; ++c) sum += power[c] = expf(own[c] - most);
        losses[image] = (logf(sum) - (own[labels[image]] - most)) / images;
#pragma unroll
        for (int c = 0; c < CLASSES; ++c)
            gradient[image * CLASSES + c] = (power[c] / sum - (c == labels[image] ? 1.0f : 0.0f)) / images;
    }
}
