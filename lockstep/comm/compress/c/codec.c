/* Codecs of blocks in one pass over memory: the same decoded numbers and remainders as codec.py, in every bit.

   A block is read once from memory, and worked on in the first-level cache. Rows are those of codec.py, too.
   Nothing here may be contracted or reordered: compile with -ffp-contract=off and without -ffast-math. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 4096
#define DEEPEST 24 /* levels of a lane tree */
#define COLUMNS 512
#define SUM_BYTES (4l * BLOCK)

enum { BF16, INT8, FP8, TOP };

typedef struct {
    long kind, count; /* count: of elements that TOP keeps */
} Codec;

static long row_bytes(Codec codec)
{
    return codec.kind == BF16 ? 2 * BLOCK : codec.kind == TOP ? 6 * codec.count : 4 + BLOCK;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float number_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t size_of(float value)
{
    return bits_of(value) & 0x7FFFFFFFu;
}

static inline float from_fp8(uint8_t byte)
{
    uint32_t size = byte & 127u;
    float normal = number_of((size << 20) + (120u << 23)), small = (float)(int32_t)size * 0x1p-9f;
    float value = size < 8 ? small : normal;
    return number_of(bits_of(value) | (uint32_t)(byte & 128u) << 24);
}

static inline uint8_t to_fp8(float value) /* of at most 448; a half goes to the even number */
{
    uint32_t sign = bits_of(value) & 0x80000000u, size = bits_of(value) ^ sign;
    uint32_t small = bits_of(number_of(size) + number_of(141u << 23)) - (141u << 23);
    uint32_t normal = (size - (120u << 23) + 0x7FFFFu + (size >> 20 & 1)) >> 20;
    return (uint8_t)((size < 121u << 23 ? small : normal) | sign >> 24);
}

static inline float within(float value, float largest) /* a scale that is hardly above zero is too small */
{
    value = value > largest ? largest : value;
    return value < -largest ? -largest : value;
}

static void decode_bf16(const uint8_t *restrict row, float *restrict found)
{
    const uint16_t *half = (const uint16_t *)row;
    for (int i = 0; i < BLOCK; i++)
        found[i] = number_of((uint32_t)half[i] << 16);
}

static void encode_bf16(float *restrict whole, uint8_t *restrict row)
{
    uint16_t *half = (uint16_t *)row;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = bits_of(whole[i]), up = bits + 0x7FFFu + (bits >> 16 & 1);
        up = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : up;
        half[i] = (uint16_t)(up >> 16);
        whole[i] = whole[i] - number_of(up & 0xFFFF0000u);
    }
}

static void decode_scaled(int fp8, const uint8_t *restrict row, float *restrict found)
{
    float scale;
    memcpy(&scale, row, 4);
    if (fp8)
        for (int i = 0; i < BLOCK; i++)
            found[i] = from_fp8(row[4 + i]) * scale;
    else
        for (int i = 0; i < BLOCK; i++)
            found[i] = (float)(int8_t)row[4 + i] * scale;
}

static void encode_scaled(int fp8, float *restrict whole, uint8_t *restrict row)
{
    const float largest = fp8 ? 448.0f : 127.0f;
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size = size_of(whole[i]);
        most = size > most ? size : most;
    }
    float scale = number_of(most) / largest, divisor = scale == 0.0f ? 1.0f : scale;
    memcpy(row, &scale, 4);
    if (most >= 0x7F800000u) { /* nothing of it is finite then */
        memset(row + 4, 0, BLOCK);
        for (int i = 0; i < BLOCK; i++)
            whole[i] = scale - scale;
    } else if (fp8)
        for (int i = 0; i < BLOCK; i++) {
            uint8_t byte = to_fp8(within(whole[i] / divisor, largest));
            row[4 + i] = byte;
            whole[i] = whole[i] - from_fp8(byte) * scale;
        }
    else
        for (int i = 0; i < BLOCK; i++) {
            const float round = 12582912.0f; /* 1.5·2^23: a sum with it has no fraction, a half goes to even */
            int8_t byte = (int8_t)(int32_t)((within(whole[i] / divisor, largest) + round) - round);
            row[4 + i] = (uint8_t)byte;
            whole[i] = whole[i] - (float)byte * scale;
        }
}

static void decode_top(long count, const uint8_t *row, long size, float *found)
{
    memset(found, 0, 4 * (size_t)size);
    for (long n = 0; n < count; n++) {
        uint16_t place;
        memcpy(&place, row + 2 * n, 2);
        if (place < size)
            memcpy(found + place, row + 2 * count + 4 * n, 4);
    }
}

/* The largest number of which at least `count` of some sizes are not below. */
static uint32_t bound_of(const uint32_t *sizes, long number, long count)
{
    uint32_t bound = 0;
    for (int bit = 30; bit >= 0; bit--) {
        uint32_t tried = bound | 1u << bit;
        int32_t reached = 0;
        for (long i = 0; i < number; i++)
            reached += sizes[i] >= tried;
        if (reached >= count)
            bound = tried;
    }
    return bound;
}

static uint16_t bound_of_halves(const uint16_t *sizes, long count)
{
    uint16_t bound = 0;
    for (int bit = 14; bit >= 0; bit--) {
        uint16_t tried = bound | 1u << bit, reached = 0;
        for (int i = 0; i < COLUMNS; i++)
            reached += sizes[i] >= tried;
        if (reached >= count)
            bound = tried;
    }
    return bound;
}

/* The same where most elements are zeros, of which the first `count` are enough. */
static long few_candidates(const float *whole, long count, uint16_t *places, uint32_t *found)
{
    long zeros = 0, total = 0;
    for (int first = 0; first < BLOCK; first += 16) {
        uint32_t any = 0;
        for (int i = first; i < first + 16; i++)
            any |= size_of(whole[i]);
        for (int i = first; i < first + 16 && (any || zeros < count); i++) {
            found[total] = size_of(whole[i]);
            places[total] = (uint16_t)i;
            total += found[total] || zeros < count;
            zeros += !size_of(whole[i]);
        }
    }
    return total;
}

/* The places of elements that can be among the largest `count`, in order, with their sizes; returns how many.

   The block as 8 rows of 512 columns: if `count` columns have an element of a size, so many elements have. */
static long candidates(const float *whole, long count, uint16_t *places, uint32_t *found)
{
    uint16_t most[COLUMNS], columns[COLUMNS + 1];
    long number = 0, total = 0;
    for (int c = 0; c < COLUMNS; c++) {
        uint32_t size = size_of(whole[c]);
        for (int r = COLUMNS; r < BLOCK; r += COLUMNS) {
            uint32_t other = size_of(whole[r + c]);
            size = other > size ? other : size;
        }
        most[c] = (uint16_t)(size >> 16);
    }
    uint16_t half = bound_of_halves(most, count);
    if (!half)
        return few_candidates(whole, count, places, found);
    for (int c = 0; c < COLUMNS; c++) {
        columns[number] = (uint16_t)c;
        number += most[c] >= half;
    }
    for (int r = 0; r < BLOCK; r += COLUMNS)
        for (long n = 0; n < number; n++) {
            uint32_t size = size_of(whole[r + columns[n]]);
            places[total] = (uint16_t)(r + columns[n]);
            found[total] = size;
            total += size >= (uint32_t)half << 16;
        }
    return total;
}

static void encode_top(long count, float *whole, uint8_t *row)
{
    uint32_t sizes[BLOCK + 1];
    uint16_t places[BLOCK + 1];
    int is_few = count <= COLUMNS / 2;
    long number = is_few ? candidates(whole, count, places, sizes) : BLOCK;
    if (!is_few)
        for (int i = 0; i < BLOCK; i++)
            sizes[i] = size_of(whole[i]);
    uint32_t bound = bound_of(sizes, number, count);
    long equal = count; /* of equal ones those that come first, as many as there is room for */
    for (long n = 0; n < number; n++)
        equal -= sizes[n] > bound;
    for (long n = 0, taken = 0; n < number && taken < count; n++)
        if (sizes[n] > bound || (sizes[n] == bound && equal-- > 0)) {
            uint16_t place = is_few ? places[n] : (uint16_t)n;
            memcpy(row + 2 * taken, &place, 2);
            memcpy(row + 2 * count + 4 * taken, whole + place, 4);
            whole[place] = whole[place] - whole[place];
            taken++;
        }
}

static void decode(Codec codec, const uint8_t *row, float *found)
{
    if (codec.kind == BF16)
        decode_bf16(row, found);
    else if (codec.kind == TOP)
        decode_top(codec.count, row, BLOCK, found);
    else
        decode_scaled(codec.kind == FP8, row, found);
}

/* Packs a block, and leaves of it what that loses. */
static void encode(Codec codec, float *whole, uint8_t *row)
{
    if (codec.kind == BF16)
        encode_bf16(whole, row);
    else if (codec.kind == TOP)
        encode_top(codec.count, whole, row);
    else
        encode_scaled(codec.kind == FP8, whole, row);
}

/* A lane's gradient and what was lost before become rows; `found`, if given, is what these say. */
void pack_lane(
    long kind, long count, long size, const float *grad, const float *kept, float *lost, uint8_t *rows, float *found)
{
    Codec codec = {kind, count};
    for (long first = 0; first < size; first += BLOCK, rows += row_bytes(codec)) {
        long length = size - first < BLOCK ? size - first : BLOCK;
        float *restrict whole = lost + first;
        for (long i = 0; i < length; i++)
            whole[i] = grad[first + i] + kept[first + i];
        memset(whole + length, 0, 4 * (size_t)(BLOCK - length));
        encode(codec, whole, rows);
        if (found)
            decode(codec, rows, found + first);
    }
}

/* Rows or sums of subtrees of lanes become rows of the mean: summed in the order of the lane tree.

   A part of height −1 is packed, and one lane. */
void pack_mean(
    long kind, long count, long blocks, long num_parts, const uint8_t *const *parts, const int32_t *heights,
    const float *kept, float *lost, uint8_t *rows)
{
    Codec codec = {kind, count};
    float partial[DEEPEST + 1][BLOCK];
    for (long block = 0; block < blocks; block++) {
        long next = 0, depth = 0, starts[DEEPEST + 1], levels[DEEPEST + 1];
        for (long n = 0; n < num_parts; n++) {
            long height = heights[n] < 0 ? 0 : heights[n], first = next;
            if (heights[n] < 0)
                decode(codec, parts[n] + block * row_bytes(codec), partial[depth]);
            else
                memcpy(partial[depth], parts[n] + block * SUM_BYTES, SUM_BYTES);
            next += 1l << height;
            while (depth && levels[depth - 1] == height && starts[depth - 1] % (2l << height) == 0) {
                depth--;
                for (int i = 0; i < BLOCK; i++)
                    partial[depth][i] += partial[depth + 1][i];
                first = starts[depth], height++;
            }
            starts[depth] = first, levels[depth] = height, depth++;
        }
        const float share = 1.0f / (float)next;
        float *restrict whole = lost + block * BLOCK;
        for (int i = 0; i < BLOCK; i++)
            whole[i] = partial[0][i] * share + kept[block * BLOCK + i];
        encode(codec, whole, rows);
        rows += row_bytes(codec);
    }
}

/* What rows say, up to the end of a parameter. */
void unpack(long kind, long count, long size, const uint8_t *rows, float *found)
{
    Codec codec = {kind, count};
    float room[BLOCK];
    for (long first = 0; first < size; first += BLOCK) {
        long length = size - first < BLOCK ? size - first : BLOCK;
        if (kind == TOP)
            decode_top(count, rows, length, found + first);
        else if (length == BLOCK)
            decode(codec, rows, found + first);
        else {
            decode(codec, rows, room);
            memcpy(found + first, room, 4 * (size_t)length);
        }
        rows += row_bytes(codec);
    }
}
