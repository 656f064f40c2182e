// The permutations of AVX-512 that the kernels use; see intrinsics.h.
#pragma once

#include "avx512.h"

namespace emulated {

EMULATED __m256 _mm512_extractf32x8_ps(__m512 a, int which) {
    __m256 z;
    std::memcpy(&z, reinterpret_cast<const char*>(&a) + 32 * (which & 1), sizeof z);
    return z;
}

EMULATED __m512 _mm512_insertf32x4(__m512 a, __m128 b, int which) {
    std::memcpy(reinterpret_cast<char*>(&a) + 16 * (which & 3), &b, sizeof b);
    return a;
}

EMULATED __m512i _mm512_inserti64x4(__m512i a, __m256i b, int which) {
    std::memcpy(reinterpret_cast<char*>(&a) + 32 * (which & 1), &b, sizeof b);
    return a;
}

// Bytes of two registers, interleaved in units of `size` from byte `start` of each 128 bits on.
EMULATED __m512i unpacked(__m512i a, __m512i b, int start, int size) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int lane = 0; lane < 64; lane += 16)
        for (int i = 0; i < 8; i += size) {
            std::memcpy(z.u8 + lane + 2 * i, x.u8 + lane + start + i, size);
            std::memcpy(z.u8 + lane + 2 * i + size, y.u8 + lane + start + i, size);
        }
    return z.si;
}

EMULATED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
    return unpacked(a, b, 0, 1);
}

EMULATED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
    return unpacked(a, b, 0, 2);
}

EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
    return unpacked(a, b, 0, 4);
}

EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
    return unpacked(a, b, 0, 8);
}

EMULATED __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
    return of(unpacked(of(a).si, of(b).si, 0, 4)).ps;
}

EMULATED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
    return unpacked(a, b, 8, 1);
}

EMULATED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
    return unpacked(a, b, 8, 2);
}

EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
    return unpacked(a, b, 8, 4);
}

EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
    return unpacked(a, b, 8, 8);
}

EMULATED __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
    return of(unpacked(of(a).si, of(b).si, 8, 4)).ps;
}

EMULATED __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int imm) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int lane = 0; lane < 16; lane += 4)
        for (int i = 0; i < 4; ++i) z.f[lane + i] = (i < 2 ? x : y).f[lane + (imm >> 2 * i & 3)];
    return z.ps;
}

EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int imm) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int i = 0; i < 4; ++i) std::memcpy(z.i + 4 * i, (i < 2 ? x : y).i + 4 * (imm >> 2 * i & 3), 16);
    return z.si;
}

EMULATED __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int imm) {
    return of(_mm512_shuffle_i32x4(of(a).si, of(b).si, imm)).ps;
}

EMULATED __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    const __m512i z = unpacked(reinterpret_cast<__m512i&>(a), reinterpret_cast<__m512i&>(b), 0, 8);
    return reinterpret_cast<const __m512d&>(z);
}

EMULATED __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
    const __m512i z = unpacked(reinterpret_cast<__m512i&>(a), reinterpret_cast<__m512i&>(b), 8, 8);
    return reinterpret_cast<const __m512d&>(z);
}

EMULATED __m512 _mm512_permutexvar_ps(__m512i from, __m512 a) {
    const Lanes x = of(from), y = of(a);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.f[i] = y.f[x.i[i] & 15];
    return z.ps;
}

EMULATED __m512i _mm512_mask_permutexvar_epi8(__m512i other, __mmask64 mask, __m512i from, __m512i a) {
    const Lanes x = of(from), y = of(a);
    Lanes z = of(other);
    for (int i = 0; i < 64; ++i)
        if (mask >> i & 1) z.u8[i] = y.u8[x.u8[i] & 63];
    return z.si;
}

}  // namespace emulated

#define _mm512_extractf32x8_ps emulated::_mm512_extractf32x8_ps
#define _mm512_insertf32x4 emulated::_mm512_insertf32x4
#define _mm512_inserti64x4 emulated::_mm512_inserti64x4
#define _mm512_unpacklo_epi8 emulated::_mm512_unpacklo_epi8
#define _mm512_unpacklo_epi16 emulated::_mm512_unpacklo_epi16
#define _mm512_unpacklo_epi32 emulated::_mm512_unpacklo_epi32
#define _mm512_unpacklo_epi64 emulated::_mm512_unpacklo_epi64
#define _mm512_unpacklo_ps emulated::_mm512_unpacklo_ps
#define _mm512_unpackhi_epi8 emulated::_mm512_unpackhi_epi8
#define _mm512_unpackhi_epi16 emulated::_mm512_unpackhi_epi16
#define _mm512_unpackhi_epi32 emulated::_mm512_unpackhi_epi32
#define _mm512_unpackhi_epi64 emulated::_mm512_unpackhi_epi64
#define _mm512_unpackhi_ps emulated::_mm512_unpackhi_ps
#define _mm512_shuffle_ps emulated::_mm512_shuffle_ps
#define _mm512_shuffle_i32x4 emulated::_mm512_shuffle_i32x4
#define _mm512_shuffle_f32x4 emulated::_mm512_shuffle_f32x4
#define _mm512_unpacklo_pd emulated::_mm512_unpacklo_pd
#define _mm512_unpackhi_pd emulated::_mm512_unpackhi_pd
#define _mm512_permutexvar_ps emulated::_mm512_permutexvar_ps
#define _mm512_mask_permutexvar_epi8 emulated::_mm512_mask_permutexvar_epi8
