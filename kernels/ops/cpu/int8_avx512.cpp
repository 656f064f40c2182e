// int8 linear layers with AVX512-VNNI; see int8.cpp for the layout and the arithmetic.
//
// A tile is R rows x one panel, its int32 accumulators in 2 R registers. One step loads the panel's two registers,
// broadcasts 4 bytes of each row and issues 2 R vpdpbusd. With one scale a row R goes to 12 (24 accumulators). With
// group scales the float sums need registers too, so R goes to 6.
#include "vnni_tile.h"

#if OPTKIT_X86

namespace optkit {
namespace {

// Where a tile asks for the next panel, `step` bytes per step of its own, so that memory works while it computes; and where
// it keeps the offsets that it computes, for another tile of the panel.
struct Ahead {
    const int8_t* at;
    int64_t step;
    int32_t* kept = nullptr;
};

// One step: 4 input channels of R rows. Rows are addressed in threes from R/3 pointers (x86 has q + stride * 2).
// With ZERO_POINT the last row is not read: it is 128 everywhere.
template <int R, bool AHEAD, bool ZERO_POINT>
OPTKIT_AVX512 OPTKIT_INLINE void step(Accumulators<R>& a, const uint8_t* const* q, int64_t stride, int64_t k,
                                      const int8_t* w, Ahead& ahead) {
    if (AHEAD) {
        _mm_prefetch(ahead.at, _MM_HINT_T1);
        _mm_prefetch(ahead.at + 64, _MM_HINT_T1);
        ahead.at += ahead.step;
    }
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const bool ones = ZERO_POINT && r == R - 1;
        const __m512i x = ones ? _mm512_set1_epi8(-128) : broadcast(q[r / 3] + stride * (r % 3) + k);
        a.v[r][0] = dot(a.v[r][0], x, w0);
        a.v[r][1] = dot(a.v[r][1], x, w1);
    }
}

// Few rows leave vpdpbusd waiting for itself: every other step goes to a second set, added at the end (exact).
template <int R>
constexpr int sets = R == 1 ? 4 : R <= 3 ? 2 : 1;

// The steps of one group.
template <int R, bool AHEAD, bool ZERO_POINT = false>
OPTKIT_AVX512 OPTKIT_INLINE void accumulate(Accumulators<R>& a, const uint8_t* q, int64_t stride, const int8_t* w,
                                            int64_t steps, Ahead& ahead) {
    constexpr int S = sets<R>;
    const uint8_t* rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) rows[i] = q + 3 * i * stride;
    Accumulators<R> more[S];
#pragma GCC unroll 4
    for (int s = 1; s < S; ++s) start<R>(more[s], Lanes{}, Lanes{});
    int64_t k = 0;
    constexpr int UNROLL = S > 1 ? S : 4;
    for (; k + UNROLL <= steps; k += UNROLL, w += UNROLL * STEP_BYTES) {
#pragma GCC unroll 4
        for (int s = 0; s < UNROLL; ++s)
            step<R, AHEAD, ZERO_POINT>(s % S ? more[s % S] : a, rows, stride, s * STEP, w + s * STEP_BYTES, ahead);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) rows[i] += UNROLL * STEP;
    }
    for (; k < steps; ++k, w += STEP_BYTES) {
        step<R, AHEAD, ZERO_POINT>(a, rows, stride, 0, w, ahead);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) rows[i] += STEP;
    }
#pragma GCC unroll 4
    for (int s = 1; s < S; ++s)
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) {
            a.v[r][0] += more[s].v[r][0];
            a.v[r][1] += more[s].v[r][1];
        }
}

template <int R, bool AHEAD>
OPTKIT_AVX512 void tile(const Linear& p, const Panel& panel, int64_t row, Ahead ahead) {
    expect<R>(p, panel.first, row);
    Accumulators<R> a;
    start<R>(a, load(panel.offset), load(panel.offset + 16));
    accumulate<R, AHEAD>(a, p.q + row * p.q_stride, p.q_stride, panel.weight, p.steps, ahead);
    Sums<R> sum{};
    add_scaled<R>(sum, a, p.scale + row, 1, scales<0>(panel, 0), scales<1>(panel, 0));
    store<R>(sum, p, panel.first, row);
}

// Few rows wait for memory, and with small groups the offsets are a tenth of it. So the first tile of a panel computes them
// from the weights at hand, as one more row of activations, and keeps them for the second. For more rows arithmetic takes as
// long as memory.
constexpr int ALONE_ROWS = 2, OFFSET_ROWS = 8;

enum class Offsets { read, computed, kept };

// The sums of a group for R rows, with the offsets of the group, which go to `ahead.kept` too where it is a tile of several.
template <int R, bool AHEAD>
OPTKIT_AVX512 OPTKIT_INLINE void accumulate_group(Accumulators<R>& a, const uint8_t* q, int64_t stride, const int8_t* w,
                                                  int64_t steps, Ahead& ahead) {
    Accumulators<R + 1> b;
    start<R + 1>(b, Lanes{}, Lanes{});
    accumulate<R + 1, AHEAD, true>(b, q, stride, w, steps, ahead);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        a.v[r][0] = b.v[r][0] - b.v[R][0];
        a.v[r][1] = b.v[r][1] - b.v[R][1];
    }
    if (!AHEAD) return;
    _mm512_storeu_si512(ahead.kept, reinterpret_cast<__m512i>(-b.v[R][0]));
    _mm512_storeu_si512(ahead.kept + 16, reinterpret_cast<__m512i>(-b.v[R][1]));
    ahead.kept += PANEL;
}

template <int R, bool AHEAD, bool MINIMUM, Offsets OFFSETS = AHEAD ? Offsets::read : Offsets::computed>
OPTKIT_AVX512 void grouped_tile(const Linear& p, const Panel& panel, int64_t row, Ahead ahead) {
    const uint8_t* q = p.q + row * p.q_stride;
    const int8_t* w = panel.weight;
    expect<R>(p, panel.first, row);
    Sums<R> sum{};
    for (int64_t g = 0; g < p.groups; ++g) {
        const int32_t* offset = panel.offset + g * PANEL;
        Accumulators<R> a;
        if (AHEAD && OFFSETS == Offsets::read) {  // those of the next panel, too
            _mm_prefetch(offset + p.groups * PANEL, _MM_HINT_T1);
            _mm_prefetch(offset + p.groups * PANEL + 16, _MM_HINT_T1);
        }
        if (AHEAD && panel.half) _mm_prefetch(panel.half + (p.groups + g) * PANEL, _MM_HINT_T1);
        if (OFFSETS == Offsets::computed) {
            accumulate_group<R, AHEAD>(a, q, p.q_stride, w, p.group_steps, ahead);
        } else {
            start<R>(a, load(offset), load(offset + 16));
            accumulate<R, true>(a, q, p.q_stride, w, p.group_steps, ahead);
        }
        const int64_t at = row * p.groups + g;
        add_scaled<R>(sum, a, p.scale + at, p.groups, scales<0>(panel, g), scales<1>(panel, g));
        if (MINIMUM) {
            const float* minimum = panel.minimum + g * PANEL;
            add_minimums<R>(sum, p.sums + at, p.groups, load(minimum), load(minimum + 16));
        }
        q += p.group_steps * STEP;
        w += p.group_steps * STEP_BYTES;
    }
    store<R>(sum, p, panel.first, row);
}

using Tile = void (*)(const Linear&, const Panel&, int64_t, Ahead);
constexpr int ROWS = 12, GROUPED_ROWS = 6;

// By height. Several tiles to a panel look ahead; the lowest are of 13 rows cut in two, and of 3 with group scales.
constexpr Tile TILES[2][ROWS] = {
    {tile<1, false>, tile<2, false>, tile<3, false>, tile<4, false>, tile<5, false>, tile<6, false>, tile<7, false>,
     tile<8, false>, tile<9, false>, tile<10, false>, tile<11, false>, tile<12, false>},
    {nullptr, nullptr, nullptr, nullptr, nullptr, tile<6, true>, tile<7, true>, tile<8, true>, tile<9, true>,
     tile<10, true>, tile<11, true>, tile<12, true>}};
template <bool MINIMUM>
constexpr Tile GROUPED_TILES[2][GROUPED_ROWS] = {
    {grouped_tile<1, false, MINIMUM>, grouped_tile<2, false, MINIMUM>},
    {grouped_tile<1, true, MINIMUM>, grouped_tile<2, true, MINIMUM>, grouped_tile<3, true, MINIMUM>,
     grouped_tile<4, true, MINIMUM>, grouped_tile<5, true, MINIMUM>, grouped_tile<6, true, MINIMUM>}};

// Few rows of an int8 panel: two tiles, of which the first computes the offsets of both.
void few_rows(const Linear& p, Panel panel, int64_t row, int64_t rows) {
    static constexpr Tile FIRST[] = {grouped_tile<1, true, false, Offsets::computed>, grouped_tile<2, true, false, Offsets::computed>,
                                     grouped_tile<3, true, false, Offsets::computed>, grouped_tile<4, true, false, Offsets::computed>};
    static constexpr Tile SECOND[] = {grouped_tile<1, true, false, Offsets::kept>, grouped_tile<2, true, false, Offsets::kept>,
                                      grouped_tile<3, true, false, Offsets::kept>, grouped_tile<4, true, false, Offsets::kept>};
    thread_local GrowingMemory kept;
    int32_t* offsets = kept.at_least<int32_t>(p.groups * PANEL);
    panel.offset = offsets;
    const int64_t first = divide_up(rows, 2);
    Ahead ahead{static_cast<const int8_t*>(panel.next), panel.next_step / 2, offsets};
    FIRST[first - 1](p, panel, row, ahead);
    ahead.at += ahead.step * p.steps;
    SECOND[rows - first - 1](p, panel, row + first, ahead);
}

}  // namespace

void linear_avx512(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    const bool grouped = p.groups > 1 || panel.minimum;
    const int64_t most = grouped ? GROUPED_ROWS : ROWS;
    // As few tiles as possible, of nearly equal height. One alone is read as fast as memory gives; of several only
    // the first would wait for memory, so each asks for its share of the next panel.
    int64_t count = divide_up(rows, most);
    const bool from_memory = p.offset;  // an int4 panel was unpacked, with its offsets
    if (grouped && from_memory && rows > ALONE_ROWS && rows <= OFFSET_ROWS) return few_rows(p, panel, row, rows);
    if (grouped && count == 1 && rows > ALONE_ROWS) count = 2;  // arithmetic takes longer than memory: look ahead
    const Tile* tiles = panel.minimum ? GROUPED_TILES<true>[count > 1] :
                        grouped       ? GROUPED_TILES<false>[count > 1] :
                                        TILES[count > 1];
    Ahead ahead{static_cast<const int8_t*>(panel.next), panel.next_step / count};
    for (int64_t left = count; left > 0; --left) {
        const int64_t now = (rows + left - 1) / left;
        tiles[now - 1](p, panel, row, ahead);
        ahead.at += ahead.step * p.steps;
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
