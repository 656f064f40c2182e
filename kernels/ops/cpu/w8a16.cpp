// Weight-only int8 linear layers on the int8 units: activations keep 16 bits.
//
// A float activation is rounded to 16 bits within its group, `x ~ scale * r` with |r| <= 32639, and r is written as two
// bytes, `r = 256 * high + low`, both in [-128, 127]. So one row of activations becomes two rows of the int8 layer,
// whose results are added. The rounding error, 2^-16 of the group's largest value, is below that of float16
// activations; the weights are read once, which is all that decode pays for.
//
// The sum of the two rows is the last addition but for the bias, in that order: results depend on nothing but the row.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "int8.h"
#include "quantize_row.h"
#include "scratch.h"

namespace optkit {
namespace {

constexpr float MOST = 32639.0f;  // 256 * 127 + 127
constexpr int64_t ROWS = 64;      // of a task

// The two rows of `x`, each `padded` long (past `columns` they are the zero point), and their scales.
OPTKIT_INLINE void split_row(const float* x, int64_t columns, int64_t padded, int64_t group, uint8_t* high,
                             uint8_t* low, float* high_scale, float* low_scale) {
    for (int64_t start = 0; start < columns; start += group) {
        const float most = largest(x + start, group);
        const float inverse = most > 0 ? 1.0f / most * MOST : 0.0f;
        for (int64_t i = start; i < start + group; ++i) {
            // adding 1.5 * 2^23 leaves the integer in the low bits
            const int32_t r = to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000;
            const int32_t upper = (r + 128) >> 8;
            high[i] = static_cast<uint8_t>(upper + 128);
            low[i] = static_cast<uint8_t>(r - upper * 256 + 128);
        }
        *low_scale = most / MOST;
        *high_scale++ = 256.0f * *low_scale++;
    }
    std::memset(high + columns, 128, padded - columns);
    std::memset(low + columns, 128, padded - columns);
}

struct Split {
    const WeightOnly& p;
    int64_t columns, padded;
    uint8_t* q;    // [2m][padded]
    float* scale;  // [2m][groups]
};

OPTKIT_INLINE void split(const Split& s, int64_t row) {
    const int64_t groups = s.p.layer.groups, at = 2 * row;
    split_row(s.p.x + row * s.p.x_stride, s.columns, s.padded, s.columns / groups, s.q + at * s.padded,
              s.q + (at + 1) * s.padded, s.scale + at * groups, s.scale + (at + 1) * groups);
}

void split_portable(const Split& s, int64_t row) { split(s, row); }
#if OPTKIT_X86
OPTKIT_AVX2 void split_avx2(const Split& s, int64_t row) { split(s, row); }
OPTKIT_AVX512 void split_avx512(const Split& s, int64_t row) { split(s, row); }
#endif

void (*split_variant())(const Split&, int64_t) {
#if OPTKIT_X86
    if (isa() == Isa::avx512_vnni) return split_avx512;
    if (isa() == Isa::avx2) return split_avx2;
#endif
    return split_portable;
}

// One panel for output rows [row, row + rows): the int8 layer into `pairs`, then the sums of pairs.
void run_panel(const Linear& p, LinearRows variant, int64_t panel, int64_t row, int64_t rows) {
    alignas(64) float pairs[2 * ROWS * PANEL];
    const int64_t first = panel * PANEL, columns = std::min(PANEL, p.n - first);
    Panel weights = panel_of(p, panel);
    weights.first = 0;  // of `pairs`
    Linear part = p;
    part.q += 2 * row * p.q_stride;
    part.scale += 2 * row * p.groups;
    part.bias = nullptr;
    part.out = pairs;
    part.n = columns;
    variant(part, weights, 0, 2 * rows);
    for (int64_t m = 0; m < rows; ++m) {
        const float *high = pairs + 2 * m * columns, *low = high + columns;
        float* out = p.out + (row + m) * p.n + first;
        for (int64_t c = 0; c < columns; ++c) {
            const float sum = high[c] + low[c];
            out[c] = p.bias ? sum + p.bias[first + c] : sum;
        }
    }
}

}  // namespace

void linear_w8a16(const WeightOnly& p, int64_t m, int64_t k, int threads) {
    thread_local GrowingMemory q_memory, scale_memory;
    Linear layer = p.layer;
    layer.q_stride = layer.steps * STEP;
    auto* q = q_memory.at_least<uint8_t>(2 * m * layer.q_stride);
    auto* scale = scale_memory.at_least<float>(2 * m * layer.groups);
    layer.q = q;
    layer.scale = scale;
    const Split rows{p, k, layer.q_stride, q, scale};
    const auto split_one = split_variant();
    for (int64_t row = 0; row < m; ++row) split_one(rows, row);

    const LinearRows variant = linear_rows();
    const int64_t panels = divide_up(layer.n, PANEL), blocks = divide_up(m, ROWS);
    const int64_t chunk = std::max<int64_t>(1, panels / (4 * threads));  // neighbours: cores don't share pages
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads) if (threads > 1 && panels > 1)
    for (int64_t task = 0; task < panels * blocks; ++task) {
        const int64_t row = task / panels * ROWS;
        run_panel(layer, variant, task % panels, row, std::min(ROWS, m - row));
    }
}

}  // namespace optkit

using namespace optkit;

// reference.linear_w8a16 of x [m, k] with rows `x_stride` apart: out [m, n]. Weights as for optkit_linear_w8a8.
OPTKIT_API void optkit_linear_w8a16(const float* x, int64_t x_stride, const int8_t* blob, const float* weight_scale,
                                    const float* bias, float* out, int64_t m, int64_t n, int64_t k, int64_t groups,
                                    int threads) {
    const int64_t steps = divide_up(k, STEP);
    const auto* offset = reinterpret_cast<const int32_t*>(blob + divide_up(n, PANEL) * steps * STEP_BYTES);
    const Linear layer{nullptr, 0, nullptr, blob, offset, weight_scale, bias, out, n, steps, groups, steps / groups};
    if (m > 0 && n > 0) linear_w8a16({x, x_stride, layer}, m, k, threads);
}
