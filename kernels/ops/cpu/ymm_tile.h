// Common parts of the 256-bit tiles of the int8 and int4 linear layers: registers of 8 output channels, float sums in
// memory.
#pragma once

#include "dispatch.h"
#include "int8.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int64_t COLUMNS = 8;         // output channels of a register
constexpr int64_t AHEAD_BYTES = 3072;  // so far ahead lies what a panel's only tile fetches: it waits for memory

// How many of a panel's `tiles` ask for a part of the next panel each: 1, 2 or 4. Memory then works all the time, and not
// during the first tile alone.
inline int64_t parts_of(int64_t tiles) { return tiles >= 4 ? 4 : tiles >= 2 ? 2 : 1; }

// Fetches what a tile of C registers will read of a step. Not into the first cache, where it would drive out what tiles
// read now.
template <int C>
OPTKIT_AVX2 OPTKIT_INLINE void fetch(const int8_t* step) {
    constexpr int LINE = 64;
    static_assert(C * COLUMNS * STEP % LINE == 0, "whole lines");
#pragma GCC unroll 2
    for (int at = 0; at < C * COLUMNS * STEP; at += LINE) _mm_prefetch(step + at, _MM_HINT_T1);
}

// Not __m256i, which is 64-bit lanes to gcc: it would copy accumulators.
using Lanes = int32_t __attribute__((vector_size(32)));

OPTKIT_AVX2 OPTKIT_INLINE Lanes load(const void* from) {
    return (Lanes)_mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// The 4 bytes of one row that a step multiplies.
OPTKIT_AVX2 OPTKIT_INLINE __m256i broadcast(const uint8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

// sums[R][C * COLUMNS] += `a` times the scales of a group: of each row, `groups` apart, and of each output channel.
template <int R, int C>
OPTKIT_AVX2 OPTKIT_INLINE void add_group(float* sums, const Lanes (&a)[R][C], const float* scale, int64_t groups,
                                         const float* weight_scale) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        const __m256 scales = _mm256_loadu_ps(weight_scale + c * COLUMNS);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            float* sum = sums + (r * C + c) * COLUMNS;
            const __m256 product = _mm256_mul_ps(_mm256_set1_ps(scale[r * groups]), scales);
            const __m256 total = _mm256_cvtepi32_ps((__m256i)a[r][c]);
            _mm256_store_ps(sum, _mm256_fmadd_ps(total, product, _mm256_load_ps(sum)));
        }
    }
}

// The sums [R][WIDTH] and the bias, or the part of them that the layer has, from output channel `first` on.
template <int R, int64_t WIDTH>
OPTKIT_AVX2 OPTKIT_INLINE void store(const float* sums, const Linear& p, int64_t row, int64_t first) {
    const int64_t columns = p.n - first;
    for (int r = 0; r < R; ++r, sums += WIDTH) {
        float* out = p.out + (row + r) * p.n + first;
        for (int64_t c = 0; c < WIDTH && columns >= WIDTH; c += COLUMNS) {
            const __m256 sum = _mm256_load_ps(sums + c);
            _mm256_storeu_ps(out + c, p.bias ? _mm256_add_ps(sum, _mm256_loadu_ps(p.bias + first + c)) : sum);
        }
        for (int64_t c = 0; columns < WIDTH && c < columns; ++c) out[c] = p.bias ? sums[c] + p.bias[first + c] : sums[c];
    }
}

}  // namespace
}  // namespace optkit

#endif
