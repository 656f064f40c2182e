// The integers of AVX-VNNI; see simd_int8.h, which includes this file.
#pragma once

#include "simd_int8.h"

#ifdef OPTKIT_AVX_VNNI

namespace optkit {

#define OP static OPTKIT_AVX_VNNI OPTKIT_INLINE
// AVX2's registers with the numbers and the products of VNNI.
struct Int8AvxVnni {
    // Not __m256i, which is 64-bit lanes to GCC: it would copy an accumulator in every step, and run out of registers.
    typedef std::int32_t Lanes __attribute__((vector_size(32)));
    struct Ints {
        Lanes lo, hi;
    };
    static constexpr std::int32_t key_zero = 128, value_zero = 0;
    static constexpr int weight_words = 1;

    template <Bytes bytes, int half>
    struct Dot {
        using Column = Ints;
        using Row = __m256i;
        using Rows = Ints;
        OP Column column(const void* p) { return load(p); }
        OP Row row(std::uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
        OP Rows rows(const void* p) { return load(p); }
        OP Ints add(Ints acc, Row row, Column column) { return add(acc, Rows{(Lanes)row, (Lanes)row}, column); }
        OP Ints add(Ints acc, Rows rows, Column column) {
            return {add(acc.lo, (Row)rows.lo, (__m256i)column.lo), add(acc.hi, (Row)rows.hi, (__m256i)column.hi)};
        }

      private:
        OP Lanes add(Lanes acc, Row row, __m256i column) {
            return bytes == Bytes::keys ? (Lanes)_mm256_dpbusd_avx_epi32((__m256i)acc, column, row)
                                        : (Lanes)_mm256_dpbusd_avx_epi32((__m256i)acc, row, column);
        }
    };

    OP Ints load(const void* p) { return of(Int8Avx2::load(p)); }
    OP void store(void* p, Ints a) { Int8Avx2::store(p, {(__m256i)a.lo, (__m256i)a.hi}); }
    OP Ints all(std::int32_t x) { return of(Int8Avx2::all(x)); }
    OP Ints add(Ints a, Ints b) { return {a.lo + b.lo, a.hi + b.hi}; }
    OP Ints between_halves(Ints a) { return {a.lo << 8, a.hi << 8}; }
    OP Ints flip_signs(Ints a) {
        const std::int32_t signs = static_cast<std::int32_t>(0x80808080);
        return {a.lo ^ signs, a.hi ^ signs};
    }
    OP Avx2::Vec floats(Ints a) { return {_mm256_cvtepi32_ps((__m256i)a.lo), _mm256_cvtepi32_ps((__m256i)a.hi)}; }
    OP Ints rounded(Avx2::Vec a) { return of(Int8Avx2::rounded(a)); }
    // As in Int8Avx512: both halves are signed.
    OP void store_query(void* first, void* second, Ints a) {
        const Ints bytes = {(a.lo + 0x8080) ^ 0x8080, (a.hi + 0x8080) ^ 0x8080};
        _mm_storeu_si128(static_cast<__m128i*>(first), narrowed({bytes.lo >> 8, bytes.hi >> 8}));
        _mm_storeu_si128(static_cast<__m128i*>(second), narrowed(bytes));
    }
    OP void store_weights(void* first, void*, Ints a) { _mm_storeu_si128(static_cast<__m128i*>(first), narrowed(a)); }
    OP Ints interleave(const char* const* rows, int column) { return of(Int8Avx2::interleave(rows, column)); }
    OP void interleave_64(const char* const* rows, int column, std::uint32_t* to) {
        Int8Avx2::interleave_64(rows, column, to);
    }

  private:
    OP Ints of(Int8Avx2::Ints a) { return {(Lanes)a.lo, (Lanes)a.hi}; }
    // The low byte of each of 16 lanes.
    OP __m128i narrowed(Ints a) {
        const __m256i order =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12));
        const __m256i low = _mm256_shuffle_epi8((__m256i)a.lo, order), high = _mm256_shuffle_epi8((__m256i)a.hi, order);
        const __m256i words = _mm256_blend_epi32(low, high, 0xaa);  // of lanes 0, 8, ., ., 4, 12, ., .
        return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0)));
    }
};
#undef OP

}  // namespace optkit

#endif
