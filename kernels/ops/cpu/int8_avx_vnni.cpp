// int8 linear layers with AVX-VNNI, vpdpbusd of 256 bits; see int8.cpp for the layout and the arithmetic.
//
// A tile is R rows x 16 output channels, half a panel, with R to 6: 12 registers accumulate, 2 hold weights and 1 the 4
// bytes of a row. One or two rows take a whole panel, so that decode reads memory strictly forward.
//
// Written without a CPU that has the instructions: the tests run the kernel emulated, its speed was not measured.
#include "ymm_tile.h"

#ifdef OPTKIT_AVX_VNNI

namespace optkit {
namespace {

constexpr int ROWS = 6, HALF = 2, WHOLE = 4;  // registers across half a panel and a whole one
constexpr int64_t WHOLE_ROWS = 2;             // up to here a tile takes a whole panel

OPTKIT_AVX_VNNI OPTKIT_INLINE Lanes dot(Lanes a, __m256i u8, Lanes s8) {
    return (Lanes)_mm256_dpbusd_avx_epi32((__m256i)a, u8, (__m256i)s8);
}

// The steps of one group. With ZERO_POINT the last row is not read: it is 128 everywhere.
template <int R, int C, bool ZERO_POINT = false>
OPTKIT_AVX_VNNI OPTKIT_INLINE void accumulate(Lanes (&a)[R][C], const uint8_t* q, int64_t stride, const int8_t* w,
                                              int64_t steps) {
    for (int64_t s = 0; s < steps; ++s, q += STEP, w += STEP_BYTES) {
        Lanes weights[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) weights[c] = load(w + c * COLUMNS * STEP);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m256i x = ZERO_POINT && r == R - 1 ? _mm256_set1_epi8(-128) : broadcast(q + r * stride);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) a[r][c] = dot(a[r][c], x, weights[c]);
        }
    }
}

// One row waits for memory, and with small groups the offsets are a tenth of it. So they are computed from the weights at
// hand, as one more row of activations, rather than read.
template <int C>
OPTKIT_AVX_VNNI OPTKIT_INLINE void accumulate_row(Lanes (&a)[1][C], const uint8_t* q, const int8_t* w, int64_t steps) {
    Lanes b[2][C] = {};
    accumulate<2, C, true>(b, q, 0, w, steps);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) a[0][c] = b[0][c] - b[1][c];
}

// R rows of the C registers from output channel `column` of the panel on.
template <int R, int C>
OPTKIT_AVX_VNNI void tile(const Linear& p, const Panel& panel, int64_t column, int64_t row) {
    constexpr int64_t WIDTH = C * COLUMNS;
    const uint8_t* q = p.q + row * p.q_stride;
    const int8_t* w = panel.weight + column * STEP;
    alignas(32) float sums[R * WIDTH] = {};
    for (int64_t g = 0; g < p.groups; ++g, q += p.group_steps * STEP, w += p.group_steps * STEP_BYTES) {
        const int64_t at = g * PANEL + column;
        Lanes a[R][C];
        if constexpr (R == 1) {
            accumulate_row<C>(a, q, w, p.group_steps);
        } else {
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) a[r][c] = load(panel.offset + at + c * COLUMNS);
            accumulate<R, C>(a, q, p.q_stride, w, p.group_steps);
        }
        add_group(sums, a, p.scale + row * p.groups + g, p.groups, panel.weight_scale + at);
    }
    store<R, WIDTH>(sums, p, row, panel.first + column);
}

using Tile = void (*)(const Linear&, const Panel&, int64_t, int64_t);
constexpr Tile WHOLES[WHOLE_ROWS] = {tile<1, WHOLE>, tile<2, WHOLE>};
constexpr Tile HALVES[ROWS] = {nullptr, nullptr, tile<3, HALF>, tile<4, HALF>, tile<5, HALF>, tile<6, HALF>};

}  // namespace

void linear_avx_vnni(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    if (rows <= WHOLE_ROWS) return WHOLES[rows - 1](p, panel, 0, row);
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // tiles of nearly equal height
        const int64_t now = divide_up(rows, left);
        for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += HALF * COLUMNS)
            HALVES[now - 1](p, panel, column, row);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
