// int8 linear layers with AVX2; see int8.cpp for the layout and the arithmetic.
//
// Without VNNI the one-instruction product of bytes, vpmaddubsw, saturates in 16 bits. So both sides are widened to
// 16 bits and multiplied by vpmaddwd, which is exact. Bytes 0 and 2 of a step are one pair of products and bytes 1 and
// 3 the other: shifts widen them where they lie, and each 32-bit lane stays one output channel.
//
// Activations are widened once for each panel, less their zero point, into `Wide`: 3 % of the work of a panel.
// A tile is R rows x 16 output channels, half a panel: 2 registers of 8 output channels a row. For 32 products that are
// 2 vpmaddwd, 2 vpaddd and 6 / (2 R) shifts.
#include "dispatch.h"
#include "int8.h"
#include "scratch.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int ROWS = 4, HALF = 16, LANES = 8;

// Activations of up to ROWS rows as pairs of int16, q - 128: a pair to a step.
struct Wide {
    int32_t* even;  // [rows][steps]: bytes 0 and 2
    int32_t* odd;   // [rows][steps]: bytes 1 and 3
    int64_t steps;
};

OPTKIT_AVX2 OPTKIT_INLINE __m256i load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

OPTKIT_AVX2 OPTKIT_INLINE void widen_row(const uint8_t* q, int64_t steps, int32_t* even, int32_t* odd) {
    const __m256i zero_point = _mm256_set1_epi16(128), low = _mm256_set1_epi16(255);
    int64_t s = 0;
    for (; s + LANES <= steps; s += LANES) {
        const __m256i bytes = load(q + s * STEP);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(even + s),
                            _mm256_sub_epi16(_mm256_and_si256(bytes, low), zero_point));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(odd + s),
                            _mm256_sub_epi16(_mm256_srli_epi16(bytes, 8), zero_point));
    }
    for (; s < steps; ++s) {
        const uint8_t* four = q + s * STEP;
        const int16_t pairs[4] = {static_cast<int16_t>(four[0] - 128), static_cast<int16_t>(four[2] - 128),
                                  static_cast<int16_t>(four[1] - 128), static_cast<int16_t>(four[3] - 128)};
        __builtin_memcpy(even + s, pairs, sizeof *even);
        __builtin_memcpy(odd + s, pairs + 2, sizeof *odd);
    }
}

// The weights of one step and 8 output channels as pairs of int16.
struct Pairs {
    __m256i even, odd;
};

OPTKIT_AVX2 OPTKIT_INLINE Pairs widened(const int8_t* w) {
    const __m256i bytes = load(w);
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

OPTKIT_AVX2 OPTKIT_INLINE __m256i add_products(__m256i a, __m256i w, __m256i x) {
    return _mm256_add_epi32(a, _mm256_madd_epi16(w, x));
}

// One group of R rows; `x` is their activations from the group's first step on.
template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void accumulate(__m256i (&a)[R][2], const Wide& x, const int8_t* w, int64_t steps) {
    for (int64_t s = 0; s < steps; ++s, w += STEP_BYTES) {
        const Pairs left = widened(w), right = widened(w + LANES * STEP);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m256i even = _mm256_set1_epi32(x.even[r * x.steps + s]);
            a[r][0] = add_products(a[r][0], left.even, even);
            a[r][1] = add_products(a[r][1], right.even, even);
            const __m256i odd = _mm256_set1_epi32(x.odd[r * x.steps + s]);
            a[r][0] = add_products(a[r][0], left.odd, odd);
            a[r][1] = add_products(a[r][1], right.odd, odd);
        }
    }
}

template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void store(const __m256 (&sum)[R][2], const Linear& p, int64_t row, int64_t first) {
    for (int r = 0; r < R; ++r) {
        float values[HALF];
        _mm256_storeu_ps(values, sum[r][0]);
        _mm256_storeu_ps(values + LANES, sum[r][1]);
        float* out = p.out + (row + r) * p.n + first;
        for (int64_t c = 0; c < HALF && first + c < p.n; ++c) out[c] = p.bias ? values[c] + p.bias[first + c] : values[c];
    }
}

template <int R>
OPTKIT_AVX2 void tile(const Linear& p, const Panel& panel, const Wide& wide, int64_t half, int64_t row) {
    const int8_t* w = panel.weight + half * HALF * STEP;
    __m256 sum[R][2] = {};
    for (int64_t g = 0; g < p.groups; ++g, w += p.group_steps * STEP_BYTES) {
        const int64_t at = g * PANEL + half * HALF, step = g * p.group_steps;
        __m256i a[R][2] = {};
        accumulate<R>(a, {wide.even + step, wide.odd + step, wide.steps}, w, p.group_steps);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
            const __m256 scales = _mm256_loadu_ps(panel.weight_scale + at + c * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(p.scale[(row + r) * p.groups + g]), scales);
                sum[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a[r][c]), scale, sum[r][c]);
                if (!panel.minimum) continue;
                const __m256 minimums = _mm256_loadu_ps(panel.minimum + at + c * LANES);
                sum[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(p.sums[(row + r) * p.groups + g]), minimums, sum[r][c]);
            }
        }
    }
    store<R>(sum, p, row, panel.first + half * HALF);
}

using Tile = void (*)(const Linear&, const Panel&, const Wide&, int64_t, int64_t);
constexpr Tile TILES[ROWS] = {tile<1>, tile<2>, tile<3>, tile<4>};

OPTKIT_AVX2 void widen_rows(const Linear& p, int64_t row, int64_t rows, const Wide& to) {
    for (int64_t r = 0; r < rows; ++r)
        widen_row(p.q + (row + r) * p.q_stride, to.steps, to.even + r * to.steps, to.odd + r * to.steps);
}

}  // namespace

void linear_avx2(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    thread_local GrowingMemory scratch;
    auto* memory = scratch.at_least<int32_t>(2 * ROWS * p.steps);
    const Wide wide{memory, memory + ROWS * p.steps, p.steps};
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // tiles of nearly equal height
        const int64_t now = divide_up(rows, left);
        widen_rows(p, row, now, wide);
        for (int64_t half = 0; half < 2 && panel.first + half * HALF < p.n; ++half)
            TILES[now - 1](p, panel, wide, half, row);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
