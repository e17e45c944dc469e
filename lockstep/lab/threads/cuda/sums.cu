// Adds the parts of sums, which lie side by side: `length` parts for each of `count` sums.
//
// A work item is a sum. It adds its parts in four rows, a row for each value of a load, and then the rows:
// always in this order. Needs common.cuh, and with several sums a length divisible by 4.

extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float *parts, float *sums, int count, int length) {
    for (EACH(item, count)) {
        const float *own = parts + (size_t)item * length;
        Four row = {};
        int at = 0;
        for (; at + 4 <= length; at += 4) {
            const Four next = load4(own + at);
#pragma unroll
            for (int v = 0; v < 4; ++v) row.at[v] += next.at[v];
        }
        for (; at < length; ++at) row.at[0] += own[at];
        sums[item] = (row.at[0] + row.at[1]) + (row.at[2] + row.at[3]);
    }
}
