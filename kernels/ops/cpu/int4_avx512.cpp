// int4 linear layers of few rows with AVX512-VNNI; see int4.cpp for the layout and the arithmetic.
//
// A tile is R rows x one panel. 64 bytes hold two steps of 16 output channels: a mask gives the first, a shift and a
// mask the second. vpdpbusd multiplies u8 by s8; here the codes are the u8 and the activations, less their zero point,
// the s8. So nothing about the weights need be undone, and symmetric weights (code - 8) start at -8 * the sum of the
// activations.
#include "int4.h"
#include "vnni_tile.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int ROWS = 6;  // 12 accumulators and 12 float sums of 32 registers

// The 16 scales or minimums at `at` of a record.
OPTKIT_AVX512 OPTKIT_INLINE __m512 widened(const uint8_t* at, bool half, int64_t which) {
    if (half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + which));
    return _mm512_loadu_ps(reinterpret_cast<const float*>(at) + 16 * which);
}

// Two steps of R rows. Even and odd steps go to sets of their own, so that vpdpbusd waits less for itself.
template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void two_steps(Accumulators<R>& even, Accumulators<R>& odd, const uint8_t* q,
                                           int64_t stride, const uint8_t* codes) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i left = _mm512_loadu_si512(codes), right = _mm512_loadu_si512(codes + 64);
    const __m512i first[2] = {_mm512_and_si512(left, mask), _mm512_and_si512(right, mask)};
    const __m512i second[2] = {_mm512_and_si512(_mm512_srli_epi16(left, 4), mask),
                               _mm512_and_si512(_mm512_srli_epi16(right, 4), mask)};
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const __m512i x = broadcast(q + r * stride), y = broadcast(q + r * stride + STEP);
        even.v[r][0] = dot(even.v[r][0], first[0], x);
        even.v[r][1] = dot(even.v[r][1], first[1], x);
        odd.v[r][0] = dot(odd.v[r][0], second[0], y);
        odd.v[r][1] = dot(odd.v[r][1], second[1], y);
    }
}

// One group's sums of products.
template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void accumulate(Accumulators<R>& a, const uint8_t* q, int64_t stride, const uint8_t* codes,
                                            int64_t steps) {
    constexpr bool TWO_SETS = R <= 2;
    Accumulators<R> more;
    if (TWO_SETS) start<R>(more, Lanes{}, Lanes{});
    for (int64_t s = 0; s < steps; s += 2, q += 2 * STEP, codes += STEP_BYTES)
        two_steps<R>(a, TWO_SETS ? more : a, q, stride, codes);
    if (!TWO_SETS) return;
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
        a.v[r][0] += more.v[r][0];
        a.v[r][1] += more.v[r][1];
    }
}

template <int R>
OPTKIT_AVX512 void tile(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout,
                        int64_t first, int64_t row) {
    const uint8_t* q = p.q + row * p.q_stride;
    const int64_t size = layout.size(p.group_steps);
    expect<R>(p, first, row);
    Sums<R> sum{};
    for (int64_t g = 0; g < p.groups; ++g, record += size, q += p.group_steps * STEP) {
        const int64_t at = row * p.groups + g;
        Accumulators<R> a;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) a.v[r][0] = a.v[r][1] = Lanes{} + starts[at + r * p.groups];
        accumulate<R>(a, q, p.q_stride, record + layout.codes(), p.group_steps);
        add_scaled<R>(sum, a, p.scale + at, p.groups, widened(record, layout.half, 0), widened(record, layout.half, 1));
        if (!layout.minimum) continue;
        const uint8_t* minimum = record + layout.row();
        add_minimums<R>(sum, p.sums + at, p.groups, widened(minimum, layout.half, 0), widened(minimum, layout.half, 1));
    }
    store<R>(sum, p, first, row);
}

using Tile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t);
constexpr Tile TILES[ROWS] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace

void linear_w4a8_avx512(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                        int64_t first, int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, ROWS); left > 0; --left) {  // as few tiles as possible, of nearly equal height
        const int64_t now = divide_up(rows, left);
        TILES[now - 1](p, start, records, layout, first, row);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
