// int8 linear layers with the dot products of Armv8.2 (FEAT_DotProd); see int8.cpp for the layout and the arithmetic.
//
// sdot multiplies signed bytes. So activations lose their zero point as they are loaded, by a flip of the top bit, and
// accumulators start at zero rather than at `offset`: the sums are the same integers. 16 bytes of a step are 4 output
// channels of 4 input channels each, and one lane of a register of activations, which holds 4 steps, multiplies them.
//
// A tile is R rows x a panel up to 3 rows, and R rows x half a panel up to 6: 24 of 32 registers accumulate, R hold
// activations and 1 weights. 4 steps of 6 rows are 16 loads of weights, 6 of activations and 96 sdot.
#include "neon_tile.h"

#if OPTKIT_ARM

namespace optkit {
namespace {

constexpr int ROWS = 6, QUADS = PANEL / QUAD;

// Step LANE of the registers of activations `x`, or any step of registers that hold one.
template <int LANE, int R, int C>
OPTKIT_NEON OPTKIT_INLINE void step(int32x4_t (&a)[R][C], const int8x16_t (&x)[R], const int8_t* w) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        int8x16_t weights = vld1q_s8(w + c * QUAD_BYTES);
        // gcc would load the next weights too, for which registers are missing
        if (R == ROWS) asm volatile("" : "+w"(weights), "+w"(a[R - 1][(c + C - 1) % C]));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) a[r][c] = vdotq_laneq_s32(a[r][c], weights, x[r], LANE);
    }
}

// The steps of one group.
template <int R, int C>
OPTKIT_NEON OPTKIT_INLINE void accumulate(int32x4_t (&a)[R][C], const uint8_t* q, int64_t stride, const int8_t* w,
                                          int64_t steps) {
    int8x16_t x[R];
    for (; steps >= STEPS_AT_ONCE; steps -= STEPS_AT_ONCE, q += STEPS_AT_ONCE * STEP) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) x[r] = without_zero_point(vld1q_u8(q + r * stride));
        step<0>(a, x, w);
        step<1>(a, x, w + STEP_BYTES);
        step<2>(a, x, w + 2 * STEP_BYTES);
        step<3>(a, x, w + 3 * STEP_BYTES);
        w += STEPS_AT_ONCE * STEP_BYTES;
    }
    for (; steps > 0; --steps, q += STEP, w += STEP_BYTES) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) x[r] = without_zero_point(one_step(q + r * stride));
        step<0>(a, x, w);
    }
}

// Group `g` of R rows and 4 C output channels from `column` of the panel on.
template <int R, int C, bool MINIMUM>
OPTKIT_NEON OPTKIT_INLINE void add_group(float* sums, const Linear& p, const Panel& panel, int64_t row, int64_t g,
                                         int64_t column) {
    const int64_t at = g * PANEL + column, first = g * p.group_steps;
    const GroupRows rows = group_rows(p, row, g);
    int32x4_t a[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) a[r][c] = vdupq_n_s32(0);
    accumulate(a, p.q + row * p.q_stride + first * STEP, p.q_stride, panel.weight + first * STEP_BYTES + column * STEP,
               p.group_steps);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        const float32x4_t scale = vld1q_f32(panel.weight_scale + at + c * QUAD);
        const float32x4_t minimum = MINIMUM ? vld1q_f32(panel.minimum + at + c * QUAD) : scale;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            add_scaled<MINIMUM>(sums + r * PANEL + column + c * QUAD, a[r][c], rows, r, scale, minimum);
    }
}

template <int R, bool MINIMUM>
OPTKIT_NEON void tile(const Linear& p, const Panel& panel, int64_t row) {
    constexpr int C = R <= ROWS / 2 ? QUADS : QUADS / 2;
    alignas(16) float sums[R * PANEL] = {};
    for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += C * QUAD)
        for (int64_t g = 0; g < p.groups; ++g) add_group<R, C, MINIMUM>(sums, p, panel, row, g, column);
    store_sums<R>(sums, p, row, panel.first);
}

using Tile = void (*)(const Linear&, const Panel&, int64_t);
constexpr Tile TILES[2][ROWS] = {
    {tile<1, false>, tile<2, false>, tile<3, false>, tile<4, false>, tile<5, false>, tile<6, false>},
    {tile<1, true>, tile<2, true>, tile<3, true>, tile<4, true>, tile<5, true>, tile<6, true>}};

}  // namespace

void linear_neon(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // tiles of nearly equal height
        const int64_t now = divide_up(rows, left);
        TILES[panel.minimum != nullptr][now - 1](p, panel, row);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
