// int8 linear layers with AVX2; see int8.cpp for the layout and the arithmetic.
//
// Without VNNI the one-instruction product of bytes, vpmaddubsw, saturates in 16 bits. So both sides are widened to
// 16 bits and multiplied by vpmaddwd, which is exact. Each 32-bit lane then holds the sum of 2 input channels and
// neighbouring lanes belong to one output channel: they are added at the end of a group.
//
// A tile is R rows x 16 output channels, half a panel: 4 registers of 4 output channels a row.
#include "dispatch.h"
#include "int8.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int ROWS = 2, HALF = 16;

OPTKIT_AVX2 OPTKIT_INLINE __m256i widened_row(const uint8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
}

OPTKIT_AVX2 OPTKIT_INLINE __m256i widened_weight(const int8_t* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}

template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void accumulate(__m256i (&a)[R][4], const uint8_t* q, int64_t stride, const int8_t* w,
                                          int64_t steps) {
    for (int64_t s = 0; s < steps; ++s, q += STEP, w += STEP_BYTES) {
        __m256i x[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) x[r] = widened_row(q + r * stride);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m256i four = widened_weight(w + c * 16);
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) a[r][c] = _mm256_add_epi32(a[r][c], _mm256_madd_epi16(x[r], four));
        }
    }
}

// Sums of neighbouring lanes of two registers, in order: 8 output channels.
OPTKIT_AVX2 OPTKIT_INLINE __m256i add_pairs(__m256i left, __m256i right) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(left, right), 0b11011000);
}

template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void store(const __m256 (&sum)[R][2], const Linear& p, int64_t row, int64_t first) {
    for (int r = 0; r < R; ++r) {
        float values[HALF];
        _mm256_storeu_ps(values, sum[r][0]);
        _mm256_storeu_ps(values + 8, sum[r][1]);
        float* out = p.out + (row + r) * p.n + first;
        for (int64_t c = 0; c < HALF && first + c < p.n; ++c) out[c] = p.bias ? values[c] + p.bias[first + c] : values[c];
    }
}

template <int R>
OPTKIT_AVX2 void tile(const Linear& p, const Panel& panel, int64_t half, int64_t row) {
    const uint8_t* q = p.q + row * p.q_stride;
    const int8_t* w = panel.weight + half * HALF * STEP;
    __m256 sum[R][2] = {};
    for (int64_t g = 0; g < p.groups; ++g) {
        const int64_t at = g * PANEL + half * HALF;
        __m256i a[R][4] = {};
        accumulate<R>(a, q, p.q_stride, w, p.group_steps);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
            const auto offset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel.offset + at + c * 8));
            const __m256 scales = _mm256_loadu_ps(panel.weight_scale + at + c * 8);
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
                const __m256i total = _mm256_add_epi32(offset, add_pairs(a[r][2 * c], a[r][2 * c + 1]));
                const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(p.scale[(row + r) * p.groups + g]), scales);
                sum[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, sum[r][c]);
                if (!panel.minimum) continue;
                const __m256 minimums = _mm256_loadu_ps(panel.minimum + at + c * 8);
                sum[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(p.sums[(row + r) * p.groups + g]), minimums, sum[r][c]);
            }
        }
        q += p.group_steps * STEP;
        w += p.group_steps * STEP_BYTES;
    }
    store<R>(sum, p, row, panel.first + half * HALF);
}

}  // namespace

void linear_avx2(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    for (int64_t half = 0; half < 2 && panel.first + half * HALF < p.n; ++half) {
        int64_t m = row;
        for (; m + ROWS <= row + rows; m += ROWS) tile<ROWS>(p, panel, half, m);
        if (m < row + rows) tile<1>(p, panel, half, m);
    }
}

}  // namespace optkit

#endif
