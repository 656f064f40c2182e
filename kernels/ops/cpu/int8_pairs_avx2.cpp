// int8 linear layers with AVX2 for panels whose pairs of weights fit 16 bits; see MOST_OF_TWO in int8.h, and int8.cpp for
// the layout and the arithmetic.
//
// vpmaddubsw adds the products of two u8 and two s8 in 16 bits. It saturates with weights like (127, 127), and is exact
// with these. A vpmaddwd by ones then adds the two pairs of a step into the 32-bit lane of an output channel. For 32
// products that are 3 instructions on the bytes as they lie; any weights take 4 on widened ones (int8_avx2.cpp).
//
// A tile is R rows x a whole panel, so that bytes are read in the order of memory. R goes to 3: 12 registers accumulate, 1
// holds a row's bytes, 1 ones and 1 a product. The weights are read from the cache anew for each row, as operands.
#include <algorithm>

#include "ymm_tile.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int ROWS = 3;             // of a tile
constexpr int C = PANEL / COLUMNS;  // registers of 8 output channels
constexpr int64_t SHORT_STEPS = 8;  // of a short group, for which a tile has no loop

// One step of row r and the rows after it. Rows go by recursion: gcc keeps an array in registers only where its indices are
// constants from the start.
template <int R, int r = 0>
OPTKIT_AVX2 OPTKIT_INLINE void add_step(Lanes (&a)[R][C], const uint8_t* q, int64_t stride, const int8_t* w) {
    const __m256i x = broadcast(q + r * stride), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        const auto four = (__m256i)load(w + c * COLUMNS * STEP);
        a[r][c] += (Lanes)_mm256_madd_epi16(_mm256_maddubs_epi16(x, four), ones);
        asm("" : "+x"(a[r][c]));  // gcc would add products first, for which registers are missing
    }
    asm("" ::: "memory");  // and would keep the weights in registers
    if constexpr (r + 1 < R) add_step<R, r + 1>(a, q, stride, w);
}

// One group of R rows. One of PARTS steps asks for bytes from `ahead` on, as far ahead as its own; with 0 none does.
template <int R, int PARTS>
OPTKIT_AVX2 OPTKIT_INLINE void accumulate(Lanes (&a)[R][C], const uint8_t* q, int64_t stride, const int8_t* w,
                                          int64_t steps, const int8_t* ahead) {
#pragma GCC unroll 8
    for (int64_t s = 0; s < steps; ++s, q += STEP, w += STEP_BYTES, ahead += STEP_BYTES) {
        if (PARTS > 0 && s % std::max(PARTS, 1) == 0) fetch<C>(ahead);
        add_step<R>(a, q, stride, w);
    }
}

// R rows of a panel. SHORT: groups have SHORT_STEPS.
template <int R, int PARTS, bool SHORT>
OPTKIT_AVX2 void tile(const Linear& p, const Panel& panel, int64_t row, const int8_t* ahead) {
    const int64_t steps = SHORT ? SHORT_STEPS : p.group_steps, group_bytes = steps * STEP_BYTES;
    const uint8_t* q = p.q + row * p.q_stride;
    const int8_t* w = panel.weight;
    const int32_t* offset = panel.offset;
    const float *weight_scale = panel.weight_scale, *scale = p.scale + row * p.groups;
    alignas(32) float sums[R * PANEL] = {};
    for (int64_t g = 0; g < p.groups; ++g, w += group_bytes, ahead += group_bytes, q += steps * STEP) {
        Lanes a[R][C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
#pragma GCC unroll 3
            for (int r = 0; r < R; ++r) a[r][c] = load(offset + c * COLUMNS);
        accumulate<R, PARTS>(a, q, p.q_stride, w, steps, ahead);
        add_group(sums, a, scale, p.groups, weight_scale);
        offset += PANEL, weight_scale += PANEL, ++scale;
    }
    store<R, PANEL>(sums, p, row, panel.first);
}

using Tile = void (*)(const Linear&, const Panel&, int64_t, const int8_t*);
template <int PARTS, bool SHORT>
constexpr Tile TILES[ROWS] = {nullptr, tile<2, PARTS, SHORT>, tile<3, PARTS, SHORT>};  // of three rows and more

template <bool SHORT>
const Tile* tiles_of(int64_t parts) {
    return parts == 0 ? TILES<0, SHORT> : parts == 1 ? TILES<1, SHORT> : parts == 2 ? TILES<2, SHORT> : TILES<4, SHORT>;
}

}  // namespace

void linear_pairs_avx2(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    const auto tiles = p.group_steps == SHORT_STEPS ? tiles_of<true> : tiles_of<false>;
    const int8_t* next = panel.weight + (rows <= ROWS ? AHEAD_BYTES : p.steps * STEP_BYTES);
    int64_t left = divide_up(rows, ROWS);
    const int64_t parts = parts_of(left);
    for (int64_t part = 0; left > 0; --left, ++part) {  // tiles of nearly equal height
        const int64_t now = divide_up(rows, left);
        tiles(part < parts ? parts : 0)[now - 1](p, panel, row, next + part * STEP_BYTES);
        row += now;
        rows -= now;
    }
}

}  // namespace optkit

#endif
