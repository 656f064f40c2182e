// int4 linear layers with AVX-VNNI; see int4_ymm.h for the tiles.
//
// vpdpbusd multiplies codes, the u8, by activations less their zero point, the s8, and adds 4 products to an int32: one
// instruction for 32 products, and nothing to widen.
//
// Written without a CPU that has the instructions: the tests run the kernel emulated, its speed was not measured.
#include <array>
#include <utility>

#include "int4.h"
#include "ymm_tile.h"

#ifdef OPTKIT_AVX_VNNI

namespace optkit {
namespace {

#define OP static OPTKIT_AVX_VNNI OPTKIT_INLINE
struct D {
    static constexpr int64_t rows = 6, steps = 0;  // 12 accumulators, 2 registers of codes and 4 bytes of a row

    OP Lanes add(Lanes sum, __m256i codes, __m256i x) {
        return (Lanes)_mm256_dpbusd_avx_epi32((__m256i)sum, codes, x);
    }
    OP Lanes add_two(Lanes sum, __m256i c, __m256i x, __m256i d, __m256i y) { return add(add(sum, c, x), d, y); }
    OP Lanes whole(Lanes sum) { return sum; }
};
#undef OP

#define OPTKIT_TARGET OPTKIT_AVX_VNNI
#include "int4_ymm.h"
#undef OPTKIT_TARGET

}  // namespace

void linear_w4a8_avx_vnni(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                          int64_t first, int64_t row, int64_t rows) {
    few_rows_of_panel(p, start, records, layout, first, row, rows);
}

void linear_codes_avx_vnni(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows) {
    many_rows_of_panel(p, start, panel, row, rows);
}

}  // namespace optkit

#endif
