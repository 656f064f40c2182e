// Sixteen lanes of four bytes, their products with four numbers, and sixteen int32, once for each instruction set; beside
// simd.h.
//
// Columns are bytes of keys, with signed numbers of 16 bits, or of values, with weights from 0 to 255. Four signed numbers
// are two words, halves, as `store_query` makes them: where an instruction multiplies bytes their high and their low
// bytes, else numbers 0 and 2, and numbers 1 and 3. Four weights are `weight_words` words of `store_weights`: one of bytes,
// else the same two. `Dot` adds the products of a row, one word for all lanes, and a column of bytes to an accumulator,
// modulo 2^32: `between_halves` comes after the first half of signed numbers. `Rows` are sixteen rows, a word for each
// lane. Bytes get the zero point that makes them signed or unsigned as the instructions want them (`key_zero`,
// `value_zero`: 128 is unsigned), and callers undo it. Sums are exact, so all variants give the same bits.
#pragma once

#include "simd.h"

namespace optkit {

// The bytes of a column.
enum class Bytes { keys, values };

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
    static constexpr std::int32_t key_zero = 128, value_zero = 0;
    static constexpr int weight_words = 1;

    template <Bytes bytes, int half>
    struct Dot {
        using Column = __m512i;
        using Row = __m512i;
        using Rows = Row;
        OP Column column(const void* p) { return _mm512_loadu_si512(p); }
        OP Row row(std::uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
        OP Rows rows(const void* p) { return _mm512_loadu_si512(p); }
        OP Ints add(Ints acc, Row row, Column column) {
            return bytes == Bytes::keys ? (Ints)_mm512_dpbusd_epi32((__m512i)acc, column, row)
                                        : (Ints)_mm512_dpbusd_epi32((__m512i)acc, row, column);
        }
    };

    OP Ints load(const void* p) { return (Ints)_mm512_loadu_si512(p); }
    OP void store(void* p, Ints a) { _mm512_storeu_si512(p, (__m512i)a); }
    OP Ints all(std::int32_t x) { return (Ints)_mm512_set1_epi32(x); }
    OP Ints add(Ints a, Ints b) { return a + b; }
    OP Ints between_halves(Ints a) { return a << 8; }
    OP Ints flip_signs(Ints a) { return a ^ static_cast<std::int32_t>(0x80808080); }  // of all bytes
    OP __m512 floats(Ints a) { return _mm512_cvtepi32_ps((__m512i)a); }
    OP Ints rounded(__m512 a) { return (Ints)_mm512_cvtps_epi32(a); }
    // Both halves are signed: 256 high + low with low from -128 to 127.
    OP void store_query(void* first, void* second, Ints a) {
        const Ints bytes = (a + 0x8080) ^ 0x8080;
        _mm_storeu_si128(static_cast<__m128i*>(first), _mm512_cvtepi32_epi8((__m512i)(bytes >> 8)));
        _mm_storeu_si128(static_cast<__m128i*>(second), _mm512_cvtepi32_epi8((__m512i)bytes));
    }
    OP void store_weights(void* first, void*, Ints a) {
        _mm_storeu_si128(static_cast<__m128i*>(first), _mm512_cvtepi32_epi8((__m512i)a));
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
    static constexpr std::int32_t key_zero = 128, value_zero = 0;
    static constexpr int weight_words = 2;
    // AVX2 has no product of bytes that can't overflow: bytes become pairs of int16, like the numbers.
    template <Bytes bytes, int half>
    struct Dot {
        using Column = Ints;
        using Row = __m256i;
        using Rows = Ints;
        OP Column column(const void* p) {
            const Ints a = load(p);
            return {widened<bytes == Bytes::keys, half>(a.lo), widened<bytes == Bytes::keys, half>(a.hi)};
        }
        OP Row row(std::uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
        OP Rows rows(const void* p) { return load(p); }
        OP Ints add(Ints acc, Row row, Column column) { return add(acc, Rows{row, row}, column); }
        OP Ints add(Ints acc, Rows rows, Column column) {
            return {add(acc.lo, rows.lo, column.lo), add(acc.hi, rows.hi, column.hi)};
        }

      private:
        OP __m256i add(__m256i acc, Row row, __m256i column) {
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(row, column));
            asm("" : "+x"(acc));  // gcc would delay the sums and run out of registers
            return acc;
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
    OP Ints between_halves(Ints a) { return a; }
    OP Ints flip_signs(Ints a) {
        const __m256i signs = _mm256_set1_epi8('\x80');
        return {_mm256_xor_si256(a.lo, signs), _mm256_xor_si256(a.hi, signs)};
    }
    OP Avx2::Vec floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
    OP Ints rounded(Avx2::Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
    OP void store_weights(void* first, void* second, Ints a) { store_query(first, second, a); }
    OP void store_query(void* first, void* second, Ints a) {
        const __m256i order = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        const __m256i pairs = _mm256_shuffle_epi8(_mm256_packs_epi32(a.lo, a.hi), order);  // of lanes 0-3, 8-11; ...
        const __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
        _mm_storeu_si128(static_cast<__m128i*>(first), _mm_unpacklo_epi32(low, high));
        _mm_storeu_si128(static_cast<__m128i*>(second), _mm_unpackhi_epi32(low, high));
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
    // Bytes 0 and 2 (half 0) or 1 and 3 of each lane.
    template <bool is_unsigned, int half>
    OP __m256i widened(__m256i a) {
        if (is_unsigned) return half ? _mm256_srli_epi16(a, 8) : _mm256_and_si256(a, _mm256_set1_epi16(0xff));
        return _mm256_srai_epi16(half ? a : _mm256_slli_epi16(a, 8), 8);
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
    static constexpr std::int32_t key_zero = 128, value_zero = 0;
    static constexpr int weight_words = 2;
    template <Bytes bytes, int half>
    struct Dot {
        struct Column {
            Ints byte[2];
        };
        struct Row {
            std::int32_t number[2];
        };
        struct Rows {
            Ints number[2];
        };
        OP Column column(const void* p) {
            const Ints a = load(p);
            Column b;
            for (int c = 0; c < 2; ++c)
                for (int i = 0; i < 4; ++i) {
                    const Quad at_top = a.q[i] << (24 - 8 * (2 * c + half));
                    b.byte[c].q[i] = bytes == Bytes::keys ? at_top >> 24 & 255 : at_top >> 24;
                }
            return b;
        }
        OP Row row(std::uint32_t word) {
            return {{static_cast<std::int16_t>(word), static_cast<std::int16_t>(word >> 16)}};
        }
        OP Rows rows(const void* p) {
            Rows rows{{load(p), load(p)}};
            for (int i = 0; i < 4; ++i) {
                rows.number[0].q[i] = rows.number[0].q[i] << 16 >> 16;
                rows.number[1].q[i] >>= 16;
            }
            return rows;
        }
        OP Ints add(Ints acc, Row row, Column column) {
            for (int c = 0; c < 2; ++c)
                for (int i = 0; i < 4; ++i) acc.q[i] += column.byte[c].q[i] * row.number[c];
            return acc;
        }
        OP Ints add(Ints acc, Rows rows, Column column) {
            for (int c = 0; c < 2; ++c)
                for (int i = 0; i < 4; ++i) acc.q[i] += column.byte[c].q[i] * rows.number[c].q[i];
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
    OP Ints between_halves(Ints a) { return a; }
    OP Portable::Vec floats(Ints a) {
        Portable::Vec f;
        for (int i = 0; i < 4; ++i) f.q[i] = __builtin_convertvector(a.q[i], Portable::Quad);
        return f;
    }
    OP Ints rounded(Portable::Vec a) {
        a = Portable::round(a);
        Ints n;
        for (int i = 0; i < 4; ++i)
            for (int lane = 0; lane < 4; ++lane) {
                const float x = a.q[i][lane];
                n.q[i][lane] = x >= -32768.0f && x <= 32767.0f ? static_cast<std::int32_t>(x) : 0;
            }
        return n;
    }
    OP void store_weights(void* first, void* second, Ints a) { store_query(first, second, a); }
    OP void store_query(void* first, void* second, Ints a) {
        std::int16_t pairs[2][kLanes / 2];
        for (int i = 0; i < kLanes; ++i) pairs[i % 2][i / 2] = static_cast<std::int16_t>(a.q[i / 4][i % 4]);
        std::memcpy(first, pairs[0], sizeof pairs[0]);
        std::memcpy(second, pairs[1], sizeof pairs[1]);
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

#include "simd_int8_avx_vnni.h"
#include "simd_neon.h"
