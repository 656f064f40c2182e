// int8 linear layers with the matrix products of Armv8.6 (FEAT_I8MM); see int8.cpp for the layout and the arithmetic,
// and paired_rows.h for the operands.
//
// smmla multiplies 2 rows x 8 input channels by 8 input channels x 2 output channels: twice the products of sdot. Its
// register of weights is a zip of two steps of the packed panel (32-bit words: 4 input channels of one output channel),
// so that one layout serves both instructions. Up to 3 rows run by sdot, for which no zip is needed; up to 6 zip in
// registers; for more, a panel is zipped once, in scratch memory. Activations are paired once for all panels of a task.
//
// A tile is R rows x 16 output channels: up to 3 pairs of rows x 8 pairs of channels, 24 of 32 registers.
#include "paired_rows.h"

#if OPTKIT_ARM

#include <cstring>

#include "neon_tile.h"
#include "scratch.h"

namespace optkit {
namespace {

constexpr int ROWS = 6, QUADS = 4;  // of a tile
constexpr int64_t COLUMNS = QUADS * QUAD, DOT_ROWS = 3;

// The weights of two steps and 4 output channels: channels 0 and 1, channels 2 and 3.
struct Pair {
    int8x16_t low, high;
};

OPTKIT_I8MM OPTKIT_INLINE Pair zipped(int8x16_t first, int8x16_t second) {
    const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
    return {vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))};
}

// One pair of steps of R rows.
template <int P>
OPTKIT_I8MM OPTKIT_INLINE void multiply(int32x4_t (&a)[P][2 * QUADS], const int8x16_t (&x)[P], Pair w, int quad) {
#pragma GCC unroll 3
    for (int i = 0; i < P; ++i) {
        a[i][2 * quad] = vmmlaq_s32(a[i][2 * quad], x[i], w.low);
        a[i][2 * quad + 1] = vmmlaq_s32(a[i][2 * quad + 1], x[i], w.high);
    }
}

// The pairs of one group. PAIRED: `w` holds pairs; else it holds steps, of which the last may have no partner.
template <int P, bool PAIRED>
OPTKIT_I8MM OPTKIT_INLINE void accumulate(int32x4_t (&a)[P][2 * QUADS], const int8_t* x, int64_t x_stride,
                                          const int8_t* w, int64_t steps) {
    for (; steps > 0; steps -= 2, x += PAIRED_ROW, w += PAIR_BYTES) {
        int8x16_t rows[P];
#pragma GCC unroll 3
        for (int i = 0; i < P; ++i) rows[i] = vld1q_s8(x + i * x_stride);
#pragma GCC unroll 4
        for (int j = 0; j < QUADS; ++j) {
            if (PAIRED) {
                const int8_t* at = w + 2 * j * QUAD_BYTES;
                multiply(a, rows, {vld1q_s8(at), vld1q_s8(at + QUAD_BYTES)}, j);
            } else {
                const int8_t* at = w + j * QUAD_BYTES;
                const int8x16_t first = vld1q_s8(at);
                multiply(a, rows, zipped(first, steps > 1 ? vld1q_s8(at + STEP_BYTES) : first), j);
            }
        }
    }
}

// Group `g` of R rows and 16 output channels from `column` of the panel on.
template <int R, bool PAIRED, bool MINIMUM>
OPTKIT_I8MM OPTKIT_INLINE void add_group(float* sums, const Linear& p, const Panel& panel, PairedRows x, int64_t row,
                                         int64_t g, int64_t column) {
    constexpr int P = (R + 1) / 2;
    const int64_t at = g * PANEL + column, pairs = pairs_of(p.group_steps);
    const int8_t* w = PAIRED ? panel.weight + g * pairs * PAIR_BYTES + column * 2 * STEP
                             : panel.weight + g * p.group_steps * STEP_BYTES + column * STEP;
    const GroupRows rows = group_rows(p, row, g);
    int32x4_t a[P][2 * QUADS];
#pragma GCC unroll 3
    for (int i = 0; i < P; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * QUADS; ++j) a[i][j] = vdupq_n_s32(0);
    accumulate<P, PAIRED>(a, x.at + g * pairs * PAIRED_ROW, x.pairs * PAIRED_ROW, w, p.group_steps);
#pragma GCC unroll 4
    for (int j = 0; j < QUADS; ++j) {
        const float32x4_t scale = vld1q_f32(panel.weight_scale + at + j * QUAD);
        const float32x4_t minimum = MINIMUM ? vld1q_f32(panel.minimum + at + j * QUAD) : scale;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const int64x2_t low = vreinterpretq_s64_s32(a[r / 2][2 * j]);
            const int64x2_t high = vreinterpretq_s64_s32(a[r / 2][2 * j + 1]);
            const int32x4_t total = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
            add_scaled<MINIMUM>(sums + r * PANEL + column + j * QUAD, total, rows, r, scale, minimum);
        }
    }
}

template <int R, bool PAIRED, bool MINIMUM>
OPTKIT_I8MM void tile(const Linear& p, const Panel& panel, PairedRows x, int64_t row) {
    alignas(16) float sums[R * PANEL] = {};
    for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += COLUMNS)
        for (int64_t g = 0; g < p.groups; ++g) add_group<R, PAIRED, MINIMUM>(sums, p, panel, x, row, g, column);
    store_sums<R>(sums, p, row, panel.first);
}

using Tile = void (*)(const Linear&, const Panel&, PairedRows, int64_t);
template <bool PAIRED, bool MINIMUM>
constexpr Tile TILES[ROWS] = {tile<1, PAIRED, MINIMUM>, tile<2, PAIRED, MINIMUM>, tile<3, PAIRED, MINIMUM>,
                              tile<4, PAIRED, MINIMUM>, tile<5, PAIRED, MINIMUM>, tile<6, PAIRED, MINIMUM>};

// Tiles of nearly equal height, each of whole pairs of rows but the last.
void run_tiles(const Tile* tiles, const Linear& p, const Panel& panel, PairedRows x, int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {
        const int64_t now = std::min(rows, divide_up(divide_up(rows, left), 2) * 2);
        tiles[now - 1](p, panel, x, row);
        x.at += now / 2 * x.pairs * PAIRED_ROW;
        row += now;
        rows -= now;
    }
}

// The weights of a panel in pairs.
OPTKIT_I8MM void pair_panel(const Linear& p, const int8_t* w, int8_t* to) {
    for (int64_t g = 0; g < p.groups; ++g)
        for (int64_t steps = p.group_steps; steps > 0; steps -= 2, w += std::min<int64_t>(2, steps + 2) * STEP_BYTES)
            for (int64_t j = 0; j < PANEL / QUAD; ++j, to += 2 * QUAD_BYTES) {
                const int8x16_t first = vld1q_s8(w + j * QUAD_BYTES);
                const Pair pair = zipped(first, steps > 1 ? vld1q_s8(w + STEP_BYTES + j * QUAD_BYTES) : first);
                vst1q_s8(to, pair.low);
                vst1q_s8(to + QUAD_BYTES, pair.high);
            }
}

PairedRows paired(const Linear& p, int64_t row, int64_t rows) {
    thread_local GrowingMemory scratch;
    auto* to = scratch.at_least<int8_t>(paired_bytes(rows, p.groups, p.group_steps));
    pair_rows(p.q + row * p.q_stride, p.q_stride, rows, p.groups, p.group_steps, to);
    return {to, p.groups * pairs_of(p.group_steps)};
}

// `x`: the rows [row, row + rows).
void rows_of_panel(const Linear& p, Panel panel, PairedRows x, int64_t row, int64_t rows) {
    if (rows <= ROWS)
        return run_tiles(panel.minimum ? TILES<false, true> : TILES<false, false>, p, panel, x, row, rows);
    thread_local GrowingMemory scratch;
    auto* weight = scratch.at_least<int8_t>(x.pairs * PAIR_BYTES);
    pair_panel(p, panel.weight, weight);
    panel.weight = weight;
    linear_paired(p, panel, x, row, rows);
}

// Two rows of a group, `second` null for a row of zeros.
OPTKIT_I8MM void pair_group(const uint8_t* first, const uint8_t* second, int64_t steps, int8_t* to) {
    const uint8x8_t zero_point = vdup_n_u8(128);
    for (; steps > 1; steps -= 2, to += PAIRED_ROW, first += 2 * STEP) {
        vst1_s8(to, vreinterpret_s8_u8(veor_u8(vld1_u8(first), zero_point)));
        vst1_s8(to + 2 * STEP, second ? vreinterpret_s8_u8(veor_u8(vld1_u8(second), zero_point)) : vdup_n_s8(0));
        if (second) second += 2 * STEP;
    }
    if (steps == 0) return;
    std::memset(to, 0, PAIRED_ROW);
    for (int64_t k = 0; k < STEP; ++k) {
        to[k] = static_cast<int8_t>(first[k] ^ 128);
        if (second) to[2 * STEP + k] = static_cast<int8_t>(second[k] ^ 128);
    }
}

}  // namespace

void pair_rows(const uint8_t* q, int64_t q_stride, int64_t rows, int64_t groups, int64_t group_steps, int8_t* to) {
    for (int64_t r = 0; r < rows; r += 2, q += 2 * q_stride)
        for (int64_t g = 0; g < groups; ++g, to += pairs_of(group_steps) * PAIRED_ROW) {
            const uint8_t* first = q + g * group_steps * STEP;
            pair_group(first, r + 1 < rows ? first + q_stride : nullptr, group_steps, to);
        }
}

void linear_paired(const Linear& p, const Panel& panel, PairedRows x, int64_t row, int64_t rows) {
    run_tiles(panel.minimum ? TILES<true, true> : TILES<true, false>, p, panel, x, row, rows);
}

void linear_i8mm(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    if (rows <= DOT_ROWS) return linear_neon(p, panel, row, rows);
    rows_of_panel(p, panel, paired(p, row, rows), row, rows);
}

void linear_panels_i8mm(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows) {
    const PairedRows x = rows <= DOT_ROWS ? PairedRows{} : paired(p, row, rows);
    thread_local GrowingMemory scratch;
    for (int64_t i = from; i < to; ++i) {
        const Panel panel = panel_of(p, i, rows, scratch);
        if (rows <= DOT_ROWS)
            linear_neon(p, panel, row, rows);
        else
            rows_of_panel(p, panel, x, row, rows);
    }
}

}  // namespace optkit

#endif
