// int4 linear layers with AVX512-VNNI: tiles for few rows, unpacking for many; see int4.cpp for the layout and the
// arithmetic.
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
constexpr int ALONE = 4;  // rows of a single tile; for more arithmetic takes as long as memory, so two tiles look ahead

// The 16 scales or minimums at `at` of a record.
OPTKIT_AVX512 OPTKIT_INLINE __m512 widened(const uint8_t* at, bool half, int64_t which) {
    if (half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + which));
    return _mm512_loadu_ps(reinterpret_cast<const float*>(at) + 16 * which);
}

// The 16 minimums at half `which` of a record, whose scales there are `scale`; see widen_minimums.
OPTKIT_AVX512 OPTKIT_INLINE __m512 minimums(const uint8_t* record, RecordLayout layout, __m512 scale, int64_t which) {
    const uint8_t* low = record + layout.row();
    if (layout.levels == Levels::minimum) return widened(low, layout.half, which);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low) + which);
    const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zero), scale);
}

// 16 output channels' codes in two steps.
struct Codes {
    __m512i first, second;
};

OPTKIT_AVX512 OPTKIT_INLINE Codes codes_at(const uint8_t* at) {
    const __m512i mask = _mm512_set1_epi8(15), both = _mm512_loadu_si512(at);
    return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}

// Two steps of R rows. Even and odd steps go to sets of their own, so that vpdpbusd waits less for itself.
template <int R>
OPTKIT_AVX512 OPTKIT_INLINE void two_steps(Accumulators<R>& even, Accumulators<R>& odd, const uint8_t* q,
                                           int64_t stride, const uint8_t* codes) {
    const Codes left = codes_at(codes), right = codes_at(codes + 64);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const __m512i x = broadcast(q + r * stride), y = broadcast(q + r * stride + STEP);
        even.v[r][0] = dot(even.v[r][0], left.first, x);
        even.v[r][1] = dot(even.v[r][1], right.first, x);
        odd.v[r][0] = dot(odd.v[r][0], left.second, y);
        odd.v[r][1] = dot(odd.v[r][1], right.second, y);
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

// What a tile asks of memory while it computes: `bytes` from `at` on for each group.
struct Ahead {
    const uint8_t* at;
    int64_t bytes;
};

OPTKIT_INLINE void fetch(Ahead& ahead) {
    for (int64_t i = 0; i < ahead.bytes; i += 64) __builtin_prefetch(ahead.at + i);
    ahead.at += ahead.bytes;
}

template <int R>
OPTKIT_AVX512 void tile(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout,
                        int64_t first, int64_t row, Ahead ahead) {
    const uint8_t* q = p.q + row * p.q_stride;
    const int64_t size = layout.size(p.group_steps);
    expect<R>(p, first, row);
    Sums<R> sum{};
    for (int64_t g = 0; g < p.groups; ++g, record += size, q += p.group_steps * STEP) {
        const int64_t at = row * p.groups + g;
        fetch(ahead);
        Accumulators<R> a;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) a.v[r][0] = a.v[r][1] = Lanes{} + starts[at + r * p.groups];
        accumulate<R>(a, q, p.q_stride, record + layout.codes(), p.group_steps);
        const __m512 left = widened(record, layout.half, 0), right = widened(record, layout.half, 1);
        add_scaled<R>(sum, a, p.scale + at, p.groups, left, right);
        if (!layout.minimum()) continue;
        add_minimums<R>(sum, p.sums + at, p.groups, minimums(record, layout, left, 0), minimums(record, layout, right, 1));
    }
    store<R>(sum, p, first, row);
}

// Two steps of half a panel, less `zero`, to `weight`; adds 128 * their sums to `sums`.
OPTKIT_AVX512 OPTKIT_INLINE Lanes unpack_two_steps(Lanes sums, const uint8_t* at, __m512i zero, int8_t* weight) {
    const Codes codes = codes_at(at);
    const __m512i first = _mm512_sub_epi8(codes.first, zero), second = _mm512_sub_epi8(codes.second, zero);
    _mm512_storeu_si512(weight, first);
    _mm512_storeu_si512(weight + STEP_BYTES, second);
    const __m512i zero_point = _mm512_set1_epi8(-128);  // 128 as u8
    return dot(dot(sums, zero_point, first), zero_point, second);
}

// A record's scales, and its minimums if it has any.
OPTKIT_AVX512 OPTKIT_INLINE void unpack_scales(const uint8_t* record, RecordLayout layout, float* scale, float* minimum) {
    for (int64_t which = 0; which < 2; ++which) {
        const __m512 values = widened(record, layout.half, which);
        _mm512_storeu_ps(scale + 16 * which, values);
        if (layout.minimum()) _mm512_storeu_ps(minimum + 16 * which, minimums(record, layout, values, which));
    }
}

using Tile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t, Ahead);
constexpr Tile TILES[ROWS] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace

OPTKIT_AVX512 void unpack_avx512(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) {
    const RecordLayout& layout = p.layout;
    const __m512i zero = _mm512_set1_epi8(layout.minimum() ? 0 : 8);
    int8_t* weight = to.weight;
    for (int64_t g = 0; g < p.groups; ++g, records += layout.size(p.group_steps)) {
        unpack_scales(records, layout, to.scale + g * PANEL, to.minimum + g * PANEL);
        const uint8_t* codes = records + layout.codes();
        Lanes left{}, right{};
        for (int64_t s = 0; s < p.group_steps; s += 2, codes += STEP_BYTES, weight += 2 * STEP_BYTES) {
            left = unpack_two_steps(left, codes, zero, weight);
            right = unpack_two_steps(right, codes + 64, zero, weight + 64);
        }
        int32_t* offset = to.offset + g * PANEL;
        _mm512_storeu_si512(offset, reinterpret_cast<__m512i>(Lanes{} - left));
        _mm512_storeu_si512(offset + 16, reinterpret_cast<__m512i>(Lanes{} - right));
    }
}

void linear_w4a8_avx512(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                        int64_t first, int64_t row, int64_t rows) {
    // As few tiles as possible, of nearly equal height. One alone is read as fast as memory gives; of several only the
    // first would wait for memory, so each asks for its share of the next panel.
    const int64_t size = layout.size(p.group_steps);
    const int64_t count = std::max<int64_t>(divide_up(rows, ROWS), rows > ALONE ? 2 : 1);
    Ahead ahead{records + size * p.groups, count > 1 ? divide_up(size, 64 * count) * 64 : 0};
    for (int64_t left = count; left > 0; --left) {
        const int64_t now = divide_up(rows, left);
        TILES[now - 1](p, start, records, layout, first, row, ahead);
        ahead.at += ahead.bytes * p.groups;
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
