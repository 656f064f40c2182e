// What the kernels on AMX tiles share: the configuration of the tile registers, and rounding to bfloat16.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "dispatch.h"

#ifdef OPTKIT_AMX

namespace optkit {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;  // of a tile register
constexpr int64_t TILES_ROWS = 2 * TILE_ROWS;       // rows of activations that the tile registers hold

// The operand of LDTILECFG (Intel SDM, volume 1, chapter 18).
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row, by tile
    uint8_t rows[16];
};

// For `rows` rows, up to 32. Tiles 0 and 1 are sums of the first 16 rows, 2 and 3 of the others, 4 and 5 are the
// activations of these rows, 6 and 7 the weights.
constexpr TileConfig config_of(int64_t rows) {
    TileConfig config{};
    config.palette = 1;
    const int64_t upper = std::min(rows, TILE_ROWS);
    const int64_t of_tile[8] = {upper, upper, rows - upper, rows - upper, upper, rows - upper, TILE_ROWS, TILE_ROWS};
    for (int t = 0; t < 8; ++t) {
        config.rows[t] = static_cast<uint8_t>(of_tile[t]);
        config.bytes[t] = of_tile[t] ? TILE_BYTES : 0;
    }
    return config;
}

constexpr std::array<TileConfig, TILES_ROWS> all_configs() {
    std::array<TileConfig, TILES_ROWS> configs{};
    for (int64_t rows = 1; rows <= TILES_ROWS; ++rows) configs[rows - 1] = config_of(rows);
    return configs;
}

constexpr std::array<TileConfig, TILES_ROWS> TILE_CONFIGS = all_configs();  // by rows - 1

// Between writes of memory and tile loads of it, in both orders: gcc's tile loads do not say that they read memory. (Its
// tile stores say that they write it.)
OPTKIT_INLINE void tiles_and_memory_agree() { __asm__ volatile("" : : : "memory"); }

// For the next tiles to be loaded and stored, from memory that was written before.
OPTKIT_AMX OPTKIT_INLINE void configure_tiles(int64_t rows) {
    tiles_and_memory_agree();
    _tile_loadconfig(&TILE_CONFIGS[rows - 1]);
}

// 32 floats as bfloat16, rounded to the nearest, ties to even: `lower` comes first.
OPTKIT_AMX OPTKIT_INLINE __m512i to_bf16(__m512 upper, __m512 lower) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(upper, lower));
}

// The next 32 floats of x as bfloat16; zeros from the `left`-th on.
OPTKIT_AMX OPTKIT_INLINE void round_32(const float* x, int64_t left, uint16_t* to) {
    const auto mask = [&](int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); };
    touch(x, std::min<int64_t>(left, 32) * 4);
    const __m512 lower = _mm512_maskz_loadu_ps(mask(left), x), upper = _mm512_maskz_loadu_ps(mask(left - 16), x + 16);
    _mm512_storeu_si512(to, to_bf16(upper, lower));
}

}  // namespace
}  // namespace optkit

#endif
