// int4 linear layers with AVX2: tiles for few rows, which unpack in registers, and for many rows of an unpacked panel; see
// int4.cpp for the layout and the arithmetic.
//
// vpmaddubsw adds two products of a u8 and an s8 in 16 bits. With int8 weights that saturates; with codes up to 15 it
// can't (2 * 15 * 128), and even the sums of 8 steps fit (8 * 3840 = 30720). So products are added in 16 bits for
// 8 steps, the usual group, and only then widened: for 32 products one vpmaddubsw, one vpaddw and an eighth of a
// vpmaddwd, about half of what int8 weights take (int8_avx2.cpp).
#include "int4.h"

#include "dispatch.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int ROWS = 4, PAIR = 2;  // registers of a tile of many rows: 16 output channels
constexpr int64_t NARROW_STEPS = 8, COLUMNS = 8;  // of a register of int32

// Not __m256i, which is 64-bit lanes to gcc: it would copy sums.
using Words = int16_t __attribute__((vector_size(32)));
using Lanes = int32_t __attribute__((vector_size(32)));

OPTKIT_AVX2 OPTKIT_INLINE __m256i load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

OPTKIT_AVX2 OPTKIT_INLINE __m256i broadcast(const uint8_t* q) {
    int32_t four;
    __builtin_memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

// -- scales ----------------------------------------------------------------------------------------------

// The 8 scales or minimums from `column` on of the 32 at `at`.
OPTKIT_AVX2 OPTKIT_INLINE __m256 widened(const uint8_t* at, bool half, int64_t column) {
    if (!half) return _mm256_loadu_ps(reinterpret_cast<const float*>(at) + column);
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 2 * column)));
}

// The 8 minimums from `column` on of a record, whose scales there are `scale`; see widen_minimums.
OPTKIT_AVX2 OPTKIT_INLINE __m256 minimums(const uint8_t* record, RecordLayout layout, __m256 scale, int64_t column) {
    const uint8_t* low = record + layout.row();
    if (layout.levels == Levels::minimum) return widened(low, layout.half, column);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low + column));
    const __m256 zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    return _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), zero), scale);
}

// -- what both kinds of tiles share ------------------------------------------------------------------------

OPTKIT_AVX2 OPTKIT_INLINE __m256i add_widened(__m256i a, __m256i narrow) {
    return _mm256_add_epi32(a, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
}

// What R rows share in one group: pointers to the first row's, the others' are `groups` apart.
struct GroupRows {
    const int32_t* start;
    const float* scale;
    const float* sums;
    int64_t groups;
};

OPTKIT_INLINE GroupRows rows_of(const Linear& p, const int32_t* start, int64_t row, int64_t g) {
    const int64_t at = row * p.groups + g;
    return {start + at, p.scale + at, p.sums + at, p.groups};
}

// Add one group's accumulators of 8 output channels, scaled, and with `minimum` what that contributes.
template <int R, bool MINIMUM>
OPTKIT_AVX2 OPTKIT_INLINE void add_scaled(float* sums, int64_t stride, const __m256i (&a)[R], const GroupRows& rows,
                                          __m256 scales, __m256 minimum) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m256i total = MINIMUM ? a[r] : _mm256_add_epi32(a[r], _mm256_set1_epi32(rows.start[r * rows.groups]));
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(rows.scale[r * rows.groups]), scales);
        __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, _mm256_loadu_ps(sums + r * stride));
        if (MINIMUM) sum = _mm256_fmadd_ps(_mm256_set1_ps(rows.sums[r * rows.groups]), minimum, sum);
        _mm256_storeu_ps(sums + r * stride, sum);
    }
}

// The sums [R][PANEL] of a panel, or of the part of it that the layer has, and the bias.
template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void store(const float* sums, const Linear& p, int64_t row, int64_t first) {
    const int64_t columns = std::min(PANEL, p.n - first);
    for (int r = 0; r < R; ++r) {
        float* out = p.out + (row + r) * p.n + first;
        const float* sum = sums + r * PANEL;
        for (int64_t c = 0; c < columns; ++c) out[c] = p.bias ? sum[c] + p.bias[first + c] : sum[c];
    }
}

// -- few rows ----------------------------------------------------------------------------------------------

// Up to 8 steps of 8 output channels, added to the accumulators of R rows.
template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void accumulate(__m256i (&a)[R], const uint8_t* q, int64_t stride, const uint8_t* codes,
                                          int64_t steps) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i narrow[R] = {};
    for (int64_t s = 0; s < steps; s += 2, q += 2 * STEP, codes += STEP_BYTES) {
        const __m256i both = load(codes);
        const __m256i first = _mm256_and_si256(both, mask), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256i x = _mm256_maddubs_epi16(first, broadcast(q + r * stride));
            const __m256i y = _mm256_maddubs_epi16(second, broadcast(q + r * stride + STEP));
            narrow[r] = _mm256_add_epi16(narrow[r], _mm256_add_epi16(x, y));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[r] = add_widened(a[r], narrow[r]);
}

template <int R, bool MINIMUM>
OPTKIT_AVX2 void few_rows(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout,
                          int64_t first, int64_t row) {
    alignas(32) float sums[R * PANEL] = {};
    const uint8_t* q = p.q + row * p.q_stride;
    for (int64_t g = 0; g < p.groups; ++g, record += layout.size(p.group_steps), q += p.group_steps * STEP) {
        const GroupRows rows = rows_of(p, starts, row, g);
        const uint8_t* codes = record + layout.codes();
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
            __m256i a[R] = {};
            for (int64_t s = 0; s < p.group_steps; s += NARROW_STEPS)
                accumulate<R>(a, q + s * STEP, p.q_stride, codes + s / 2 * STEP_BYTES + c * STEP,
                              std::min(NARROW_STEPS, p.group_steps - s));
            const __m256 scales = widened(record, layout.half, c);
            const __m256 minimum = MINIMUM ? minimums(record, layout, scales, c) : scales;
            add_scaled<R, MINIMUM>(sums + c, PANEL, a, rows, scales, minimum);
        }
    }
    store<R>(sums, p, row, first);
}

using FewTile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t);
constexpr FewTile FEW[2][ROWS] = {{few_rows<1, false>, few_rows<2, false>, few_rows<3, false>, few_rows<4, false>},
                                  {few_rows<1, true>, few_rows<2, true>, few_rows<3, true>, few_rows<4, true>}};

// -- many rows ---------------------------------------------------------------------------------------------

// One step of 16 output channels, unpacked, added to 16-bit sums of rows r and later.
template <int R, int r = 0>
OPTKIT_AVX2 OPTKIT_INLINE void add_codes(Words (&narrow)[R][PAIR], const uint8_t* q, int64_t stride, __m256i left,
                                         __m256i right) {
    const __m256i x = broadcast(q + r * stride);
    narrow[r][0] += (Words)_mm256_maddubs_epi16(left, x);
    narrow[r][1] += (Words)_mm256_maddubs_epi16(right, x);
    if (R > 2) asm("" : "+x"(narrow[r][0]));  // gcc would add products first, for which registers are missing
    if (R > 2) asm("" : "+x"(narrow[r][1]));
    if constexpr (r + 1 < R) add_codes<R, r + 1>(narrow, q, stride, left, right);
}

// The sums of `steps` steps, up to 8, of 16 output channels and R rows.
template <int R>
OPTKIT_AVX2 OPTKIT_INLINE void sum_codes(Lanes (&a)[R][PAIR], const uint8_t* q, int64_t stride, const int8_t* codes,
                                         int64_t steps) {
    Words narrow[R][PAIR];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) narrow[r][0] = narrow[r][1] = Words{};
#pragma GCC unroll 8
    for (int64_t s = 0; s < steps; ++s, q += STEP, codes += STEP_BYTES)
        add_codes<R>(narrow, q, stride, load(codes), load(codes + COLUMNS * STEP));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        a[r][0] = (Lanes)_mm256_madd_epi16((__m256i)narrow[r][0], _mm256_set1_epi16(1));
        a[r][1] = (Lanes)_mm256_madd_epi16((__m256i)narrow[r][1], _mm256_set1_epi16(1));
    }
}

// Add one group's sums of 8 output channels, scaled, and with `minimum` what that contributes.
template <int R, bool MINIMUM, int c, int r = 0>
OPTKIT_AVX2 OPTKIT_INLINE void add_scaled_codes(float* sums, const Lanes (&a)[R][PAIR], const GroupRows& rows, __m256 scales, __m256 minimum) {
    const int64_t at = r * rows.groups;
    const __m256i total = MINIMUM ? (__m256i)a[r][c] : _mm256_add_epi32((__m256i)a[r][c], _mm256_set1_epi32(rows.start[at]));
    const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(rows.scale[at]), scales);
    float* to = sums + r * PANEL + c * COLUMNS;
    __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, _mm256_loadu_ps(to));
    if (MINIMUM) sum = _mm256_fmadd_ps(_mm256_set1_ps(rows.sums[at]), minimum, sum);
    _mm256_storeu_ps(to, sum);
    if constexpr (r + 1 < R) add_scaled_codes<R, MINIMUM, c, r + 1>(sums, a, rows, scales, minimum);
}

// The sums of a group of 16 output channels and R rows. SHORT: it has NARROW_STEPS steps.
template <int R, bool SHORT>
OPTKIT_AVX2 OPTKIT_INLINE void sum_group(Lanes (&a)[R][PAIR], const uint8_t* q, int64_t stride, const int8_t* codes,
                                         int64_t steps) {
    if (SHORT) return sum_codes<R>(a, q, stride, codes, NARROW_STEPS);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[r][0] = a[r][1] = Lanes{};
    for (int64_t s = 0; s < steps; s += NARROW_STEPS) {
        Lanes more[R][PAIR];
        sum_codes<R>(more, q + s * STEP, stride, codes + s * STEP_BYTES, std::min(NARROW_STEPS, steps - s));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) a[r][0] += more[r][0], a[r][1] += more[r][1];
    }
}

template <int R, bool MINIMUM, bool SHORT>
OPTKIT_AVX2 void many_rows(const Linear& p, const int32_t* starts, const Panel& panel, int64_t row) {
    alignas(32) float sums[R * PANEL] = {};
    const int64_t stride = p.q_stride, steps = SHORT ? NARROW_STEPS : p.group_steps;
    for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += PAIR * COLUMNS) {
        const uint8_t* q = p.q + row * stride;
        const int8_t* codes = panel.weight + column * STEP;
        const float *scale = panel.weight_scale + column, *minimum = MINIMUM ? panel.minimum + column : scale;
        GroupRows rows = rows_of(p, starts, row, 0);
        for (int64_t g = 0; g < p.groups; ++g, q += steps * STEP, codes += steps * STEP_BYTES) {
            Lanes a[R][PAIR];
            sum_group<R, SHORT>(a, q, stride, codes, steps);
            add_scaled_codes<R, MINIMUM, 0>(sums + column, a, rows, _mm256_loadu_ps(scale), _mm256_loadu_ps(minimum));
            add_scaled_codes<R, MINIMUM, 1>(sums + column, a, rows, _mm256_loadu_ps(scale + COLUMNS),
                                            _mm256_loadu_ps(minimum + COLUMNS));
            scale += PANEL, minimum += PANEL;
            ++rows.start, ++rows.scale, ++rows.sums;
        }
    }
    store<R>(sums, p, row, panel.first);
}

using ManyTile = void (*)(const Linear&, const int32_t*, const Panel&, int64_t);
template <bool MINIMUM, bool SHORT>
constexpr ManyTile MANY[ROWS] = {many_rows<1, MINIMUM, SHORT>, many_rows<2, MINIMUM, SHORT>, many_rows<3, MINIMUM, SHORT>,
                                 many_rows<4, MINIMUM, SHORT>};

// Two steps of a panel, two codes to a byte.
OPTKIT_AVX2 OPTKIT_INLINE void unpack_two_steps(const uint8_t* codes, int8_t* weight) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int64_t i = 0; i < STEP_BYTES; i += 32) {
        const __m256i both = load(codes + i);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + i), _mm256_and_si256(both, mask));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + STEP_BYTES + i),
                            _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    }
}

}  // namespace

OPTKIT_AVX2 void unpack_avx2(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) {
    const RecordLayout& layout = p.layout;
    int8_t* weight = to.weight;
    for (int64_t g = 0; g < p.groups; ++g, records += layout.size(p.group_steps)) {
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
            const __m256 scales = widened(records, layout.half, c);
            _mm256_storeu_ps(to.scale + g * PANEL + c, scales);
            if (layout.minimum())
                _mm256_storeu_ps(to.minimum + g * PANEL + c, minimums(records, layout, scales, c));
        }
        const uint8_t* codes = records + layout.codes();
        for (int64_t s = 0; s < p.group_steps; s += 2, codes += STEP_BYTES, weight += 2 * STEP_BYTES)
            unpack_two_steps(codes, weight);
    }
}

void linear_w4a8_avx2(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout, int64_t first,
                      int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // of nearly equal height
        const int64_t now = divide_up(rows, left);
        FEW[layout.minimum()][now - 1](p, start, records, layout, first, row);
        row += now;
        rows -= now;
    }
}

void linear_codes_avx2(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows) {
    const bool is_short = p.group_steps == NARROW_STEPS;
    const ManyTile* tiles = panel.minimum ? (is_short ? MANY<true, true> : MANY<true, false>)
                                          : (is_short ? MANY<false, true> : MANY<false, false>);
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {
        const int64_t now = divide_up(rows, left);
        tiles[now - 1](p, start, panel, row);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
