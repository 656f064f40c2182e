// int8 linear layers with AVX2; see int8.cpp for the layout and the arithmetic.
//
// Without VNNI the one-instruction product of bytes, vpmaddubsw, saturates in 16 bits. So both sides are widened to
// 16 bits and multiplied by vpmaddwd, which is exact. Bytes 0 and 2 of a step are one pair of products and bytes 1 and
// 3 the other: shifts widen weights where they lie, and each 32-bit lane stays one output channel.
//
// Activations are widened once for all panels of a task, less their zero point, and a panel once for all rows of a task,
// where the rows are many. A tile of many rows is R rows x 16 output channels, half a panel: 2 registers of 8 output channels
// a row. For 32 products that are 2 vpmaddwd and 2 vpaddd. R goes to 4: 8 registers accumulate, 4 hold weights, 1 a row's pair
// and 1 a product.
//
// Few rows wait for memory. Their tiles take a whole panel, so that bytes are read in the order of memory, and widen it in
// registers, half after half: 6 / (2 R) shifts more for 32 products. R goes to 3, with 12 registers that accumulate.
//
// The first of several tiles of a panel ask for the next panel, a part each; a single tile asks for what it reads soon.
// Three rows and more of panels whose pairs of weights fit 16 bits have tiles of their own (int8_pairs_avx2.cpp).
#include <algorithm>

#include "scratch.h"
#include "ymm_tile.h"

#if OPTKIT_X86

namespace optkit {
namespace {

constexpr int HALF = 2, WHOLE = 4;  // registers across half a panel and a whole one
constexpr int ROWS = 4;             // of a tile across half a panel
constexpr int WHOLE_ROWS = 3;       // of one across a whole panel
constexpr int64_t FEW_ROWS = 6;     // up to here tiles take a whole panel
constexpr int64_t MANY_ROWS = 16;   // from here on widening a panel in memory is faster than in each tile
constexpr int64_t BY_ANY_ROWS = 2;  // up to here the tiles of this file are as fast as those for pairs that fit

// Activations of some rows, [rows][steps][2] pairs of int16, q - 128: of bytes 0 and 2, and of bytes 1 and 3 of a step.
struct Pairs {
    int32_t* at;
    int64_t stride;  // 2 * steps
};

OPTKIT_AVX2 OPTKIT_INLINE void widen_row(const uint8_t* q, int64_t steps, int32_t* to) {
    const __m256i zero_point = _mm256_set1_epi16(128), low = _mm256_set1_epi16(255);
    int64_t s = 0;
    for (; s + COLUMNS <= steps; s += COLUMNS) {
        const __m256i bytes = (__m256i)load(q + s * STEP);
        const __m256i even = _mm256_sub_epi16(_mm256_and_si256(bytes, low), zero_point);
        const __m256i odd = _mm256_sub_epi16(_mm256_srli_epi16(bytes, 8), zero_point);
        const __m256i first = _mm256_unpacklo_epi32(even, odd), second = _mm256_unpackhi_epi32(even, odd);
        auto* steps_of_8 = reinterpret_cast<__m256i*>(to + 2 * s);
        _mm256_storeu_si256(steps_of_8, _mm256_permute2x128_si256(first, second, 0x20));
        _mm256_storeu_si256(steps_of_8 + 1, _mm256_permute2x128_si256(first, second, 0x31));
    }
    for (; s < steps; ++s) {
        const uint8_t* four = q + s * STEP;
        const int16_t pairs[4] = {static_cast<int16_t>(four[0] - 128), static_cast<int16_t>(four[2] - 128),
                                  static_cast<int16_t>(four[1] - 128), static_cast<int16_t>(four[3] - 128)};
        __builtin_memcpy(to + 2 * s, pairs, sizeof pairs);
    }
}

// Rows [row, row + rows), in scratch memory of this thread.
OPTKIT_AVX2 Pairs widened_rows(const Linear& p, int64_t row, int64_t rows) {
    thread_local GrowingMemory scratch;
    const Pairs x{scratch.at_least<int32_t>(rows * 2 * p.steps), 2 * p.steps};
    for (int64_t r = 0; r < rows; ++r) widen_row(p.q + (row + r) * p.q_stride, p.steps, x.at + r * x.stride);
    return x;
}

// The weights of one step and 8 output channels as pairs of int16: bytes 0 and 2, bytes 1 and 3. Widened weights lie
// [steps][PANEL / 8][2][8]: even, odd, for each 8 output channels.
OPTKIT_AVX2 OPTKIT_INLINE Lanes even(Lanes w) {
    return (Lanes)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8);
}
OPTKIT_AVX2 OPTKIT_INLINE Lanes odd(Lanes w) { return (Lanes)_mm256_srai_epi16((__m256i)w, 8); }

// Add one pair of products of R rows and, of C registers of output channels, the HALF from `first` on.
template <int R, int C>
OPTKIT_AVX2 OPTKIT_INLINE void add_products(Lanes (&a)[R][C], int first, const int32_t* x, int64_t stride,
                                            const Lanes (&w)[HALF]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m256i pair = _mm256_set1_epi32(x[r * stride]);
#pragma GCC unroll 2
        for (int c = 0; c < HALF; ++c) {
            a[r][first + c] += (Lanes)_mm256_madd_epi16((__m256i)w[c], pair);
            // gcc would add products first, for which registers are missing where rows are many
            if (R > 2) asm("" : "+x"(a[r][first + c]));
        }
    }
    if (C == WHOLE && R > 2) asm("" ::: "memory");  // and would widen both halves at once
}

OPTKIT_AVX2 OPTKIT_INLINE void widen_panel(const int8_t* w, int64_t steps, int8_t* to) {
    for (int64_t i = 0; i < steps * STEP_BYTES; i += COLUMNS * STEP) {
        const Lanes bytes = load(w + i);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + 2 * i), (__m256i)even(bytes));
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + 2 * i) + 1, (__m256i)odd(bytes));
    }
}

// One group of R rows; `x` is their activations from the group's first step on. WIDE: the weights are widened. One of PARTS
// steps asks for bytes from `ahead` on, as far ahead as its own; with 0 none does.
template <int R, int C, bool WIDE, int PARTS>
OPTKIT_AVX2 OPTKIT_INLINE void accumulate(Lanes (&a)[R][C], const int32_t* x, int64_t stride, const int8_t* w,
                                          int64_t steps, const int8_t* ahead) {
    for (int64_t s = 0; s < steps; ++s, x += 2, w += (WIDE ? 2 : 1) * STEP_BYTES, ahead += STEP_BYTES) {
        if (PARTS > 0 && s % std::max(PARTS, 1) == 0) fetch<C>(ahead);
#pragma GCC unroll 2
        for (int half = 0; half < C; half += HALF) {
            Lanes first[HALF], second[HALF];
#pragma GCC unroll 2
            for (int c = 0; c < HALF; ++c) {
                const int8_t* at = w + (WIDE ? 2 : 1) * (half + c) * COLUMNS * STEP;
                if (WIDE) {
                    first[c] = load(at), second[c] = load(at + COLUMNS * STEP);
                } else {
                    const Lanes bytes = load(at);
                    first[c] = even(bytes), second[c] = odd(bytes);
                }
            }
            add_products<R, C>(a, half, x, stride, first);
            add_products<R, C>(a, half, x + 1, stride, second);
        }
    }
}

// R rows of the C registers from output channel `column` of the panel on; `x` is their activations.
template <int R, int C, bool WIDE, int PARTS>
OPTKIT_AVX2 void tile(const Linear& p, const Panel& panel, Pairs x, int64_t column, int64_t row, const int8_t* ahead) {
    constexpr int64_t BYTES = WIDE ? 2 : 1, WIDTH = C * COLUMNS;
    const int64_t group_bytes = p.group_steps * STEP_BYTES;
    const int8_t* w = panel.weight + BYTES * column * STEP;
    alignas(32) float sums[R * WIDTH] = {};
    ahead += column * STEP;
    for (int64_t g = 0; g < p.groups; ++g, w += BYTES * group_bytes, ahead += group_bytes, x.at += 2 * p.group_steps) {
        Lanes a[R][C] = {};
        accumulate<R, C, WIDE, PARTS>(a, x.at, x.stride, w, p.group_steps, ahead);
        add_group(sums, a, p.scale + row * p.groups + g, p.groups, panel.weight_scale + g * PANEL + column);
    }
    store<R, WIDTH>(sums, p, row, panel.first + column);
}

using Tile = void (*)(const Linear&, const Panel&, Pairs, int64_t, int64_t, const int8_t*);
template <int PARTS>
constexpr Tile WHOLES[WHOLE_ROWS] = {tile<1, WHOLE, false, PARTS>, tile<2, WHOLE, false, PARTS>,
                                     tile<3, WHOLE, false, PARTS>};
// More than FEW_ROWS rows are tiles of three and four.
template <bool WIDE, int PARTS>
constexpr Tile HALVES[ROWS] = {nullptr, nullptr, tile<3, HALF, WIDE, PARTS>, tile<4, HALF, WIDE, PARTS>};

// Tiles of which each asks for one of `parts` parts; 0: none asks.
const Tile* wholes_of(int64_t parts) { return parts == 1 ? WHOLES<1> : WHOLES<2>; }
const Tile* halves_of(int64_t parts) {
    return parts == 0 ? HALVES<false, 0> : parts == 2 ? HALVES<false, 2> : HALVES<false, 4>;
}
const Tile* wide_halves_of(int64_t parts) { return parts == 0 ? HALVES<true, 0> : HALVES<true, 4>; }
static_assert(FEW_ROWS <= 2 * WHOLE_ROWS && FEW_ROWS >= ROWS && MANY_ROWS > 3 * ROWS, "the tiles and parts above");

// `rows` rows of one panel, of which the first is the layer's row `row`; `x` is their activations.
OPTKIT_AVX2 void rows_of_panel(const Linear& p, Panel panel, Pairs x, int64_t row, int64_t rows) {
    thread_local GrowingMemory scratch;
    const bool few = rows <= FEW_ROWS, wide = rows >= MANY_ROWS;
    const auto tiles = few ? wholes_of : wide ? wide_halves_of : halves_of;
    const int64_t width = (few ? WHOLE : HALF) * COLUMNS;
    const int8_t* next = panel.weight + (rows <= WHOLE_ROWS ? AHEAD_BYTES : p.steps * STEP_BYTES);
    if (wide) {
        auto* weight = scratch.at_least<int8_t>(2 * p.steps * STEP_BYTES);
        widen_panel(panel.weight, p.steps, weight);
        panel.weight = weight;
    }
    int64_t left = divide_up(rows, few ? WHOLE_ROWS : ROWS);
    const int64_t parts = parts_of(left);
    for (int64_t part = 0; left > 0; --left, ++part) {  // tiles of nearly equal height
        const int64_t now = divide_up(rows, left);
        const Tile run = tiles(part < parts ? parts : 0)[now - 1];
        for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += width)
            run(p, panel, x, column, row, next + part * STEP_BYTES);
        x.at += now * x.stride;
        row += now;
        rows -= now;
    }
}

OPTKIT_INLINE bool by_pairs(const Panel& panel, int64_t rows) { return panel.pairs_fit && rows > BY_ANY_ROWS; }

}  // namespace

void linear_avx2(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    if (by_pairs(panel, rows)) return linear_pairs_avx2(p, panel, row, rows);
    rows_of_panel(p, panel, widened_rows(p, row, rows), row, rows);
}

void linear_panels_avx2(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows) {
    Pairs x{};  // widened when the first panel needs them
    thread_local GrowingMemory scratch;
    for (int64_t i = from; i < to; ++i) {
        const Panel panel = panel_of(p, i, rows, scratch);
        if (by_pairs(panel, rows)) {
            linear_pairs_avx2(p, panel, row, rows);
            continue;
        }
        if (!x.at) x = widened_rows(p, row, rows);
        rows_of_panel(p, panel, x, row, rows);
    }
}

}  // namespace optkit

#endif
