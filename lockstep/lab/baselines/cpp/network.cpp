// emotion48 in sequential C++: three blocks of convolution 3×3, ReLU and maximum of 2×2, then two fully
// connected layers. One core computes everything. Needs tile.h before it.
//
// Values of a pixel's channels lie side by side (NHWC), so a vector holds channels. Every image has a border of
// zeros. So the three pixels under a filter's row lie side by side too: a convolution is three products, one for
// each row of the filter, whose A is the image itself, read where it lies.

#include <cmath>
#include <vector>

namespace {

using std::vector;

struct Block {  // of convolution, ReLU and maximum
    long side, in, out;
    long padded() const { return (side + 2) * (side + 2); }
    long weights() const { return 9 * in * out; }
};

constexpr Block BLOCKS[3] = {{48, 1, 32}, {24, 32, 64}, {12, 64, 128}};
constexpr int DOTS = 8;
constexpr long PIECE = 96;    // steps of a product whose packed factor fits the first cache; divides 3 × 32, 64, 128
constexpr long PIXELS = 48;   // so many of a gradient's panel fit it beside the image: whole lines of 48, 24 or 12
constexpr long FEATURES = 6 * 6 * 128, HIDDEN = 256, CLASSES = 7;

// Where each parameter begins in the flat array of all: weight and bias of each layer, [in][out].
struct Places {
    long weight[5], bias[5], count;
    Places() {
        long at = 0, sizes[5], outs[5] = {32, 64, 128, HIDDEN, CLASSES};
        for (int i = 0; i < 3; ++i) sizes[i] = BLOCKS[i].weights();
        sizes[3] = FEATURES * HIDDEN, sizes[4] = HIDDEN * CLASSES;
        for (int i = 0; i < 5; ++i) weight[i] = at, bias[i] = at += sizes[i], at += outs[i];
        count = at;
    }
};
const Places PLACES;
const float ZEROS[WIDTH] = {};

// Panels of WIDTH columns side by side, in the order in which multiply_tile reads them.
void pack(const float *from, long depth, long columns, float *to) {
    for (long j = 0; j < columns; j += WIDTH)
        for (long k = 0; k < depth; ++k, to += WIDTH) memcpy(to, from + k * columns + j, sizeof(float) * WIDTH);
}

// The filter turned by half a turn, with inputs and outputs exchanged: its convolution is the data gradient's.
void turn(const float *from, const Block &block, float *to) {
    for (long tap = 0; tap < 9; ++tap)
        for (long c = 0; c < block.in; ++c)
            for (long k = 0; k < block.out; ++k)
                to[(tap * block.out + k) * block.in + c] = from[((8 - tap) * block.in + c) * block.out + k];
}

// A convolution of one padded image: rows `first` to `last` of the result, which has no border. A piece of the
// packed filter, which fits the first cache, is used for all of them before the next.
void convolve(const float *image, const float *packed, const float *bias, long side, long in, long out, long first,
              long last, float *result) {
    const long line = (side + 2) * in, depth = 3 * in, piece = depth < PIECE ? depth : PIECE;
    const long lines = 3 * depth < PIECE ? 3 : 1;  // of a small filter all at once
    for (long j = 0; j < out; j += WIDTH) {
        const float *filter = packed + j * 9 * in, *begin = bias ? bias + j : ZEROS;
        for (long k = 0; k < 3 * depth; k += lines * piece, filter += lines * piece * WIDTH)
            for (long y = first; y < last; ++y) {
                float *to = result + (y - first) * side * out + j;
                const Left pixels{image + (y + k / depth) * line + k % depth, in, line, lines};
                multiply_rows(side, pixels, filter, piece, to, out, k ? Begin{to, out} : Begin{begin, 0});
            }
    }
}

// ReLU and the maximum of 2×2 of two rows; `which` says where the maximum was, 4 if nothing was above zero.
void pool(const float *rows, const Block &block, float *to, int *which) {
    const long out = block.out, line = block.side * out;
    for (long x = 0; x < block.side / 2; ++x, rows += out)
        for (long k = 0; k < out; k += LENGTH, rows += LENGTH, to += LENGTH, which += LENGTH) {
            const float *corners[4] = {rows, rows + out, rows + line, rows + line + out};
            Vector best = {};
            Mask place = Mask{} + 4;
            for (int i = 0; i < 4; ++i) {
                const Vector own = load(corners[i]);
                place = own > best ? Mask{} + i : place;
                best = own > best ? own : best;
            }
            store(to, best), store(which, place);
        }
}

// The gradient of `pool`, as panels of WIDTH channels: of each 2×2 the place of the maximum has it. Its sum over
// all pixels is added to `bias`.
void spread(const float *gradient, const int *which, const Block &block, float *panel, float *bias) {
    const long half = block.side / 2, line = block.side * WIDTH;
    for (long k0 = 0; k0 < block.out; k0 += WIDTH) {
        Vector sum[VECTORS] = {};
        for (long y = 0; y < half; ++y, panel += line)
            for (long x = 0; x < half; ++x, panel += 2 * WIDTH)
                for (long v = 0; v < VECTORS; ++v) {
                    const long at = (y * half + x) * block.out + k0 + v * LENGTH;
                    const Vector own = load(gradient + at), zero = {};
                    Mask place;
                    memcpy(&place, which + at, sizeof place);
                    float *corner = panel + v * LENGTH;
                    store(corner, place == 0 ? own : zero), store(corner + WIDTH, place == 1 ? own : zero);
                    store(corner + line, place == 2 ? own : zero);
                    store(corner + line + WIDTH, place == 3 ? own : zero);
                    sum[v] += place < 4 ? own : zero;
                }
        for (long v = 0; v < VECTORS; ++v)
            store(bias + k0 + v * LENGTH, load(bias + k0 + v * LENGTH) + sum[v]);
    }
}

// Panels back into a padded image with all its channels side by side.
void join(const float *panel, long side, long channels, float *padded) {
    for (long k = 0; k < channels; k += WIDTH)
        for (long y = 0; y < side; ++y)
            for (long x = 0; x < side; ++x, panel += WIDTH)
                memcpy(padded + ((y + 1) * (side + 2) + x + 1) * channels + k, panel, sizeof(float) * WIDTH);
}

void copy_inside(const float *from, long side, long channels, float *padded) {
    for (long y = 0; y < side; ++y)
        memcpy(padded + ((y + 1) * (side + 2) + 1) * channels, from + y * side * channels,
               sizeof(float) * side * channels);
}

// What a batch needs; made once for a size of batch.
struct Network {
    const float *weights;
    long batch;
    vector<float> inputs[3];             // of each block, padded
    vector<int> which[3];                // where the maxima were
    vector<float> packed[3], turned[3];  // filters in the order in which they are read
    vector<float> joined[3];             // gradients with a border of zeros
    vector<float> features, hidden, logits, d_logits, d_hidden, d_features;
    vector<float> rows, pooled, gradient, panels;

    explicit Network(long size) : batch(size) {
        for (int i = 0; i < 3; ++i) {
            const Block &block = BLOCKS[i];
            inputs[i].assign(size * block.padded() * block.in, 0.0f);
            which[i].resize(size * block.side * block.side / 4 * block.out);
            joined[i].assign(block.padded() * block.out, 0.0f);
            packed[i].resize(block.weights()), turned[i].resize(block.weights());
        }
        features.resize(size * FEATURES), d_features.resize(size * FEATURES);
        hidden.resize(size * HIDDEN), d_hidden.resize(size * HIDDEN),
        logits.resize(size * CLASSES), d_logits.resize(size * CLASSES);
        rows.resize(24 * 24 * 64), pooled.resize(24 * 24 * 32), gradient.resize(24 * 24 * 32);
        panels.resize(48 * 48 * 32 + size * HIDDEN);
    }

    void forward(const float *images, const float *all) {
        weights = all;
        for (int i = 0; i < 3; ++i)
            pack(weights + PLACES.weight[i], 9 * BLOCKS[i].in, BLOCKS[i].out, packed[i].data());
        for (long n = 0; n < batch; ++n) {
            copy_inside(images + n * 48 * 48, 48, 1, inputs[0].data() + n * BLOCKS[0].padded());
            for (int i = 0; i < 3; ++i) forward_block(i, n);
        }
        batch < ROWS ? hide_few() : hide_many();
        for (float &value : hidden) value = value > 0.0f ? value : 0.0f;
        const float *weight = weights + PLACES.weight[4], *bias = weights + PLACES.bias[4];
        for (long n = 0; n < batch; ++n)
            for (long c = 0; c < CLASSES; ++c) {
                float sum = bias[c];
                for (long j = 0; j < HIDDEN; ++j) sum += hidden[n * HIDDEN + j] * weight[j * CLASSES + c];
                logits[n * CLASSES + c] = sum;
            }
    }

    // The hidden layer, whose matrix is large: some lines of it are packed, used by all images, and forgotten.
    void hide_many() {
        float packed[PIECE * HIDDEN];
        for (long k = 0; k < FEATURES; k += PIECE) {
            pack(weights + PLACES.weight[3] + k * HIDDEN, PIECE, HIDDEN, packed);
            for (long j = 0; j < HIDDEN; j += WIDTH) {
                float *to = hidden.data() + j;
                const Begin begin = k ? Begin{to, HIDDEN} : Begin{weights + PLACES.bias[3] + j, 0};
                const Left images{features.data() + k, FEATURES, 0, 1};
                multiply_rows(batch, images, packed + j * PIECE, PIECE, to, HIDDEN, begin);
            }
        }
    }

    void hide_few() {
        const float *weight = weights + PLACES.weight[3];
        for (long n = 0; n < batch; ++n) {
            float sum[HIDDEN];
            memcpy(sum, weights + PLACES.bias[3], sizeof sum);
            for (long f = 0; f < FEATURES; ++f)
                for (long j = 0; j < HIDDEN; ++j) sum[j] += features[n * FEATURES + f] * weight[f * HIDDEN + j];
            memcpy(hidden.data() + n * HIDDEN, sum, sizeof sum);
        }
    }

    void forward_block(int i, long n) {
        const Block &block = BLOCKS[i];
        const long half = block.side / 2, line = half * block.out;
        const float *image = inputs[i].data() + n * block.padded() * block.in;
        float *to = i == 2 ? features.data() + n * FEATURES : pooled.data();
        const long together = i == 0 ? 1 : half;  // pairs of rows; of many channels all, for one use of the filter
        for (long y = 0; y < half; y += together) {
            convolve(image, packed[i].data(), weights + PLACES.bias[i], block.side, block.in, block.out, 2 * y,
                     2 * (y + together), rows.data());
            for (long z = y; z < y + together; ++z)
                pool(rows.data() + 4 * (z - y) * line, block, to + z * line, which[i].data() + (n * half + z) * line);
        }
        if (i < 2)
            copy_inside(to, half, block.out, inputs[i + 1].data() + n * BLOCKS[i + 1].padded() * block.out);
    }

    // Softmax and cross-entropy: the sum of losses, and their gradient times `scale`.
    double lose(const int *labels, float scale) {
        double loss = 0.0;
        for (long n = 0; n < batch; ++n) {
            const float *own = &logits[n * CLASSES];
            float highest = own[0], sum = 0.0f;
            for (long c = 1; c < CLASSES; ++c) highest = own[c] > highest ? own[c] : highest;
            for (long c = 0; c < CLASSES; ++c) sum += std::exp(own[c] - highest);
            loss += std::log(sum) + highest - own[labels[n]];
            for (long c = 0; c < CLASSES; ++c)
                d_logits[n * CLASSES + c] = scale * (std::exp(own[c] - highest) / sum - (c == labels[n]));
        }
        return loss;
    }

    void backward(float *all) {
        backward_ends(all);
        for (int i = 1; i < 3; ++i) {
            vector<float> plain(BLOCKS[i].weights());
            turn(weights + PLACES.weight[i], BLOCKS[i], plain.data());
            pack(plain.data(), 9 * BLOCKS[i].out, BLOCKS[i].in, turned[i].data());
        }
        for (long n = 0; n < batch; ++n) {
            const float *from = d_features.data() + n * FEATURES;
            for (int i = 2; i >= 0; --i, from = gradient.data()) backward_block(i, n, from, all);
        }
    }

    // The two fully connected layers.
    void backward_ends(float *all) {
        const float *last = weights + PLACES.weight[4], *first = weights + PLACES.weight[3];
        for (long n = 0; n < batch; ++n)
            for (long j = 0; j < HIDDEN; ++j) {
                float sum = 0.0f, own = hidden[n * HIDDEN + j];
                for (long c = 0; c < CLASSES; ++c) {
                    sum += d_logits[n * CLASSES + c] * last[j * CLASSES + c];
                    all[PLACES.weight[4] + j * CLASSES + c] += own * d_logits[n * CLASSES + c];
                }
                d_hidden[n * HIDDEN + j] = own > 0.0f ? sum : 0.0f;
                all[PLACES.bias[3] + j] += d_hidden[n * HIDDEN + j];
            }
        for (long n = 0; n < batch; ++n)
            for (long c = 0; c < CLASSES; ++c) all[PLACES.bias[4] + c] += d_logits[n * CLASSES + c];
        pack(d_hidden.data(), batch, HIDDEN, panels.data());
        for (long f = 0; f < FEATURES; f += ROWS)
            for (long j = 0; j < HIDDEN; j += WIDTH)
                add_outer<ROWS>(features.data() + f, FEATURES, 0, panels.data() + j * batch, 1, batch,
                                all + PLACES.weight[3] + f * HIDDEN + j, HIDDEN);
        for (long f = 0; f < FEATURES; f += DOTS)
            for (long n = 0; n < batch; ++n) dot(first + f * HIDDEN, f, n);
    }

    // d_features of an image, DOTS of them: both factors are read along `hidden`.
    void dot(const float *weight, long f, long n) {
        const float *own = &d_hidden[n * HIDDEN];
        Vector sum[DOTS] = {};
        for (long j = 0; j < HIDDEN; j += LENGTH)
            for (int r = 0; r < DOTS; ++r) sum[r] += load(own + j) * load(weight + r * HIDDEN + j);
        for (int r = 0; r < DOTS; ++r) {
            float total = 0.0f;
            for (int l = 0; l < LENGTH; ++l) total += sum[r][l];
            d_features[n * FEATURES + f + r] = total;
        }
    }

    void backward_block(int i, long n, const float *from, float *all) {
        const Block &block = BLOCKS[i];
        const long side = block.side, quarter = side * side / 4, line = (side + 2) * block.in;
        const int *own = which[i].data() + n * quarter * block.out;
        const float *image = inputs[i].data() + n * block.padded() * block.in;
        float *weight = all + PLACES.weight[i];
        spread(from, own, block, panels.data(), all + PLACES.bias[i]);
        const long lines = PIXELS / side;
        for (long k = 0; k < block.out; k += WIDTH)
            for (long y = 0; y < side; y += lines)
                for (long r = 0; r < 3; ++r) {
                    const float *panel = panels.data() + k * side * side + y * side * WIDTH;
                    const float *row = image + (y + r) * line;
                    float *to = weight + r * 3 * block.in * block.out + k;
                    if (block.in == 1) add_outer<3>(row, 1, line, panel, lines, side, to, block.out);
                    for (long d = 0; d + ROWS <= 3 * block.in; d += ROWS)
                        add_outer<ROWS>(row + d, block.in, line, panel, lines, side, to + d * block.out, block.out);
                }
        if (i == 0) return;
        join(panels.data(), side, block.out, joined[i].data());
        convolve(joined[i].data(), turned[i].data(), nullptr, side, block.out, block.in, 0, side, gradient.data());
    }
};

Network &network_of(long batch) {
    static Network *kept = nullptr;
    if (!kept || kept->batch != batch) delete kept, kept = new Network(batch);
    return *kept;
}

}  // namespace

extern "C" {

long parameter_count() { return PLACES.count; }

void predict(const float *weights, const float *images, long batch, float *logits) {
    Network &network = network_of(batch);
    network.forward(images, weights);
    memcpy(logits, network.logits.data(), sizeof(float) * batch * CLASSES);
}

// The sum of the images' losses; their gradient times `scale` is added to `gradient`.
double add_gradient(const float *weights, const float *images, const int *labels, long batch, float scale,
                    float *gradient) {
    Network &network = network_of(batch);
    network.forward(images, weights);
    const double loss = network.lose(labels, scale);
    network.backward(gradient);
    return loss;
}

void descend(float *weights, const float *gradient, float rate) {
    for (long i = 0; i < PLACES.count; ++i) weights[i] -= rate * gradient[i];
}
}
