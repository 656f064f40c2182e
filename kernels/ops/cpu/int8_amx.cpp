// int8 linear layers with AMX, for many rows; see int8.cpp for the layout and the arithmetic.
//
// A panel is what tdpbusd wants of weights: 4 input channels of an output channel are neighbours. So a tile of weights, 64
// input channels x 16 output channels, is 16 steps of half a panel, and the packed weight is that of AVX512-VNNI. 32 rows x
// one panel are 4 tiles of sums, 2 of activations and 2 of weights: 4 products for 4 loads.
//
// After each group the sums go to memory, where AVX-512 adds them to the float sums. A group of 32 channels would fill
// half a tile, and be followed by as much as a full one: such layers, and few rows, stay with AVX512-VNNI.
#include <array>
#include <cstring>

#include "amx_tiles.h"
#include "vnni_tile.h"

#ifdef OPTKIT_AMX

namespace optkit {
namespace {

constexpr int64_t FEWEST_ROWS = 16;
constexpr int64_t TILE_STEPS = TILE_BYTES / STEP;  // of weights, in a tile
constexpr int64_t ROWS = TILES_ROWS;

// Up to 32 rows x one panel.
struct Block {
    alignas(64) int32_t products[ROWS][PANEL];  // of a group
    alignas(64) float sums[ROWS][PANEL];
    alignas(64) uint8_t q[ROWS][TILE_BYTES];             // the last channels, where they fill no tile,
    alignas(64) int8_t weight[TILE_STEPS * STEP_BYTES];  // padded with zeros
};

// Add the products of 16 steps. With TWO there are more than 16 rows.
template <bool TWO>
OPTKIT_AMX OPTKIT_INLINE void multiply(const uint8_t* q, int64_t stride, const int8_t* w) {
    _tile_loadd(6, w, STEP_BYTES);
    _tile_loadd(4, q, stride);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, w + TILE_BYTES, STEP_BYTES);
    _tile_dpbusd(1, 4, 7);
    if constexpr (TWO) {
        _tile_loadd(5, q + TILE_ROWS * stride, stride);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
}

// The steps past the last whole tile.
template <bool TWO>
OPTKIT_AMX void multiply_rest(const uint8_t* q, int64_t stride, int64_t rows, const int8_t* w, int64_t steps, Block& b) {
    std::memset(b.q, 0, sizeof b.q);
    std::memset(b.weight, 0, sizeof b.weight);
    for (int64_t r = 0; r < rows; ++r) std::memcpy(b.q[r], q + r * stride, steps * STEP);
    std::memcpy(b.weight, w, steps * STEP_BYTES);
    tiles_and_memory_agree();
    multiply<TWO>(b.q[0], TILE_BYTES, b.weight);
}

// One group's products of activations and weights, [rows][PANEL].
template <bool TWO>
OPTKIT_AMX OPTKIT_INLINE void multiply_group(const uint8_t* q, int64_t stride, int64_t rows, const int8_t* w,
                                             int64_t steps, Block& b) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) _tile_zero(2);
    if constexpr (TWO) _tile_zero(3);
    for (; steps >= TILE_STEPS; steps -= TILE_STEPS, q += TILE_BYTES, w += TILE_STEPS * STEP_BYTES)
        multiply<TWO>(q, stride, w);
    if (steps) multiply_rest<TWO>(q, stride, rows, w, steps, b);
    constexpr int64_t bytes = sizeof b.products[0];
    _tile_stored(0, b.products[0], bytes);
    _tile_stored(1, b.products[0] + TILE_ROWS, bytes);
    if constexpr (TWO) _tile_stored(2, b.products[TILE_ROWS], bytes);
    if constexpr (TWO) _tile_stored(3, b.products[TILE_ROWS] + TILE_ROWS, bytes);
}

// What group g adds to the sums of the block's row r, the layer's row `row`; after the last group they are the output.
OPTKIT_AMX OPTKIT_INLINE void add_group(const Linear& p, const Panel& panel, int64_t g, int64_t row, int64_t r, Block& b) {
    const int64_t column = g * PANEL, at = row * p.groups + g;
    const int32_t* offset = panel.offset + column;
    Accumulators<1> a;
    a.v[0][0] = load(b.products[r]) + load(offset);
    a.v[0][1] = load(b.products[r] + 16) + load(offset + 16);
    Sums<1> sum{};
    if (g > 0) sum.v[0][0] = load(b.sums[r]), sum.v[0][1] = load(b.sums[r] + 16);
    add_scaled<1>(sum, a, p.scale + at, p.groups, scales<0>(panel, g), scales<1>(panel, g));
    if (panel.minimum) {
        const float* minimum = panel.minimum + column;
        add_minimums<1>(sum, p.sums + at, p.groups, load(minimum), load(minimum + 16));
    }
    if (g + 1 == p.groups) return store<1>(sum, p, panel.first, row);
    _mm512_storeu_ps(b.sums[r], sum.v[0][0]);
    _mm512_storeu_ps(b.sums[r] + 16, sum.v[0][1]);
}

template <bool TWO>
OPTKIT_AMX void block_of(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    Block b;
    const uint8_t* q = p.q + row * p.q_stride;
    const int8_t* w = panel.weight;
    configure_tiles(rows);
    for (int64_t g = 0; g < p.groups; ++g, q += p.group_steps * STEP, w += p.group_steps * STEP_BYTES) {
        multiply_group<TWO>(q, p.q_stride, rows, w, p.group_steps, b);
        for (int64_t r = 0; r < rows; ++r) add_group(p, panel, g, row + r, r, b);
    }
}

}  // namespace

OPTKIT_AMX void linear_amx(const Linear& p, const Panel& panel, int64_t row, int64_t rows) {
    const bool whole_tiles = p.groups == 1 || p.group_steps % TILE_STEPS == 0;
    if (!whole_tiles || rows < FEWEST_ROWS) return linear_avx512(p, panel, row, rows);
    for (; rows > 0; row += ROWS, rows -= ROWS) {
        const int64_t now = std::min(rows, ROWS);
        now > TILE_ROWS ? block_of<true>(p, panel, row, now) : block_of<false>(p, panel, row, now);
    }
    _tile_release();
}

}  // namespace optkit

#endif
