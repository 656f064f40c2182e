// The sixteen floats of simd.h and the sixteen words of simd_int8.h in four registers of Neon, for CPUs with the dot
// product instructions of Armv8.2 (FEAT_DotProd). Included by simd_int8.h.
//
// Fused multiply-adds, comparisons, roundings and the order of sums are those of the x86 variants, so the bits are the
// same, except the sign and the payload of NaN.
#pragma once

#include "simd.h"

#if OPTKIT_ARM

namespace optkit {

#define OP static OPTKIT_NEON OPTKIT_INLINE
struct Neon {
    using Quad = float32x4_t;
    struct Vec {
        Quad q[4];
    };
    static constexpr int tile_rows = 6, tile_vecs = 1;  // 24 of 32 registers accumulate
    static constexpr bool transposes_lines = false, folds_rows = false;

    OP Vec load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
    OP Vec load_some(const float* p, int n) {
        float full[kLanes] = {};
        std::memcpy(full, p, n * sizeof(float));
        return load(full);
    }
    OP void store(float* p, Vec a) {
        vst1q_f32(p, a.q[0]);
        vst1q_f32(p + 4, a.q[1]);
        vst1q_f32(p + 8, a.q[2]);
        vst1q_f32(p + 12, a.q[3]);
    }
    OP void store_some(float* p, Vec a, int n) {
        float full[kLanes];
        store(full, a);
        std::memcpy(p, full, n * sizeof(float));
    }
    OP Vec all(float x) {
        const Quad q = vdupq_n_f32(x);
        return {{q, q, q, q}};
    }
    OP Vec add(Vec a, Vec b) {
        return {{vaddq_f32(a.q[0], b.q[0]), vaddq_f32(a.q[1], b.q[1]), vaddq_f32(a.q[2], b.q[2]),
                 vaddq_f32(a.q[3], b.q[3])}};
    }
    OP Vec sub(Vec a, Vec b) {
        return {{vsubq_f32(a.q[0], b.q[0]), vsubq_f32(a.q[1], b.q[1]), vsubq_f32(a.q[2], b.q[2]),
                 vsubq_f32(a.q[3], b.q[3])}};
    }
    OP Vec mul(Vec a, Vec b) {
        return {{vmulq_f32(a.q[0], b.q[0]), vmulq_f32(a.q[1], b.q[1]), vmulq_f32(a.q[2], b.q[2]),
                 vmulq_f32(a.q[3], b.q[3])}};
    }
    OP Vec div(Vec a, Vec b) {
        return {{vdivq_f32(a.q[0], b.q[0]), vdivq_f32(a.q[1], b.q[1]), vdivq_f32(a.q[2], b.q[2]),
                 vdivq_f32(a.q[3], b.q[3])}};
    }
    OP Vec fma(Vec a, Vec b, Vec c) {
        return {{vfmaq_f32(c.q[0], a.q[0], b.q[0]), vfmaq_f32(c.q[1], a.q[1], b.q[1]),
                 vfmaq_f32(c.q[2], a.q[2], b.q[2]), vfmaq_f32(c.q[3], a.q[3], b.q[3])}};
    }
    // b where one is NaN, as on x86; the instruction of Neon gives NaN.
    OP Vec max(Vec a, Vec b) {
        return {{greater(a.q[0], b.q[0]), greater(a.q[1], b.q[1]), greater(a.q[2], b.q[2]), greater(a.q[3], b.q[3])}};
    }
    OP Vec abs(Vec a) { return {{vabsq_f32(a.q[0]), vabsq_f32(a.q[1]), vabsq_f32(a.q[2]), vabsq_f32(a.q[3])}}; }
    OP Vec round(Vec a) {
        return {{vrndnq_f32(a.q[0]), vrndnq_f32(a.q[1]), vrndnq_f32(a.q[2]), vrndnq_f32(a.q[3])}};
    }
    OP Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
        return {{vbslq_f32(vcltq_f32(a.q[0], b.q[0]), yes.q[0], no.q[0]),
                 vbslq_f32(vcltq_f32(a.q[1], b.q[1]), yes.q[1], no.q[1]),
                 vbslq_f32(vcltq_f32(a.q[2], b.q[2]), yes.q[2], no.q[2]),
                 vbslq_f32(vcltq_f32(a.q[3], b.q[3]), yes.q[3], no.q[3])}};
    }
    OP Vec times_two_to_or_0(Vec a, Vec n) {
        a = {{scaled(a.q[0], n.q[0]), scaled(a.q[1], n.q[1]), scaled(a.q[2], n.q[2]), scaled(a.q[3], n.q[3])}};
        return where_less(n, all(-125.0f), all(0.0f), a);
    }
    OP float sum(Vec a) {
        const Quad b = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
        const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
        return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
    }
    OP float largest(Vec a) {
        const Quad b = greater(greater(a.q[0], a.q[2]), greater(a.q[1], a.q[3]));
        const Quad c = greater(b, vextq_f32(b, b, 2));
        return vgetq_lane_f32(greater(c, vextq_f32(c, c, 1)), 0);
    }
    OP void transpose(const char* const* rows, Vec (&out)[4]) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const Quad a = quad(rows[4 * i]), b = quad(rows[4 * i + 1]);
            const Quad c = quad(rows[4 * i + 2]), d = quad(rows[4 * i + 3]);
            const Quad ac0 = vzip1q_f32(a, c), ac1 = vzip2q_f32(a, c), bd0 = vzip1q_f32(b, d), bd1 = vzip2q_f32(b, d);
            out[0].q[i] = vzip1q_f32(ac0, bd0);
            out[1].q[i] = vzip2q_f32(ac0, bd0);
            out[2].q[i] = vzip1q_f32(ac1, bd1);
            out[3].q[i] = vzip2q_f32(ac1, bd1);
        }
    }

    // What an x86 conversion gives: the nearest integer, and INT32_MIN for NaN and what is out of range.
    OP int32x4_t nearest(Quad a) {
        return vbslq_s32(vcaltq_f32(a, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(a), vdupq_n_s32(INT32_MIN));
    }

  private:
    OP Quad greater(Quad a, Quad b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    OP Quad scaled(Quad a, Quad n) {
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(nearest(n), 23)));
    }
    OP Quad quad(const char* p) { return vld1q_f32(reinterpret_cast<const float*>(p)); }
};

// Products are of two signed bytes (numbers and keys) or of two unsigned ones (numbers and values).
struct Int8Neon {
    struct Ints {
        int32x4_t q[4];
    };
    static constexpr std::int32_t key_zero = 0, value_zero = 128;
    static constexpr int weight_words = 1;

    template <Bytes bytes, int half>
    struct Dot {
        using Column = Ints;
        using Row = int32x4_t;
        using Rows = Ints;
        OP Column column(const void* p) { return load(p); }
        OP Row row(std::uint32_t word) { return vdupq_n_s32(static_cast<std::int32_t>(word)); }
        OP Rows rows(const void* p) { return load(p); }
        OP Ints add(Ints acc, Row row, Column column) { return add(acc, Rows{{row, row, row, row}}, column); }
        OP Ints add(Ints acc, Rows rows, Column column) {
            return {{add(acc.q[0], rows.q[0], column.q[0]), add(acc.q[1], rows.q[1], column.q[1]),
                     add(acc.q[2], rows.q[2], column.q[2]), add(acc.q[3], rows.q[3], column.q[3])}};
        }

      private:
        OP int32x4_t add(int32x4_t acc, int32x4_t a, int32x4_t b) {
            if (bytes == Bytes::keys) return vdotq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
            return vreinterpretq_s32_u32(
                vdotq_u32(vreinterpretq_u32_s32(acc), vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b)));
        }
    };

    OP Ints load(const void* p) {
        const auto* at = static_cast<const std::int8_t*>(p);
        return {{quad(at), quad(at + 16), quad(at + 32), quad(at + 48)}};
    }
    OP void store(void* p, Ints a) {
        auto* at = static_cast<std::int8_t*>(p);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) vst1q_s8(at + 16 * i, vreinterpretq_s8_s32(a.q[i]));
    }
    OP Ints all(std::int32_t x) {
        const int32x4_t q = vdupq_n_s32(x);
        return {{q, q, q, q}};
    }
    OP Ints add(Ints a, Ints b) {
        return {{vaddq_s32(a.q[0], b.q[0]), vaddq_s32(a.q[1], b.q[1]), vaddq_s32(a.q[2], b.q[2]),
                 vaddq_s32(a.q[3], b.q[3])}};
    }
    OP Ints between_halves(Ints a) {
        return {{vshlq_n_s32(a.q[0], 8), vshlq_n_s32(a.q[1], 8), vshlq_n_s32(a.q[2], 8), vshlq_n_s32(a.q[3], 8)}};
    }
    OP Ints flip_signs(Ints a) {
        const int32x4_t signs = vdupq_n_s32(static_cast<std::int32_t>(0x80808080));
        return {{veorq_s32(a.q[0], signs), veorq_s32(a.q[1], signs), veorq_s32(a.q[2], signs),
                 veorq_s32(a.q[3], signs)}};
    }
    OP Neon::Vec floats(Ints a) {
        return {{vcvtq_f32_s32(a.q[0]), vcvtq_f32_s32(a.q[1]), vcvtq_f32_s32(a.q[2]), vcvtq_f32_s32(a.q[3])}};
    }
    OP Ints rounded(Neon::Vec a) {
        return {{Neon::nearest(a.q[0]), Neon::nearest(a.q[1]), Neon::nearest(a.q[2]), Neon::nearest(a.q[3])}};
    }
    // As in Int8Avx512: both halves are signed.
    OP void store_query(void* first, void* second, Ints a) {
        const int32x4_t half = vdupq_n_s32(0x8080);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) a.q[i] = veorq_s32(vaddq_s32(a.q[i], half), half);
        const int8x16_t front = pairs(a.q[0], a.q[1]), back = pairs(a.q[2], a.q[3]);
        vst1q_s8(static_cast<std::int8_t*>(first), vuzp2q_s8(front, back));
        vst1q_s8(static_cast<std::int8_t*>(second), vuzp1q_s8(front, back));
    }
    OP void store_weights(void* first, void*, Ints a) {
        vst1q_s8(static_cast<std::int8_t*>(first), vuzp1q_s8(pairs(a.q[0], a.q[1]), pairs(a.q[2], a.q[3])));
    }
    OP Ints interleave(const char* const* rows, int column) {
        const int8x16_t a = bytes(rows[0] + column), b = bytes(rows[1] + column);
        const int8x16_t c = bytes(rows[2] + column), d = bytes(rows[3] + column);
        const int8x16_t ac0 = vzip1q_s8(a, c), ac1 = vzip2q_s8(a, c), bd0 = vzip1q_s8(b, d), bd1 = vzip2q_s8(b, d);
        return {{vreinterpretq_s32_s8(vzip1q_s8(ac0, bd0)), vreinterpretq_s32_s8(vzip2q_s8(ac0, bd0)),
                 vreinterpretq_s32_s8(vzip1q_s8(ac1, bd1)), vreinterpretq_s32_s8(vzip2q_s8(ac1, bd1))}};
    }
    OP void interleave_64(const char* const* rows, int column, std::uint32_t* to) {
#pragma GCC unroll 4
        for (int i = 0; i < 4 * kLanes; i += kLanes) store(to + i, interleave(rows, column + i));
    }

  private:
    OP int8x16_t bytes(const char* p) { return vld1q_s8(reinterpret_cast<const std::int8_t*>(p)); }
    OP int32x4_t quad(const std::int8_t* p) { return vreinterpretq_s32_s8(vld1q_s8(p)); }
    // The low 16 bits of eight lanes.
    OP int8x16_t pairs(int32x4_t a, int32x4_t b) {
        return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
    }
};
#undef OP

}  // namespace optkit

#endif  // OPTKIT_ARM
