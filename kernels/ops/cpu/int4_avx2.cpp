// int4 linear layers with AVX2; see int4_ymm.h for the tiles.
//
// vpmaddubsw adds two products of a u8 and an s8 in 16 bits. With int8 weights that saturates; with codes up to 15 it
// can't (2 * 15 * 128), and even the sums of 8 steps fit (8 * 3840 = 30720). So products are added in 16 bits for
// 8 steps, the usual group, and only then widened: for 32 products one vpmaddubsw, one vpaddw and an eighth of a
// vpmaddwd, about half of what int8 weights take (int8_avx2.cpp).
#include <array>
#include <utility>

#include "int4.h"
#include "ymm_tile.h"

#if OPTKIT_X86

namespace optkit {
namespace {

#define OP static OPTKIT_AVX2 OPTKIT_INLINE
struct D {
    static constexpr int64_t rows = 4, steps = 8;

    OP Lanes add(Lanes sum, __m256i codes, __m256i x) {
        __m256i narrow = _mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(codes, x));
        asm("" : "+x"(narrow));  // gcc would add products first, for which registers are missing
        return (Lanes)narrow;
    }
    OP Lanes add_two(Lanes sum, __m256i c, __m256i x, __m256i d, __m256i y) {
        const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(c, x), _mm256_maddubs_epi16(d, y));
        return (Lanes)_mm256_add_epi16((__m256i)sum, products);
    }
    OP Lanes whole(Lanes sum) { return (Lanes)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
};
#undef OP

#define OPTKIT_TARGET OPTKIT_AVX2
#include "int4_ymm.h"
#undef OPTKIT_TARGET

// Two steps of a panel, two codes to a byte.
OPTKIT_AVX2 OPTKIT_INLINE void unpack_two_steps(const uint8_t* codes, int8_t* weight) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int64_t i = 0; i < STEP_BYTES; i += 32) {
        const __m256i both = (__m256i)load(codes + i);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + i), _mm256_and_si256(both, mask));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + STEP_BYTES + i),
                            _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    }
}

}  // namespace

OPTKIT_AVX2 void unpack_avx2(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) {
    const RecordLayout& layout = p.layout;
    int8_t* weight = to.weight;
    for (int64_t g = 0; g < p.groups; ++g, records += layout.size(p.group_steps)) {
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
            const __m256 scales = widened(records, layout.half, c);
            _mm256_storeu_ps(to.scale + g * PANEL + c, scales);
            if (layout.minimum())
                _mm256_storeu_ps(to.minimum + g * PANEL + c, minimums(records, layout, scales, c));
        }
        const uint8_t* codes = records + layout.codes();
        for (int64_t s = 0; s < p.group_steps; s += 2, codes += STEP_BYTES, weight += 2 * STEP_BYTES)
            unpack_two_steps(codes, weight);
    }
}

void linear_w4a8_avx2(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout, int64_t first,
                      int64_t row, int64_t rows) {
    few_rows_of_panel(p, start, records, layout, first, row, rows);
}

void linear_codes_avx2(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows) {
    many_rows_of_panel(p, start, panel, row, rows);
}

}  // namespace optkit

#endif
