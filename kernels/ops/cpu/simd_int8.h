// Sixteen lanes of four bytes, their dot products, and sixteen int32, once for each instruction set; beside simd.h.
//
// `Dot` adds the four products of each lane to an accumulator, modulo 2^32: of a row, four bytes for all lanes, and a
// column. One of them is unsigned, as the hardware has it. Sums are exact, so all variants give the same bits.
#pragma once

#include "simd.h"

namespace optkit {

#if OPTKIT_X86

// Sixteen bytes of each of four rows: word i of the result is byte i of the rows.
static OPTKIT_AVX2 OPTKIT_INLINE void transpose_bytes(const char* const* rows, int column, __m128i (&words)[4]) {
    __m128i row[4];
    for (int i = 0; i < 4; ++i) row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + column));
    const __m128i low01 = _mm_unpacklo_epi8(row[0], row[1]), low23 = _mm_unpacklo_epi8(row[2], row[3]);
    const __m128i high01 = _mm_unpackhi_epi8(row[0], row[1]), high23 = _mm_unpackhi_epi8(row[2], row[3]);
    words[0] = _mm_unpacklo_epi16(low01, low23);
    words[1] = _mm_unpackhi_epi16(low01, low23);
    words[2] = _mm_unpacklo_epi16(high01, high23);
    words[3] = _mm_unpackhi_epi16(high01, high23);
}

#define OP static OPTKIT_AVX512 OPTKIT_INLINE
struct Int8Avx512 {
    // Not __m512i, which is 64-bit lanes to GCC: it would copy an accumulator in every step.
    typedef std::int32_t Ints __attribute__((vector_size(64)));

    template <bool unsigned_columns>
    struct Dot {
        using Column = __m512i;
        using Row = __m512i;
        OP Column column(const void* p) { return _mm512_loadu_si512(p); }
        OP Row row(std::uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
        OP Ints add(Ints acc, Row row, Column column) {
            return unsigned_columns ? (Ints)_mm512_dpbusd_epi32((__m512i)acc, column, row)
                                    : (Ints)_mm512_dpbusd_epi32((__m512i)acc, row, column);
        }
    };

    OP Ints load(const void* p) { return (Ints)_mm512_loadu_si512(p); }
    OP void store(void* p, Ints a) { _mm512_storeu_si512(p, (__m512i)a); }
    OP Ints all(std::int32_t x) { return (Ints)_mm512_set1_epi32(x); }
    OP Ints add(Ints a, Ints b) { return a + b; }
    OP Ints times_256(Ints a) { return a << 8; }
    OP Ints flip_signs(Ints a) { return a ^ static_cast<std::int32_t>(0x80808080); }  // of all bytes
    OP __m512 floats(Ints a) { return _mm512_cvtepi32_ps((__m512i)a); }
    // Whole numbers of 16 bits, rounded: their high and their low bytes.
    OP void store_halves(std::uint8_t* high, std::uint8_t* low, __m512 a) {
        const __m512i n = _mm512_cvtps_epi32(a);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srli_epi32(n, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(n));
    }
    // Lane i: byte `column` + i of four rows.
    OP Ints interleave(const char* const* rows, int column) {
        __m128i words[4];
        transpose_bytes(rows, column, words);
        const __m256i low = _mm256_set_m128i(words[1], words[0]), high = _mm256_set_m128i(words[3], words[2]);
        return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    // The same for 64 bytes, into four vectors.
    OP void interleave_64(const char* const* rows, int column, std::uint32_t* to) {
        __m512i row[4], lane[4];
        for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(rows[i] + column);
        const __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]), low23 = _mm512_unpacklo_epi8(row[2], row[3]);
        const __m512i high01 = _mm512_unpackhi_epi8(row[0], row[1]), high23 = _mm512_unpackhi_epi8(row[2], row[3]);
        lane[0] = _mm512_unpacklo_epi16(low01, low23);  // of each 16 columns, the first four
        lane[1] = _mm512_unpackhi_epi16(low01, low23);
        lane[2] = _mm512_unpacklo_epi16(high01, high23);
        lane[3] = _mm512_unpackhi_epi16(high01, high23);
        const __m512i a = _mm512_shuffle_i32x4(lane[0], lane[1], 0x44), b = _mm512_shuffle_i32x4(lane[2], lane[3], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(lane[0], lane[1], 0xee), d = _mm512_shuffle_i32x4(lane[2], lane[3], 0xee);
        _mm512_storeu_si512(to, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(to + kLanes, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(to + 2 * kLanes, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(to + 3 * kLanes, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
};
#undef OP

#define OP static OPTKIT_AVX2 OPTKIT_INLINE
struct Int8Avx2 {
    struct Ints {
        __m256i lo, hi;
    };
    // AVX2 has no product of bytes that can't overflow: bytes become pairs of int16, the even ones and the odd ones.
    template <bool unsigned_columns>
    struct Dot {
        struct Column {
            Ints even, odd;
        };
        struct Row {
            __m256i even, odd;
        };
        OP Column column(const void* p) {
            const Ints a = load(p);
            return {{even<unsigned_columns>(a.lo), even<unsigned_columns>(a.hi)},
                    {odd<unsigned_columns>(a.lo), odd<unsigned_columns>(a.hi)}};
        }
        OP Row row(std::uint32_t word) {
            const __m256i a = _mm256_set1_epi32(static_cast<int>(word));
            return {even<!unsigned_columns>(a), odd<!unsigned_columns>(a)};
        }
        OP Ints add(Ints acc, Row row, Column column) {
            return {add(acc.lo, row, column.even.lo, column.odd.lo), add(acc.hi, row, column.even.hi, column.odd.hi)};
        }

      private:
        OP __m256i add(__m256i acc, Row row, __m256i even, __m256i odd) {
            const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(row.even, even), _mm256_madd_epi16(row.odd, odd));
            return _mm256_add_epi32(acc, sum);
        }
    };

    OP Ints load(const void* p) {
        const __m256i* at = static_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
    }
    OP void store(void* p, Ints a) {
        __m256i* at = static_cast<__m256i*>(p);
        _mm256_storeu_si256(at, a.lo);
        _mm256_storeu_si256(at + 1, a.hi);
    }
    OP Ints all(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    OP Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
    OP Ints times_256(Ints a) { return {_mm256_slli_epi32(a.lo, 8), _mm256_slli_epi32(a.hi, 8)}; }
    OP Ints flip_signs(Ints a) {
        const __m256i signs = _mm256_set1_epi8('\x80');
        return {_mm256_xor_si256(a.lo, signs), _mm256_xor_si256(a.hi, signs)};
    }
    OP Avx2::Vec floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
    OP void store_halves(std::uint8_t* high, std::uint8_t* low, Avx2::Vec a) {
        std::int32_t n[kLanes];
        store(n, {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)});
        for (int i = 0; i < kLanes; ++i) {
            high[i] = static_cast<std::uint8_t>(n[i] >> 8);
            low[i] = static_cast<std::uint8_t>(n[i]);
        }
    }
    OP Ints interleave(const char* const* rows, int column) {
        __m128i words[4];
        transpose_bytes(rows, column, words);
        return {_mm256_set_m128i(words[1], words[0]), _mm256_set_m128i(words[3], words[2])};
    }
    OP void interleave_64(const char* const* rows, int column, std::uint32_t* to) {
        for (int i = 0; i < 4 * kLanes; i += kLanes) store(to + i, interleave(rows, column + i));
    }

  private:
    template <bool is_unsigned>
    OP __m256i even(__m256i a) {
        if (is_unsigned) return _mm256_and_si256(a, _mm256_set1_epi16(0xff));
        return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8);
    }
    template <bool is_unsigned>
    OP __m256i odd(__m256i a) {
        return is_unsigned ? _mm256_srli_epi16(a, 8) : _mm256_srai_epi16(a, 8);
    }
};
#undef OP

#endif  // OPTKIT_X86

#define OP static OPTKIT_INLINE
struct Int8Portable {
    typedef std::int32_t Quad __attribute__((vector_size(16)));
    struct Ints {
        Quad q[4];
    };
    template <bool unsigned_columns>
    struct Dot {
        struct Column {
            Ints byte[4];
        };
        struct Row {
            std::int32_t byte[4];
        };
        OP Column column(const void* p) {
            const Ints a = load(p);
            Column b;
            for (int c = 0; c < 4; ++c)
                for (int i = 0; i < 4; ++i) {
                    const Quad at_top = a.q[i] << (24 - 8 * c);
                    b.byte[c].q[i] = unsigned_columns ? at_top >> 24 & 255 : at_top >> 24;
                }
            return b;
        }
        OP Row row(std::uint32_t word) {
            Row a;
            for (int c = 0; c < 4; ++c) {
                const std::uint32_t byte = word >> 8 * c & 255;
                a.byte[c] = unsigned_columns ? static_cast<std::int8_t>(byte) : static_cast<std::int32_t>(byte);
            }
            return a;
        }
        OP Ints add(Ints acc, Row row, Column column) {
            for (int c = 0; c < 4; ++c)
                for (int i = 0; i < 4; ++i) acc.q[i] += column.byte[c].q[i] * row.byte[c];
            return acc;
        }
    };

    OP Ints load(const void* p) {
        Ints a;
        std::memcpy(&a, p, sizeof a);
        return a;
    }
    OP void store(void* p, Ints a) { std::memcpy(p, &a, sizeof a); }
    OP Ints all(std::int32_t x) {
        const Quad q = {x, x, x, x};
        return {{q, q, q, q}};
    }
    OP Ints add(Ints a, Ints b) { return {{a.q[0] + b.q[0], a.q[1] + b.q[1], a.q[2] + b.q[2], a.q[3] + b.q[3]}}; }
    OP Ints flip_signs(Ints a) {
        for (auto& q : a.q) q ^= static_cast<std::int32_t>(0x80808080);
        return a;
    }
    OP Ints times_256(Ints a) { return {{a.q[0] << 8, a.q[1] << 8, a.q[2] << 8, a.q[3] << 8}}; }
    OP Portable::Vec floats(Ints a) {
        Portable::Vec f;
        for (int i = 0; i < 4; ++i) f.q[i] = __builtin_convertvector(a.q[i], Portable::Quad);
        return f;
    }
    OP void store_halves(std::uint8_t* high, std::uint8_t* low, Portable::Vec a) {
        float lane[kLanes];
        Portable::store(lane, Portable::round(a));
        for (int i = 0; i < kLanes; ++i) {
            const auto n = static_cast<std::uint32_t>(lane[i] > 0 ? lane[i] : 0);
            high[i] = static_cast<std::uint8_t>(n >> 8);
            low[i] = static_cast<std::uint8_t>(n);
        }
    }
    OP Ints interleave(const char* const* rows, int column) {
        char word[kLanes][4];
        for (int i = 0; i < kLanes; ++i)
            for (int c = 0; c < 4; ++c) word[i][c] = rows[c][column + i];
        return load(word);
    }
    OP void interleave_64(const char* const* rows, int column, std::uint32_t* to) {
        for (int i = 0; i < 4 * kLanes; i += kLanes) store(to + i, interleave(rows, column + i));
    }
};
#undef OP

}  // namespace optkit
