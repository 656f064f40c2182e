// Common parts of the Neon tiles of the int8 and int4 linear layers: R rows x some output channels in registers of 4.
//
// Sums of floats lie in memory, [R][PANEL]: accumulators take the registers.
#pragma once

#include "dispatch.h"
#include "int8.h"

#if OPTKIT_ARM

namespace optkit {
namespace {

constexpr int64_t QUAD = 4;                   // output channels of a register of sums
constexpr int64_t QUAD_BYTES = QUAD * STEP;   // a register: one step's weights for 4 output channels
constexpr int64_t STEPS_AT_ONCE = 16 / STEP;  // in a register of activations

// What rows have of one group: pointers to the first row's, the others' are `groups` apart.
struct GroupRows {
    const float* scale;
    const float* sums;  // scale * sum of the activations; null without minimums
    int64_t groups;
};

OPTKIT_INLINE GroupRows group_rows(const Linear& p, int64_t row, int64_t g) {
    const int64_t at = row * p.groups + g;
    return {p.scale + at, p.sums ? p.sums + at : nullptr, p.groups};
}

// Add the sums of products of 4 output channels of row r to `sum`, scaled, and with MINIMUM what minimums contribute.
template <bool MINIMUM>
OPTKIT_NEON OPTKIT_INLINE void add_scaled(float* sum, int32x4_t total, const GroupRows& rows, int r,
                                          float32x4_t weight_scale, float32x4_t minimum) {
    const float32x4_t scale = vmulq_f32(vdupq_n_f32(rows.scale[r * rows.groups]), weight_scale);
    float32x4_t added = vfmaq_f32(vld1q_f32(sum), vcvtq_f32_s32(total), scale);
    if (MINIMUM) added = vfmaq_f32(added, vdupq_n_f32(rows.sums[r * rows.groups]), minimum);
    vst1q_f32(sum, added);
}

// The sums [R][PANEL] and the bias of the output channels [first, first + PANEL), or of as many as the layer has.
template <int R>
OPTKIT_NEON OPTKIT_INLINE void store_sums(const float* sums, const Linear& p, int64_t row, int64_t first) {
    const int64_t columns = std::min(PANEL, p.n - first);
    for (int r = 0; r < R; ++r, sums += PANEL) {
        float* out = p.out + (row + r) * p.n + first;
        int64_t c = 0;
        for (; c + QUAD <= columns; c += QUAD) {
            const float32x4_t sum = vld1q_f32(sums + c);
            vst1q_f32(out + c, p.bias ? vaddq_f32(sum, vld1q_f32(p.bias + first + c)) : sum);
        }
        for (; c < columns; ++c) out[c] = p.bias ? sums[c] + p.bias[first + c] : sums[c];
    }
}

// Activations as signed bytes.
OPTKIT_NEON OPTKIT_INLINE int8x16_t without_zero_point(uint8x16_t q) {
    return vreinterpretq_s8_u8(veorq_u8(q, vdupq_n_u8(128)));
}

// One step of a row of activations, in all four lanes.
OPTKIT_NEON OPTKIT_INLINE uint8x16_t one_step(const uint8_t* q) {
    uint32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return vreinterpretq_u8_u32(vdupq_n_u32(four));
}

}  // namespace
}  // namespace optkit

#endif
