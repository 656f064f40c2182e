// Sixteen floats and the operations of the fp32 kernels, once for each instruction set. simd_int8.h has the bytes.
//
// A `Vec` is always 16 lanes: one register of AVX-512, two of AVX2, four of the 128-bit baseline. So a kernel written on
// it adds in the same order everywhere, and all but the portable variant give the same bits. That one has no fused
// multiply-add and differs in the last place.
//
// A kernel body lives in a header that is included once an instruction set with OPTKIT_TARGET (the function
// attribute) and `S` (one of these structs) defined, because a template parameter can't choose an attribute.
#pragma once

#include <cstdint>
#include <cstring>

#include "dispatch.h"

namespace optkit {

constexpr int kLanes = 16;

#if OPTKIT_X86

#define OP static OPTKIT_AVX512 OPTKIT_INLINE
struct Avx512 {
    using Vec = __m512;
    typedef std::uint32_t Bits __attribute__((vector_size(64)));
    static constexpr int tile_rows = 6, tile_vecs = 4;  // of a register tile: 24 of 32 registers accumulate
    static constexpr bool transposes_lines = true, folds_rows = true;

    OP Vec load(const float* p) { return _mm512_loadu_ps(p); }
    OP Vec load_some(const float* p, int n) {
        touch(p, n * sizeof(float));
        return _mm512_maskz_loadu_ps(mask(n), p);
    }
    OP void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
    OP void store_some(float* p, Vec a, int n) {
        touch(p, n * sizeof(float));
        _mm512_mask_storeu_ps(p, mask(n), a);
    }
    OP Vec all(float x) { return _mm512_set1_ps(x); }
    OP Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    OP Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    OP Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    OP Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
    OP Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    OP Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    OP Vec abs(Vec a) { return _mm512_abs_ps(a); }
    OP Vec round(Vec a) { return _mm512_roundscale_ps(a, 8); }
    // Lanes of `yes` where a < b, of `no` elsewhere, also where one is NaN.
    OP Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
    }
    // a * 2^n for whole n that keep the result normal, 0 for n below -125, NaN where n is.
    OP Vec times_two_to_or_0(Vec a, Vec n) {
        return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ), a, n);
    }
    // Halves are folded onto each other, 16 to 8 to 4 to 2 to 1: the order of every sum over lanes.
    OP float sum(Vec a) {
        const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
        c = _mm_add_ps(c, _mm_movehl_ps(c, c));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
    }
    OP float largest(Vec a) {
        const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
        c = _mm_max_ps(c, _mm_movehl_ps(c, c));
        return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
    }
    // Lane r of the result is the sum, or the largest lane, of rows[r] for up to 16 rows: the bits of `sum` and `largest`, with
    // the rows folded beside each other. Later lanes hold any number.
    template <int R>
    OP Vec sum_each(const Vec (&rows)[R]) { return fold_each<Sum>(rows); }
    template <int R>
    OP Vec largest_each(const Vec (&rows)[R]) { return fold_each<Largest>(rows); }
    // The same for lanes that hold int32.
    template <int R>
    OP Vec sum_bits_each(const Vec (&rows)[R]) { return fold_each<SumBits>(rows); }
    template <int R>
    OP Vec largest_bits_each(const Vec (&rows)[R]) { return fold_each<LargestBits>(rows); }
    OP Vec larger_bits(Vec a, Vec b) { return (Vec)_mm512_max_epi32((__m512i)a, (__m512i)b); }
    OP Vec sum_of_bits(Vec a, Vec b) { return (Vec)((Bits)a + (Bits)b); }
    // Four words of 16 rows, transposed: out[c] = (word c of rows[0], ..., of rows[15]).
    OP void transpose(const char* const* rows, Vec (&out)[4]) {
        const __m512 a = quads(rows, 0), b = quads(rows, 1), c = quads(rows, 2), d = quads(rows, 3);
        const __m512 ab0 = _mm512_unpacklo_ps(a, b), ab1 = _mm512_unpackhi_ps(a, b);
        const __m512 cd0 = _mm512_unpacklo_ps(c, d), cd1 = _mm512_unpackhi_ps(c, d);
        out[0] = _mm512_shuffle_ps(ab0, cd0, 0x44);
        out[1] = _mm512_shuffle_ps(ab0, cd0, 0xee);
        out[2] = _mm512_shuffle_ps(ab1, cd1, 0x44);
        out[3] = _mm512_shuffle_ps(ab1, cd1, 0xee);
    }
    // Sixteen words of 16 rows, XOR `flip`, transposed: word w of row r goes to to[w * stride + r].
    OP void transpose_lines(const char* const* rows, float* to, int stride, std::uint32_t flip) {
        __m512i a[16], b[16];
        const __m512i signs = _mm512_set1_epi32(static_cast<int>(flip));
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) a[i] = _mm512_xor_si512(_mm512_loadu_si512(rows[i]), signs);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {  // a[i + c]: word c of each four, of rows i to i + 3
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i even = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
            const __m512i more_even = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88);
            const __m512i more_odd = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
            _mm512_storeu_si512(to + c * stride, _mm512_shuffle_i32x4(even, more_even, 0x88));
            _mm512_storeu_si512(to + (c + 4) * stride, _mm512_shuffle_i32x4(odd, more_odd, 0x88));
            _mm512_storeu_si512(to + (c + 8) * stride, _mm512_shuffle_i32x4(even, more_even, 0xdd));
            _mm512_storeu_si512(to + (c + 12) * stride, _mm512_shuffle_i32x4(odd, more_odd, 0xdd));
        }
    }

  private:
    struct Sum {
        OP Vec of(Vec a, Vec b) { return add(a, b); }
    };
    struct Largest {
        OP Vec of(Vec a, Vec b) { return max(a, b); }
    };
    struct SumBits {
        OP Vec of(Vec a, Vec b) { return sum_of_bits(a, b); }
    };
    struct LargestBits {
        OP Vec of(Vec a, Vec b) { return larger_bits(a, b); }
    };
    template <class Fold, int R>
    OP Vec fold_each(const Vec (&rows)[R]) {
        static_assert(R <= kLanes, "a lane for each row");
        constexpr int PAIRS = (R + 1) / 2, FOURS = (PAIRS + 1) / 2, EIGHTS = (FOURS + 1) / 2;
        Vec two[PAIRS], four[FOURS], eight[EIGHTS];
#pragma GCC unroll 8
        for (int i = 0; i < PAIRS; ++i) {  // 16 lanes to 8, of two rows
            const Vec a = rows[2 * i], b = rows[2 * i + 1 < R ? 2 * i + 1 : R - 1];
            two[i] = Fold::of(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        }
#pragma GCC unroll 4
        for (int i = 0; i < FOURS; ++i) {  // 8 to 4, of four rows
            const Vec a = two[2 * i], b = two[2 * i + 1 < PAIRS ? 2 * i + 1 : PAIRS - 1];
            four[i] = Fold::of(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        }
#pragma GCC unroll 2
        for (int i = 0; i < EIGHTS; ++i) {  // 4 to 2, of eight rows
            const auto a = (__m512d)four[2 * i], b = (__m512d)four[2 * i + 1 < FOURS ? 2 * i + 1 : FOURS - 1];
            eight[i] = Fold::of((Vec)_mm512_unpacklo_pd(a, b), (Vec)_mm512_unpackhi_pd(a, b));
        }
        const Vec a = eight[0], b = eight[EIGHTS - 1];
        const Vec all = Fold::of(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
        alignas(64) static constexpr std::int32_t LANES[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};  // of rows
        return _mm512_permutexvar_ps(_mm512_loadu_si512(LANES), all);
    }
    OP __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
    // Rows i, i + 4, i + 8 and i + 12, 16 bytes of each.
    OP __m512 quads(const char* const* rows, int i) {
        __m512 v = _mm512_castps128_ps512(quad(rows[i]));
        v = _mm512_insertf32x4(v, quad(rows[i + 4]), 1);
        v = _mm512_insertf32x4(v, quad(rows[i + 8]), 2);
        return _mm512_insertf32x4(v, quad(rows[i + 12]), 3);
    }
    OP __m128 quad(const char* p) { return _mm_loadu_ps(reinterpret_cast<const float*>(p)); }
};
#undef OP

#define OP static OPTKIT_AVX2 OPTKIT_INLINE
struct Avx2 {
    struct Vec {
        __m256 lo, hi;
    };
    static constexpr int tile_rows = 6, tile_vecs = 1;  // 12 of 16 registers accumulate
    static constexpr bool transposes_lines = false, folds_rows = false;

    OP Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    OP Vec load_some(const float* p, int n) {
        float full[kLanes] = {};
        std::memcpy(full, p, n * sizeof(float));
        return load(full);
    }
    OP void store(float* p, Vec a) {
        _mm256_storeu_ps(p, a.lo);
        _mm256_storeu_ps(p + 8, a.hi);
    }
    OP void store_some(float* p, Vec a, int n) {
        float full[kLanes];
        store(full, a);
        std::memcpy(p, full, n * sizeof(float));
    }
    OP Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    OP Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
    OP Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
    OP Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
    OP Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
    OP Vec fma(Vec a, Vec b, Vec c) {
        return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
    }
    OP Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
    OP Vec abs(Vec a) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
    }
    OP Vec round(Vec a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
    OP Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
        return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
                _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
    }
    OP Vec times_two_to_or_0(Vec a, Vec n) { return {scaled(a.lo, n.lo), scaled(a.hi, n.hi)}; }
    OP float sum(Vec a) {
        const __m256 b = _mm256_add_ps(a.lo, a.hi);
        __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
        c = _mm_add_ps(c, _mm_movehl_ps(c, c));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
    }
    OP float largest(Vec a) {
        const __m256 b = _mm256_max_ps(a.lo, a.hi);
        __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
        c = _mm_max_ps(c, _mm_movehl_ps(c, c));
        return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
    }
    OP void transpose(const char* const* rows, Vec (&out)[4]) {
        __m256 lo[4], hi[4];
        transpose_8x4(rows, lo);
        transpose_8x4(rows + 8, hi);
        for (int i = 0; i < 4; ++i) out[i] = {lo[i], hi[i]};
    }

  private:
    OP __m256 scaled(__m256 a, __m256 n) {
        const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
        const __m256 product = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shifted));
        return _mm256_and_ps(product, _mm256_cmp_ps(n, _mm256_set1_ps(-125.0f), _CMP_NLT_UQ));
    }
    OP __m256 pair(const char* const* rows, int i) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(quad(rows[i])), quad(rows[i + 4]), 1);
    }
    OP __m128 quad(const char* p) { return _mm_loadu_ps(reinterpret_cast<const float*>(p)); }
    OP void transpose_8x4(const char* const* rows, __m256 out[4]) {
        const __m256 a = pair(rows, 0), b = pair(rows, 1), c = pair(rows, 2), d = pair(rows, 3);
        const __m256 ab0 = _mm256_unpacklo_ps(a, b), ab1 = _mm256_unpackhi_ps(a, b);
        const __m256 cd0 = _mm256_unpacklo_ps(c, d), cd1 = _mm256_unpackhi_ps(c, d);
        out[0] = _mm256_shuffle_ps(ab0, cd0, 0x44);
        out[1] = _mm256_shuffle_ps(ab0, cd0, 0xee);
        out[2] = _mm256_shuffle_ps(ab1, cd1, 0x44);
        out[3] = _mm256_shuffle_ps(ab1, cd1, 0xee);
    }
};
#undef OP

#endif  // OPTKIT_X86

#define OP static OPTKIT_INLINE
// GCC's and Clang's vectors of four, which every target has in some form.
struct Portable {
    typedef float Quad __attribute__((vector_size(16)));
    typedef std::int32_t Bits __attribute__((vector_size(16)));
    typedef std::uint32_t Wrapping __attribute__((vector_size(16)));
    struct Vec {
        Quad q[4];
    };
    static constexpr int tile_rows = 2, tile_vecs = 1;  // 8 of 16 registers accumulate
    static constexpr bool transposes_lines = false, folds_rows = false;

    OP Vec load(const float* p) {
        Vec a;
        std::memcpy(&a, p, sizeof a);
        return a;
    }
    OP Vec load_some(const float* p, int n) {
        Vec a = all(0.0f);
        std::memcpy(&a, p, n * sizeof(float));
        return a;
    }
    OP void store(float* p, Vec a) { std::memcpy(p, &a, sizeof a); }
    OP void store_some(float* p, Vec a, int n) { std::memcpy(p, &a, n * sizeof(float)); }
    OP Vec all(float x) {
        const Quad q = {x, x, x, x};
        return {{q, q, q, q}};
    }
    OP Vec add(Vec a, Vec b) { return {{a.q[0] + b.q[0], a.q[1] + b.q[1], a.q[2] + b.q[2], a.q[3] + b.q[3]}}; }
    OP Vec sub(Vec a, Vec b) { return {{a.q[0] - b.q[0], a.q[1] - b.q[1], a.q[2] - b.q[2], a.q[3] - b.q[3]}}; }
    OP Vec mul(Vec a, Vec b) { return {{a.q[0] * b.q[0], a.q[1] * b.q[1], a.q[2] * b.q[2], a.q[3] * b.q[3]}}; }
    OP Vec div(Vec a, Vec b) { return {{a.q[0] / b.q[0], a.q[1] / b.q[1], a.q[2] / b.q[2], a.q[3] / b.q[3]}}; }
    OP Vec fma(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }
    OP Vec max(Vec a, Vec b) { return where_less(b, a, a, b); }
    OP Vec abs(Vec a) { return max(a, sub(all(-0.0f), a)); }
    // Adding and taking away 1.5 * 2^23 rounds to even, up to 2^22; callers discard what is larger.
    OP Vec round(Vec a) { return sub(add(a, all(12582912.0f)), all(12582912.0f)); }
    OP Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
        for (int i = 0; i < 4; ++i) {
            const Bits less = a.q[i] < b.q[i];
            no.q[i] = (Quad)(((Bits)yes.q[i] & less) | ((Bits)no.q[i] & ~less));
        }
        return no;
    }
    // The integer n is in the low bits of n + 1.5 * 2^23.
    OP Vec times_two_to_or_0(Vec a, Vec n) {
        const Vec low = add(n, all(12582912.0f));
        for (int i = 0; i < 4; ++i) a.q[i] = (Quad)((Wrapping)a.q[i] + ((Wrapping)low.q[i] << 23));
        return where_less(n, all(-125.0f), all(0.0f), a);
    }
    OP float sum(Vec a) {
        const Quad b = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
        return (b[0] + b[2]) + (b[1] + b[3]);
    }
    OP float largest(Vec a) {
        float lane[kLanes];
        store(lane, a);
        float top = lane[0];
        for (const float x : lane) top = top < x ? x : top;
        return top;
    }
    OP void transpose(const char* const* rows, Vec (&out)[4]) {
        for (int i = 0; i < kLanes; ++i)
            for (int c = 0; c < 4; ++c) {
                float word;
                std::memcpy(&word, rows[i] + c * sizeof word, sizeof word);
                out[c].q[i / 4][i % 4] = word;
            }
    }
};
#undef OP

}  // namespace optkit
