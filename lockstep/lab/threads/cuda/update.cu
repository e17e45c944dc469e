// Gradient descent with momentum: velocity = momentum × velocity + gradient, weight = weight - rate ×
// velocity.
//
// A work item is four neighbouring weights. All layers' weights lie in one array, so one start updates them
// all. Needs common.cuh.

extern "C" __global__ void __launch_bounds__(256)
    update(float *weight, const float *gradient, float *velocity, int fours, float rate, float momentum) {
    for (EACH(item, fours)) {
        Four w = load4(weight + 4 * item), v = load4(velocity + 4 * item);
        const Four given = load4(gradient + 4 * item);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v.at[i] = momentum * v.at[i] + given.at[i];
            w.at[i] -= rate * v.at[i];
        }
        reinterpret_cast<Four *>(weight)[item] = w;
        reinterpret_cast<Four *>(velocity)[item] = v;
    }
}
