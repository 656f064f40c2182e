// int4 linear layers with the dot and matrix products of Arm: tiles for few rows, which unpack in registers, and
// unpacking for many; see int4.cpp for the layout and the arithmetic.
//
// 16 bytes of codes are two steps of 4 output channels: a mask gives the first, a shift the second. Codes are 0 to 15,
// so sdot takes them as they are, beside activations less their zero point; symmetric weights (code - 8) start at -8 *
// the sum of the activations. A tile of few rows is R rows x a panel up to 2 rows, and R rows x half a panel up to 4.
//
// Many rows: without smmla a panel is unpacked to bytes less their zero point, for the tiles of int8_neon.cpp. With
// smmla it is unpacked to pairs of steps (paired_rows.h), for those of int8_i8mm.cpp.
#include "int4.h"

#include "dispatch.h"
#include "neon_tile.h"
#include "paired_rows.h"

#if OPTKIT_ARM

namespace optkit {
namespace {

constexpr int ROWS = 4, QUADS = PANEL / QUAD;

// -- scales ----------------------------------------------------------------------------------------------

// The 4 scales or minimums from `column` on of the 32 at `at`.
OPTKIT_NEON OPTKIT_INLINE float32x4_t widened(const uint8_t* at, bool half, int64_t column) {
    if (!half) return vld1q_f32(reinterpret_cast<const float*>(at) + column);
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 2 * column)));
}

// The 4 minimums from `column` on of a record, whose scales there are `scale`; see widen_minimums.
OPTKIT_NEON OPTKIT_INLINE float32x4_t minimums(const uint8_t* record, RecordLayout layout, float32x4_t scale,
                                               int64_t column) {
    const uint8_t* low = record + layout.row();
    if (layout.levels == Levels::minimum) return widened(low, layout.half, column);
    const uint8x8_t bytes = vreinterpret_u8_u32(vld1_dup_u32(reinterpret_cast<const uint32_t*>(low + column)));
    const float32x4_t zero = vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
    return vmulq_f32(vsubq_f32(vdupq_n_f32(0.0f), zero), scale);
}

// -- codes -----------------------------------------------------------------------------------------------

// Two steps of 4 output channels.
struct Codes {
    int8x16_t first, second;
};

OPTKIT_NEON OPTKIT_INLINE Codes codes_at(const uint8_t* at) {
    const uint8x16_t both = vld1q_u8(at);
    return {vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
}

// -- few rows --------------------------------------------------------------------------------------------

// Two steps, of which LANE is the first in the registers of activations.
template <int LANE, int R, int C>
OPTKIT_NEON OPTKIT_INLINE void two_steps(int32x4_t (&a)[R][C], const int8x16_t (&x)[R], const uint8_t* codes) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        const Codes w = codes_at(codes + c * QUAD_BYTES);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            a[r][c] = vdotq_laneq_s32(a[r][c], w.first, x[r], LANE);
            a[r][c] = vdotq_laneq_s32(a[r][c], w.second, x[r], LANE + 1);
        }
    }
}

// The steps of one group.
template <int R, int C>
OPTKIT_NEON OPTKIT_INLINE void accumulate(int32x4_t (&a)[R][C], const int8_t* q, int64_t stride, const uint8_t* codes,
                                          int64_t steps) {
    int8x16_t x[R];
    for (; steps >= STEPS_AT_ONCE; steps -= STEPS_AT_ONCE, q += STEPS_AT_ONCE * STEP, codes += 2 * STEP_BYTES) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) x[r] = vld1q_s8(q + r * stride);
        two_steps<0>(a, x, codes);
        two_steps<2>(a, x, codes + STEP_BYTES);
    }
    if (steps == 0) return;  // else two are left
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = vcombine_s8(vld1_s8(q + r * stride), vdup_n_s8(0));
    two_steps<0>(a, x, codes);
}

// One group of R rows and 4 C output channels from `column` on; `start` is the first row's.
template <int R, int C, bool MINIMUM>
OPTKIT_NEON OPTKIT_INLINE void add_group(float* sums, const GroupRows& rows, const int32_t* start, const int8_t* q,
                                         int64_t stride, const uint8_t* record, RecordLayout layout, int64_t steps,
                                         int64_t column) {
    int32x4_t a[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) a[r][c] = vdupq_n_s32(start[r * rows.groups]);
    accumulate(a, q, stride, record + layout.codes() + column * STEP, steps);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        const int64_t at = column + c * QUAD;
        const float32x4_t scale = widened(record, layout.half, at);
        const float32x4_t minimum = MINIMUM ? minimums(record, layout, scale, at) : scale;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) add_scaled<MINIMUM>(sums + r * PANEL + at, a[r][c], rows, r, scale, minimum);
    }
}

template <int R, bool MINIMUM>
OPTKIT_NEON void tile(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout, int64_t first,
                      int64_t row) {
    constexpr int C = R <= ROWS / 2 ? QUADS : QUADS / 2;
    alignas(16) float sums[R * PANEL] = {};
    const auto* q = reinterpret_cast<const int8_t*>(p.q) + row * p.q_stride;
    for (int64_t g = 0; g < p.groups; ++g, record += layout.size(p.group_steps), q += p.group_steps * STEP)
        for (int64_t column = 0; column < PANEL && first + column < p.n; column += C * QUAD)
            add_group<R, C, MINIMUM>(sums, group_rows(p, row, g), starts + row * p.groups + g, q, p.q_stride, record,
                                     layout, p.group_steps, column);
    store_sums<R>(sums, p, row, first);
}

using Tile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t);
constexpr Tile TILES[2][ROWS] = {{tile<1, false>, tile<2, false>, tile<3, false>, tile<4, false>},
                                 {tile<1, true>, tile<2, true>, tile<3, true>, tile<4, true>}};

// -- many rows -------------------------------------------------------------------------------------------

OPTKIT_NEON OPTKIT_INLINE void unpack_scales(const uint8_t* record, RecordLayout layout, float* scale, float* minimum) {
    for (int64_t c = 0; c < PANEL; c += QUAD) {
        const float32x4_t values = widened(record, layout.half, c);
        vst1q_f32(scale + c, values);
        if (layout.minimum()) vst1q_f32(minimum + c, minimums(record, layout, values, c));
    }
}

// Two steps of a panel, less `zero`; PAIRED: zipped to a pair.
template <bool PAIRED>
OPTKIT_NEON OPTKIT_INLINE void unpack_two_steps(const uint8_t* codes, int8x16_t zero, int8_t* weight) {
    for (int64_t i = 0; i < STEP_BYTES; i += QUAD_BYTES) {
        const Codes w = codes_at(codes + i);
        const int8x16_t first = vsubq_s8(w.first, zero), second = vsubq_s8(w.second, zero);
        const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
        vst1q_s8(weight + (PAIRED ? 2 * i : i), PAIRED ? vreinterpretq_s8_s32(vzip1q_s32(a, b)) : first);
        vst1q_s8(weight + (PAIRED ? 2 * i + QUAD_BYTES : STEP_BYTES + i),
                 PAIRED ? vreinterpretq_s8_s32(vzip2q_s32(a, b)) : second);
    }
}

template <bool PAIRED>
OPTKIT_NEON void unpack(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) {
    const RecordLayout& layout = p.layout;
    const int8x16_t zero = vdupq_n_s8(layout.minimum() ? 0 : 8);
    int8_t* weight = to.weight;
    for (int64_t g = 0; g < p.groups; ++g, records += layout.size(p.group_steps)) {
        unpack_scales(records, layout, to.scale + g * PANEL, to.minimum + g * PANEL);
        const uint8_t* codes = records + layout.codes();
        for (int64_t s = 0; s < p.group_steps; s += 2, codes += STEP_BYTES, weight += 2 * STEP_BYTES)
            unpack_two_steps<PAIRED>(codes, zero, weight);
    }
}

}  // namespace

void unpack_neon(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) { unpack<false>(p, records, to); }
void unpack_i8mm(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) { unpack<true>(p, records, to); }

void linear_w4a8_neon(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout, int64_t first,
                      int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // tiles of nearly equal height
        const int64_t now = divide_up(rows, left);
        TILES[layout.minimum()][now - 1](p, start, records, layout, first, row);
        row += now;
        rows -= now;
    }
}

void linear_paired_codes(const Linear& p, const int32_t*, const Panel& panel, int64_t row, int64_t rows) {
    linear_paired(p, panel, {reinterpret_cast<const int8_t*>(p.q), p.steps / 2}, row, rows);
}

}  // namespace optkit

#endif
