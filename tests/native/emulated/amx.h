// AMX; see intrinsics.h. What the CPU answers with an exception ends the process: a tile that is not configured, a
// configuration that is not valid, shapes that do not fit each other.
#pragma once

namespace emulated {

constexpr int TILES = 8, TILE_ROWS = 16, TILE_BYTES = 64;

// The 64 bytes of LDTILECFG.
struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row, by tile
    uint8_t rows[16];
};

struct TileState {
    bool configured;
    TileConfig config;
    uint8_t data[TILES][TILE_ROWS][TILE_BYTES];
};

inline thread_local TileState tiles{};

inline void fault_unless(bool valid, const char* what) {
    if (valid) return;
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
}

inline void load_config(const void* from) {
    TileConfig config;
    std::memcpy(&config, from, sizeof config);
    fault_unless(config.palette == 1, "the palette is not 1");
    fault_unless(config.start_row == 0, "the start row is not 0");
    for (const uint8_t byte : config.reserved) fault_unless(byte == 0, "a reserved byte is not 0");
    for (int t = 0; t < 16; ++t) {
        fault_unless(t < TILES || (!config.rows[t] && !config.bytes[t]), "there is no such tile");
        fault_unless(config.rows[t] <= TILE_ROWS && config.bytes[t] <= TILE_BYTES, "a tile is too large");
        fault_unless(!config.rows[t] == !config.bytes[t], "a tile has rows or columns, not both");
    }
    std::memset(&tiles, 0, sizeof tiles);
    tiles.configured = true, tiles.config = config;
}

inline void release() { std::memset(&tiles, 0, sizeof tiles); }

inline int rows_of(int t) {
    fault_unless(tiles.configured, "no tiles are configured");
    fault_unless(t >= 0 && t < TILES && tiles.config.rows[t], "the tile is not configured");
    return tiles.config.rows[t];
}

inline int bytes_of(int t) { return rows_of(t) ? tiles.config.bytes[t] : 0; }

inline void zero(int t) {
    rows_of(t);
    std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
}

inline void load_tile(int t, const void* base, int64_t stride) {
    const int rows = rows_of(t), bytes = bytes_of(t);
    std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
    for (int r = 0; r < rows; ++r) std::memcpy(tiles.data[t][r], static_cast<const char*>(base) + r * stride, bytes);
}

inline void store_tile(int t, void* base, int64_t stride) {
    const int rows = rows_of(t), bytes = bytes_of(t);
    for (int r = 0; r < rows; ++r) std::memcpy(static_cast<char*>(base) + r * stride, tiles.data[t][r], bytes);
}

inline void check_operands(int sum, int a, int b) {
    fault_unless(sum != a && sum != b && a != b, "two operands are one tile");
    fault_unless(rows_of(sum) == rows_of(a) && bytes_of(sum) == bytes_of(b), "the sums have another shape");
    fault_unless(bytes_of(a) == 4 * rows_of(b) && bytes_of(sum) % 4 == 0, "the operands have another depth");
}

// TDPBUSD: sums [M][N] of int32 += a [M][4 K] of u8 times b [K][4 N] of s8, of which 4 bytes are 4 rows of a column.
template <class Value>
void dot_tiles(int sum, int a, int b, Value of_a) {
    check_operands(sum, a, b);
    for (int m = 0; m < rows_of(sum); ++m)
        for (int n = 0; n < bytes_of(sum) / 4; ++n) {
            uint32_t total;
            std::memcpy(&total, tiles.data[sum][m] + 4 * n, sizeof total);
            for (int k = 0; k < bytes_of(a); ++k)
                total += static_cast<uint32_t>(of_a(tiles.data[a][m][k]) * static_cast<int8_t>(tiles.data[b][k / 4][4 * n + k % 4]));
            std::memcpy(tiles.data[sum][m] + 4 * n, &total, sizeof total);
        }
}

// TDPBSSD: the same of signed bytes on both sides.
inline void dot_signed_tiles(int sum, int a, int b) {
    dot_tiles(sum, a, b, [](uint8_t byte) { return static_cast<int>(static_cast<int8_t>(byte)); });
}

inline void dot_unsigned_tiles(int sum, int a, int b) {
    dot_tiles(sum, a, b, [](uint8_t byte) { return static_cast<int>(byte); });
}

inline float at_bf16(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    const uint32_t bits = (half & 0x7f80) ? uint32_t{half} << 16 : uint32_t{half} << 16 & 0x80000000u;  // denormals are zero
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// TDPBF16PS: sums [M][N] of float += a [M][2 K] times b [K][2 N] of bfloat16, of which 2 are 2 rows of a column. Products of even
// and of odd rows are summed apart, from zero, with fused multiply-adds; then their sum is added.
inline void dot_bf16_tiles(int sum, int a, int b) {
    check_operands(sum, a, b);
    for (int m = 0; m < rows_of(sum); ++m)
        for (int n = 0; n < bytes_of(sum) / 4; ++n) {
            float parts[2] = {};
            for (int k = 0; k < rows_of(b); ++k)
                for (int i = 0; i < 2; ++i)
                    parts[i] = flushed(std::fma(at_bf16(tiles.data[a][m] + 4 * k + 2 * i),
                                                at_bf16(tiles.data[b][k] + 4 * n + 2 * i), parts[i]));
            float total;
            std::memcpy(&total, tiles.data[sum][m] + 4 * n, sizeof total);
            total = flushed(flushed(total) + flushed(parts[0] + parts[1]));
            std::memcpy(tiles.data[sum][m] + 4 * n, &total, sizeof total);
        }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#undef _tile_stream_loadd
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load_tile
#define _tile_stored emulated::store_tile
#define _tile_dpbusd emulated::dot_unsigned_tiles
#define _tile_dpbssd emulated::dot_signed_tiles
#define _tile_dpbf16ps emulated::dot_bf16_tiles
#define _tile_stream_loadd emulated::load_tile
