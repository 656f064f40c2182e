// Wrong uses of tiles, one by name, each of which must end the process; and a product of odd sizes against plain loops.
#include "intrinsics.h"

#include <string>

namespace {

constexpr int M = 5, N = 7, K = 12;  // sums [M][N], products over K bytes

emulated::TileConfig sound() {
    emulated::TileConfig config{};
    config.palette = 1;
    config.rows[0] = M, config.bytes[0] = 4 * N;
    config.rows[1] = M, config.bytes[1] = K;
    config.rows[2] = K / 4, config.bytes[2] = 4 * N;
    return config;
}

// The product is that of the definition, on top of the sums before.
int multiply() {
    uint8_t a[M][K];
    int8_t b[K][N], packed[K / 4][4 * N];
    int32_t sums[M][N], expected[M][N];
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k) a[m][k] = static_cast<uint8_t>(255 - 17 * m - 23 * k);
    for (int k = 0; k < K; ++k)
        for (int n = 0; n < N; ++n) packed[k / 4][4 * n + k % 4] = b[k][n] = static_cast<int8_t>(-128 + 37 * k + 11 * n);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            sums[m][n] = expected[m][n] = 1000 * m - n;
            for (int k = 0; k < K; ++k) expected[m][n] += a[m][k] * b[k][n];
        }
    const emulated::TileConfig config = sound();
    _tile_loadconfig(&config);
    _tile_loadd(0, sums, sizeof sums[0]);
    _tile_loadd(1, a, sizeof a[0]);
    _tile_loadd(2, packed, sizeof packed[0]);
    _tile_dpbusd(0, 1, 2);
    _tile_stored(0, sums, sizeof sums[0]);
    _tile_release();
    return std::memcmp(sums, expected, sizeof sums) != 0;
}

}  // namespace

int main(int, char** arguments) {
    const std::string fault = arguments[1];
    if (fault == "none") return multiply();
    emulated::TileConfig config = sound();
    if (fault == "palette") config.palette = 2;
    if (fault == "start row") config.start_row = 1;
    if (fault == "reserved") config.reserved[13] = 1;
    if (fault == "rows") config.rows[0] = 17;
    if (fault == "columns") config.bytes[0] = 68;
    if (fault == "no tile") config.rows[8] = 1, config.bytes[8] = 4;
    if (fault == "depth") config.bytes[1] = K - 4;
    if (fault != "not configured") _tile_loadconfig(&config);
    if (fault == "released") _tile_release();
    _tile_zero(0);
    _tile_dpbusd(0, 1, fault == "same tile" ? 1 : 2);
}
