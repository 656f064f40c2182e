// Dynamic quantization of one row of activations; reference.quantize_per_token is the spec, to the bit.
//
// One source for all instruction sets: plain loops that the compiler vectorizes for whichever function they are
// inlined into.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "dispatch.h"

namespace optkit {

OPTKIT_INLINE float from_bits(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

OPTKIT_INLINE int32_t to_bits(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The largest |x|. Compared as integers, which orders non-negative floats and puts NaN on top, so that it wins.
OPTKIT_INLINE float largest(const float* x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = to_bits(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return from_bits(most);
}

// Adding 1.5 * 2^23 + 128 rounds to an integer, half to even, and leaves `round(v) + 128` in the low byte. With
// `any_range`, NaN and what overflowed become 0.
template <bool any_range>
OPTKIT_INLINE void round_group(const float* x, int64_t n, float inverse, uint8_t* q) {
    for (int64_t i = 0; i < n; ++i) {
        const float value = x[i] * inverse;
        const int32_t rounded = to_bits(value + 12583040.0f) & 255;
        q[i] = !any_range || (value >= -128.0f && value <= 127.5f) ? rounded : 0;
    }
}

// quantize_group with the largest |x| given. Numbers overflow only in a group whose scale is NaN, infinite or below 2^-126;
// in all others each is -127 to 127.
OPTKIT_INLINE void quantize_by(const float* x, int64_t n, float most, uint8_t* q, float* scale) {
    constexpr float MOST = std::numeric_limits<float>::max();
    const float inverse = most > 0 ? 1.0f / most * 127.0f : 0.0f;
    if (most <= MOST && inverse <= MOST)
        round_group<false>(x, n, inverse, q);
    else
        round_group<true>(x, n, inverse, q);
    *scale = most / 127.0f;
}

OPTKIT_INLINE void quantize_group(const float* x, int64_t n, uint8_t* q, float* scale) {
    quantize_by(x, n, largest(x, n), q, scale);
}

#if OPTKIT_X86
// Four groups of 32: quantize_group of each, with their largest numbers found and divided beside each other.
OPTKIT_AVX512 OPTKIT_INLINE void quantize_four(const float* x, uint8_t* q, float* scale) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i group[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
        group[g] = _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(x + 32 * g), magnitude),
                                    _mm512_and_si512(_mm512_loadu_si512(x + 32 * g + 16), magnitude));
    const __m512i two = _mm512_max_epi32(_mm512_unpacklo_epi32(group[0], group[1]), _mm512_unpackhi_epi32(group[0], group[1]));
    const __m512i more = _mm512_max_epi32(_mm512_unpacklo_epi32(group[2], group[3]), _mm512_unpackhi_epi32(group[2], group[3]));
    const auto four = (__m512)_mm512_max_epi32(_mm512_unpacklo_epi64(two, more), _mm512_unpackhi_epi64(two, more));
    const __m256i half = _mm256_max_epi32((__m256i)_mm512_castps512_ps256(four), (__m256i)_mm512_extractf32x8_ps(four, 1));
    const auto most = (__m128)_mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128 largest_float = _mm_set1_ps(std::numeric_limits<float>::max()), steps = _mm_set1_ps(127.0f);
    const __m128 parts = _mm_mul_ps(_mm_div_ps(_mm_set1_ps(1.0f), most), steps);
    const __m128 inverse = _mm_and_ps(_mm_cmpgt_ps(most, _mm_setzero_ps()), parts);
    const __m128 in_range = _mm_and_ps(_mm_cmple_ps(most, largest_float), _mm_cmple_ps(inverse, largest_float));
    if (_mm_movemask_ps(in_range) != 15) {
        for (int g = 0; g < 4; ++g) quantize_group(x + 32 * g, 32, q + 32 * g, scale + g);
        return;
    }
    float by[4];
    _mm_storeu_ps(by, inverse);
    _mm_storeu_ps(scale, _mm_div_ps(most, steps));
    const __m512 shift = _mm512_set1_ps(12583040.0f);  // as in round_group
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512 rounded = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(by[i / 2])), shift);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), _mm512_cvtepi32_epi8((__m512i)rounded));
    }
}
#endif

// q [columns] and scale [columns / group] of x [columns]. Short groups get a constant length, which unrolls them.
OPTKIT_INLINE void quantize_row(const float* x, int64_t columns, int64_t group, uint8_t* q, float* scale) {
    if (group == 32)
        for (int64_t i = 0; i < columns; i += 32) quantize_group(x + i, 32, q + i, scale++);
    else
        for (int64_t i = 0; i < columns; i += group) quantize_group(x + i, group, q + i, scale++);
}

#if OPTKIT_X86
// quantize_row with AVX-512, the same bits.
OPTKIT_AVX512 OPTKIT_INLINE void quantize_row_avx512(const float* x, int64_t columns, int64_t group, uint8_t* q, float* scale) {
    int64_t i = 0;
    for (; group == 32 && i + 128 <= columns; i += 128, scale += 4) quantize_four(x + i, q + i, scale);
    quantize_row(x + i, columns - i, group, q + i, scale);
}
#endif

}  // namespace optkit
