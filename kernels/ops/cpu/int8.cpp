// int8 linear layers: packing, the loop over panels and rows, and the portable variant.
//
// The weight [N, K] is packed into panels of 32 output channels, each [K/4][32][4]: one step of a panel is two
// AVX-512 registers whose lanes are output channels, and vpdpbusd adds the products of 4 input channels into each
// lane. Within a panel memory is read strictly forward, and panels follow each other, so decode streams the weight.
// N is padded to whole panels and K to whole steps with zeros, which add nothing.
//
// Activations are u8 with zero point 128 (vpdpbusd is u8 x s8). `(q - 128) . w = q . w - 128 * sum(w)`: accumulators
// start at the second term, `offset`, which is computed here.
//
// After the offsets there is a byte for each panel, 1 where all pairs of neighbouring weights fit (MOST_OF_TWO
// in int8.h): AVX2 multiplies those by an instruction that would saturate with others.
//
// Arithmetic, the same in every variant so that all give the same bits: int32 sums are exact in any order; then,
// group by group in order, `sum = fma(float(accumulator), scale * weight_scale, sum)`, and for weights with minimums
// (int4.cpp) `sum = fma(scale * sum of the activations, minimum, sum)`; then the bias is added.
// Nothing depends on which rows are computed together, by which thread, or in which tile.
#include "int8.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "dispatch.h"
#include "scales.h"

namespace optkit {

void linear_portable(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    const int64_t columns = std::min(PANEL, p.n - panel.first);
    for (int64_t m = row; m < row + rows; ++m) {
        const uint8_t* q = p.q + m * p.q_stride;
        const int8_t* w = panel.weight;
        float sum[PANEL] = {};
        for (int64_t g = 0; g < p.groups; ++g) {
            const int64_t at = g * PANEL;
            int32_t accumulator[PANEL];
            std::memcpy(accumulator, panel.offset + at, sizeof accumulator);
            for (int64_t s = 0; s < p.group_steps; ++s, q += STEP, w += STEP_BYTES)
                for (int64_t c = 0; c < PANEL; ++c)
                    for (int64_t k = 0; k < STEP; ++k) accumulator[c] += q[k] * w[c * STEP + k];
            const float scale = p.scale[m * p.groups + g];
            for (int64_t c = 0; c < PANEL; ++c)
                sum[c] = std::fma(static_cast<float>(accumulator[c]), scale * panel.weight_scale[at + c], sum[c]);
            if (!panel.minimum) continue;
            for (int64_t c = 0; c < PANEL; ++c)
                sum[c] = std::fma(p.sums[m * p.groups + g], panel.minimum[at + c], sum[c]);
        }
        float* out = p.out + m * p.n + panel.first;
        for (int64_t c = 0; c < columns; ++c) out[c] = p.bias ? sum[c] + p.bias[panel.first + c] : sum[c];
    }
}

namespace {

using WidenScales = void (*)(const uint8_t* from, int64_t groups, float* to);

// Scales [groups][PANEL] in float16 as float32.
OPTKIT_INLINE void widen_groups(const uint8_t* from, int64_t groups, float* to) {
    for (int64_t g = 0; g < groups; ++g) widen(from + g * scale_bytes(1, true), true, to + g * PANEL);
}

void widen_portable(const uint8_t* from, int64_t groups, float* to) { widen_groups(from, groups, to); }
#if OPTKIT_X86
OPTKIT_AVX2 void widen_avx2(const uint8_t* from, int64_t groups, float* to) {
    for (int64_t i = 0; i < groups * PANEL; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
}
#endif

WidenScales widen_scales() {
#if OPTKIT_X86
    if (base_isa() != Isa::portable) return widen_avx2;
#endif
    return widen_portable;
}

}  // namespace

LinearRows linear_rows() {
#if OPTKIT_X86
#ifdef OPTKIT_AVX_VNNI
    if (isa() == Isa::avx_vnni) return linear_avx_vnni;
#endif
#ifdef OPTKIT_AMX
    if (isa() == Isa::amx) return linear_amx;
#endif
    if (base_isa() == Isa::avx512_vnni) return linear_avx512;
    if (base_isa() == Isa::avx2) return linear_avx2;
#endif
#if OPTKIT_ARM
    if (isa() == Isa::neon_i8mm) return linear_i8mm;
    if (base_isa() == Isa::neon_dotprod) return linear_neon;
#endif
    return linear_portable;
}

void linear_panels(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows) {
#if OPTKIT_X86
    if (isa() == Isa::avx2) return linear_panels_avx2(p, from, to, row, rows);
#endif
#if OPTKIT_ARM
    if (isa() == Isa::neon_i8mm) return linear_panels_i8mm(p, from, to, row, rows);
#endif
    const LinearRows rows_of_panel = linear_rows();
    thread_local GrowingMemory scratch;
    for (int64_t i = from; i < to; ++i) rows_of_panel(p, panel_of(p, i, rows, scratch), row, rows);
}

Panel panel_of(const Linear& p, int64_t i, int64_t rows, GrowingMemory& memory) {
    constexpr int64_t FEW_ROWS = 4;  // up to here one stream of weights is faster than two, of weights and scales
    const int64_t bytes = p.steps * STEP_BYTES;
    const int8_t* weight = p.weight + i * bytes;
    const uint8_t* stored = p.weight_scale + i * scale_bytes(p.groups, p.half);
    const int32_t* offset = p.offset + i * p.groups * PANEL;
    Panel panel{i * PANEL, weight, offset, reinterpret_cast<const float*>(stored), nullptr, weight + bytes, STEP_BYTES};
    panel.pairs_fit = p.pairs_fit && p.pairs_fit[i];
    if (!p.half) return panel;
    if (base_isa() == Isa::avx512_vnni && rows > FEW_ROWS) {
        panel.half = reinterpret_cast<const uint16_t*>(stored);
        return panel;
    }
    auto* widened = memory.at_least<float>(p.groups * PANEL);
    widen_scales()(stored, p.groups, widened);
    panel.weight_scale = widened;
    // Few rows wait for memory: ask for the next panel's scales while this one's weights are read.
    for (int64_t g = 0; g < p.groups; ++g) __builtin_prefetch(stored + scale_bytes(p.groups + g, true));
    return panel;
}

Linear packed_linear(const uint8_t* blob, const uint8_t* weight_scale, bool half, const float* bias, float* out,
                     int64_t n, int64_t k, int64_t groups) {
    const int64_t steps = divide_up(k, STEP);
    const auto* weight = reinterpret_cast<const int8_t*>(blob);
    const int64_t panels = divide_up(n, PANEL);
    const auto* offset = reinterpret_cast<const int32_t*>(blob + panels * steps * STEP_BYTES);
    const auto* pairs_fit = reinterpret_cast<const uint8_t*>(offset + panels * groups * PANEL);
    return {nullptr, 0,    nullptr, weight, offset, weight_scale,   half,
            bias,    out,  n,       steps,  groups, steps / groups, pairs_fit};
}

Linear from_panel(const Linear& p, int64_t panel, int64_t n) {
    Linear part = p;
    part.weight += panel * p.steps * STEP_BYTES;
    part.offset += panel * p.groups * PANEL;
    if (p.pairs_fit) part.pairs_fit += panel;
    part.weight_scale += panel * scale_bytes(p.groups, p.half);
    part.n = n;
    return part;
}

void linear_w8a8(const Linear& p, int64_t m, int64_t k, int threads) {
    if (m == 0 || p.n == 0) return;
    const int64_t all_panels = divide_up(p.n, PANEL);
    const Tasks tasks(m, all_panels, k, threads);
    tasks.run(m, all_panels, threads, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
        linear_panels(p, from, to, row, count);
    });
}

namespace {

// Row `index` of the packed weight, dequantized.
void gather_row(const Linear& p, int64_t index, float* out) {
    const int64_t panel = index / PANEL, c = index % PANEL;
    const int8_t* w = p.weight + panel * p.steps * STEP_BYTES + c * STEP;
    for (int64_t g = 0; g < p.groups; ++g) {
        const float scale = scale_at(p.weight_scale, (panel * p.groups + g) * PANEL + c, p.half);
        for (int64_t s = 0; s < p.group_steps; ++s, w += STEP_BYTES, out += STEP)
            for (int64_t k = 0; k < STEP; ++k) out[k] = static_cast<float>(w[k]) * scale;
    }
}

}  // namespace

void gather_w8_rows(const Linear& p, const int64_t* index, int64_t rows, int64_t width, int threads) {
    constexpr int64_t ELEMENTS_A_THREAD = 65'536;  // for which waking another thread pays
    threads = static_cast<int>(std::min<int64_t>(threads, rows * width / ELEMENTS_A_THREAD));
    parallel_for(rows, even_chunk(rows, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) gather_row(p, index[row], p.out + row * width);
    });
}

namespace {

// The sum of n numbers.
OPTKIT_INLINE int32_t sum_of(const int8_t* x, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

// Output channel `c` of a panel: `row` [k], and zeros to whole steps, in their places among the panel's steps.
void pack_channel(const int8_t* row, int64_t c, int64_t k, int64_t groups, int8_t* packed, int32_t* offset) {
    const int64_t whole = k / STEP, group = divide_up(k, STEP) * STEP / groups;
    int8_t* to = packed + c * STEP;
    for (int64_t s = 0; s < whole; ++s) std::memcpy(to + s * STEP_BYTES, row + s * STEP, STEP);
    for (int64_t i = whole * STEP; i < divide_up(k, STEP) * STEP; ++i)
        to[whole * STEP_BYTES + i % STEP] = i < k ? row[i] : 0;
    for (int64_t g = 0; g < groups; ++g)
        offset[g * PANEL + c] = -128 * sum_of(row + g * group, std::min(group, k - g * group));
}

// One panel of `weight` [n, k] from output channel `first` on: its steps and its offsets. Channels past `n` are zero.
void pack_panel(const int8_t* weight, int64_t first, int64_t n, int64_t k, int64_t groups, int8_t* packed,
                int32_t* offset) {
    const int64_t channels = std::min(PANEL, n - first);
    if (channels < PANEL) {
        std::memset(packed, 0, divide_up(k, STEP) * STEP_BYTES);
        std::memset(offset, 0, groups * PANEL * sizeof *offset);
    }
    for (int64_t c = 0; c < channels; ++c) pack_channel(weight + (first + c) * k, c, k, groups, packed, offset);
}

// True where the pairs of all channels of a packed panel fit.
bool all_pairs_fit(const int8_t* packed, int64_t steps) {
    int most = 0;
    for (int64_t i = 0; i < steps * STEP_BYTES; i += 2) most = std::max(most, std::abs(packed[i] + packed[i + 1]));
    return most <= MOST_OF_TWO;
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// Bytes of the packed weight: all panels' steps, then all panels' offsets, then a byte a panel, in whole cache lines.
OPTKIT_API int64_t optkit_w8_bytes(int64_t n, int64_t k, int64_t groups) {
    constexpr int64_t LINE = 64;
    const int64_t panels = divide_up(n, PANEL);
    const int64_t panel_bytes = divide_up(k, STEP) * STEP_BYTES + groups * PANEL * int64_t{4};
    return panels * panel_bytes + divide_up(panels, LINE) * LINE;
}

// Pack `weight` int8 [n, k] into `blob` of optkit_w8_bytes(n, k, groups) bytes.
OPTKIT_API void optkit_pack_w8(const int8_t* weight, uint8_t* blob, int64_t n, int64_t k, int64_t groups, int threads) {
    const int64_t panels = divide_up(n, PANEL), bytes = divide_up(k, STEP) * STEP_BYTES;
    auto* steps = reinterpret_cast<int8_t*>(blob);
    auto* offset = reinterpret_cast<int32_t*>(blob + panels * bytes);
    auto* fit = reinterpret_cast<uint8_t*>(offset + panels * groups * PANEL);
    parallel_for(panels, even_chunk(panels, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            pack_panel(weight, i * PANEL, n, k, groups, steps + i * bytes, offset + i * groups * PANEL);
            fit[i] = all_pairs_fit(steps + i * bytes, divide_up(k, STEP));
        }
    });
}

// reference.linear_w8a8 of q [rows, k] with rows `q_stride` apart, k a multiple of 4 (and of 4 * groups): out [rows, n].
// `scale` is [rows, groups], `weight` the blob of optkit_pack_w8, `weight_scale` [panels][groups][32],
// float16 with `half`, else float32; `bias` may be null.
OPTKIT_API void optkit_linear_w8a8(const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
                                   const uint8_t* weight_scale, const float* bias, float* out, int64_t rows, int64_t n,
                                   int64_t k, int64_t groups, int half, int threads) {
    Linear p = packed_linear(weight, weight_scale, half, bias, out, n, k, groups);
    p.q = q, p.q_stride = q_stride, p.scale = scale;
    linear_w8a8(p, rows, k, threads);
}

// Rows `index` [rows] of a weight [count, width] packed as for optkit_linear_w8a8, dequantized: out [rows, width]. `width`
// is a multiple of 4 * groups. Gives 1 where an index is out of range.
OPTKIT_API int optkit_gather_w8_rows(const uint8_t* weight, const uint8_t* weight_scale, const int64_t* index, float* out,
                                     int64_t rows, int64_t count, int64_t width, int64_t groups, int half, int threads) {
    for (int64_t row = 0; row < rows; ++row)
        if (index[row] < 0 || index[row] >= count) return 1;
    const Linear p = packed_linear(weight, weight_scale, half, nullptr, out, count, width, groups);
    gather_w8_rows(p, index, rows, width, threads);
    return 0;
}
