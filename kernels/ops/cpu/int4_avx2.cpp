// int4 linear layers of few rows with AVX2; see int4.cpp for the layout and the arithmetic.
//
// vpmaddubsw adds two products of a u8 and an s8 in 16 bits. With int8 weights that saturates; with codes up to 15 it
// can't (2 * 15 * 128), and even the sums of 8 steps fit (8 * 3840 = 30720). So products are added in 16 bits for
// 8 steps, the usual group, and only then widened.
#include "int4.h"

#include "dispatch.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int ROWS = 4;
constexpr int64_t NARROW_STEPS = 8, COLUMNS = 8;  // of a register of int32

OPTKIT_AVX2 OPTKIT_INLINE __m256i broadcast(const uint8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

// Up to 8 steps of 8 output channels, added to the accumulators of R rows.
template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void accumulate(__m256i (&a)[R], const uint8_t* q, int64_t stride, const uint8_t* codes,
                                          int64_t steps) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i narrow[R] = {};
    for (int64_t s = 0; s < steps; s += 2, q += 2 * STEP, codes += STEP_BYTES) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i first = _mm256_and_si256(both, mask), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256i x = _mm256_maddubs_epi16(first, broadcast(q + r * stride));
            const __m256i y = _mm256_maddubs_epi16(second, broadcast(q + r * stride + STEP));
            narrow[r] = _mm256_add_epi16(narrow[r], _mm256_add_epi16(x, y));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
        a[r] = _mm256_add_epi32(a[r], _mm256_madd_epi16(narrow[r], _mm256_set1_epi16(1)));
}

// What a tile knows of a group: the activations from its first row and channel on, and one panel's record.
struct Group {
    const uint8_t* q;
    const int32_t* start;
    const float* scale;
    const float* sums;
    const uint8_t* codes;
    float weight_scale[PANEL];
    float minimum[PANEL];
    bool has_minimum;
};

// One group of 8 output channels from `column` on.
template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void add_group(__m256 (&sum)[R], const Linear& p, const Group& group, int64_t column) {
    __m256i a[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[r] = _mm256_set1_epi32(group.start[r * p.groups]);
    for (int64_t s = 0; s < p.group_steps; s += NARROW_STEPS)
        accumulate<R>(a, group.q + s * STEP, p.q_stride, group.codes + s / 2 * STEP_BYTES + column * STEP,
                      std::min(NARROW_STEPS, p.group_steps - s));
    const __m256 scales = _mm256_loadu_ps(group.weight_scale + column);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(group.scale[r * p.groups]), scales);
        sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a[r]), scale, sum[r]);
        if (!group.has_minimum) continue;
        const __m256 sums = _mm256_set1_ps(group.sums[r * p.groups]);
        sum[r] = _mm256_fmadd_ps(sums, _mm256_loadu_ps(group.minimum + column), sum[r]);
    }
}

template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void store(const __m256 (&sum)[R], const Linear& p, int64_t row, int64_t first) {
    for (int r = 0; r < R; ++r) {
        float values[COLUMNS];
        _mm256_storeu_ps(values, sum[r]);
        float* out = p.out + (row + r) * p.n + first;
        for (int64_t c = 0; c < COLUMNS && first + c < p.n; ++c) out[c] = p.bias ? values[c] + p.bias[first + c] : values[c];
    }
}

template <int R>
OPTKIT_AVX2 void tile(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout, int64_t first,
                      int64_t row) {
    __m256 sum[PANEL / COLUMNS][R] = {};
    Group group;
    group.has_minimum = layout.minimum();
    for (int64_t g = 0; g < p.groups; ++g, record += layout.size(p.group_steps)) {
        const int64_t at = row * p.groups + g;
        group.q = p.q + row * p.q_stride + g * p.group_steps * STEP;
        group.start = starts + at, group.scale = p.scale + at, group.sums = p.sums + at;
        group.codes = record + layout.codes();
        widen(record, layout.half, group.weight_scale);
        if (layout.minimum()) widen_minimums(record, layout, group.weight_scale, group.minimum);
        for (int64_t c = 0; c < PANEL / COLUMNS; ++c) add_group<R>(sum[c], p, group, c * COLUMNS);
    }
    for (int64_t c = 0; c < PANEL / COLUMNS && first + c * COLUMNS < p.n; ++c)
        store<R>(sum[c], p, row, first + c * COLUMNS);
}

using Tile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t);
constexpr Tile TILES[ROWS] = {tile<1>, tile<2>, tile<3>, tile<4>};

}  // namespace

void linear_w4a8_avx2(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout, int64_t first,
                      int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // of nearly equal height
        const int64_t now = divide_up(rows, left);
        TILES[now - 1](p, start, records, layout, first, row);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
