// Common parts of the AVX512-VNNI tiles of the int8 and int4 linear layers: R rows x one panel of 32 output channels, its
// int32 accumulators and its float sums in 2 R registers each.
#pragma once

#include "dispatch.h"
#include "int8.h"

#if OPTKIT_X86

namespace optkit {
namespace {

// Not __m512i, which is 64-bit lanes to gcc: it would copy every accumulator in every step.
using Lanes = int32_t __attribute__((vector_size(64)));

template <int R>
struct Accumulators {
    Lanes v[R][2];
};

OPTKIT_AVX512 OPTKIT_INLINE Lanes load(const int32_t* p) { return reinterpret_cast<Lanes>(_mm512_loadu_si512(p)); }

OPTKIT_AVX512 OPTKIT_INLINE __m512 load(const float* p) { return _mm512_loadu_ps(p); }

// Half of the 32 weight scales of group `g`.
template <int WHICH>
OPTKIT_AVX512 OPTKIT_INLINE __m512 scales(const Panel& panel, int64_t g) {
    const int64_t at = g * PANEL + 16 * WHICH;
    if (!panel.half) return load(panel.weight_scale + at);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel.half + at)));
}

OPTKIT_AVX512 OPTKIT_INLINE Lanes dot(Lanes a, __m512i u8, __m512i s8) {
    return reinterpret_cast<Lanes>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(a), u8, s8));
}

// The 4 bytes of one row that a step multiplies.
OPTKIT_AVX512 OPTKIT_INLINE __m512i broadcast(const void* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void start(Accumulators<R>& a, Lanes left, Lanes right) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) a.v[r][0] = left, a.v[r][1] = right;
}

OPTKIT_AVX512 OPTKIT_INLINE __m512 to_float(Lanes a) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a)); }

template <int R>
struct Sums {
    __m512 v[R][2];
};

// Add one group's accumulators, scaled.
template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void add_scaled(Sums<R>& sum, const Accumulators<R>& a, const float* scale, int64_t groups,
                                            __m512 w0, __m512 w1) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const __m512 s = _mm512_set1_ps(scale[r * groups]);
        sum.v[r][0] = _mm512_fmadd_ps(to_float(a.v[r][0]), _mm512_mul_ps(s, w0), sum.v[r][0]);
        sum.v[r][1] = _mm512_fmadd_ps(to_float(a.v[r][1]), _mm512_mul_ps(s, w1), sum.v[r][1]);
    }
}

// Add what one group's minimums contribute; `sums` is that of Linear.
template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void add_minimums(Sums<R>& sum, const float* sums, int64_t groups, __m512 m0, __m512 m1) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const __m512 s = _mm512_set1_ps(sums[r * groups]);
        sum.v[r][0] = _mm512_fmadd_ps(s, m0, sum.v[r][0]);
        sum.v[r][1] = _mm512_fmadd_ps(s, m1, sum.v[r][1]);
    }
}

template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void store(const Sums<R>& sum, const Linear& p, int64_t first, int64_t row) {
    const int64_t columns = p.n - first;
    const __mmask16 m0 = columns >= 16 ? 0xffff : (1u << columns) - 1;
    const __mmask16 m1 = columns >= 32 ? 0xffff : columns <= 16 ? 0 : (1u << (columns - 16)) - 1;
    float* out = p.out + row * p.n + first;
    const int64_t bytes = (columns < 32 ? columns : 32) * sizeof(float);
    if (p.bias) touch(p.bias + first, bytes);
    const __m512 b0 = p.bias ? _mm512_maskz_loadu_ps(m0, p.bias + first) : _mm512_setzero_ps();
    const __m512 b1 = p.bias ? _mm512_maskz_loadu_ps(m1, p.bias + first + 16) : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {  // sums are never -0, so that adding no bias changes nothing
        touch(out + r * p.n, bytes);
        _mm512_mask_storeu_ps(out + r * p.n, m0, _mm512_add_ps(sum.v[r][0], b0));
        _mm512_mask_storeu_ps(out + r * p.n + 16, m1, _mm512_add_ps(sum.v[r][1], b1));
    }
}

// Fetch the lines that `store` will write, while there is time: otherwise stores wait for them one after another.
template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void expect(const Linear& p, int64_t first, int64_t row) {
    const float* out = p.out + row * p.n + first;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        __builtin_prefetch(out + r * p.n, 1);
        __builtin_prefetch(out + r * p.n + 16, 1);
    }
}

}  // namespace
}  // namespace optkit

#endif
