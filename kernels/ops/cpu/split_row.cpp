// Splitting rows of float activations for each instruction set; see split_row.h.
#include "split_row.h"

#include "dispatch.h"

namespace optkit {
namespace {

OPTKIT_INLINE void split_values(const float* x, const Split& s, uint8_t* high, uint8_t* low, float* high_scale,
                                float* low_scale) {
    for (int64_t start = 0; start < s.columns; start += s.group) {
        const float most = largest(x + start, s.group);
        const float inverse = most > 0 ? 1.0f / most * SPLIT_MOST : 0.0f;
        for (int64_t i = start; i < start + s.group; ++i) {
            // adding 1.5 * 2^23 leaves the integer in the low bits
            const int32_t r = to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000;
            const int32_t upper = (r + 128) >> 8;
            high[i] = static_cast<uint8_t>(upper + 128);
            low[i] = static_cast<uint8_t>(r - upper * 256 + 128);
        }
        *low_scale = most / SPLIT_MOST;
        *high_scale++ = 256.0f * *low_scale++;
    }
    std::memset(high + s.columns, 128, s.padded - s.columns);
    std::memset(low + s.columns, 128, s.padded - s.columns);
}

OPTKIT_INLINE void split(const Split& s, int64_t row, int64_t count) {
    thread_local GrowingMemory scratch;
    const int64_t groups = s.columns / s.group;
    for (int64_t m = row; m < row + count; ++m) {
        const float* x = s.x + m * s.x_stride;
        if (s.order) {
            auto* ordered = scratch.at_least<float>(s.columns);
            for (int64_t i = 0; i < s.columns; ++i) ordered[i] = x[s.order[i]];
            x = ordered;
        }
        uint8_t* q = s.q + 2 * m * s.padded;
        float* scale = s.scale + 2 * m * groups;
        split_values(x, s, q, q + s.padded, scale, scale + groups);
    }
}

void split_portable(const Split& s, int64_t row, int64_t count) { split(s, row, count); }
#if OPTKIT_X86
OPTKIT_AVX2 void split_avx2(const Split& s, int64_t row, int64_t count) { split(s, row, count); }
OPTKIT_AVX512 void split_avx512(const Split& s, int64_t row, int64_t count) { split(s, row, count); }
#endif

}  // namespace

void split_rows(const Split& s, int64_t row, int64_t count) {
#if OPTKIT_X86
    if (base_isa() == Isa::avx512_vnni) return split_avx512(s, row, count);
    if (base_isa() == Isa::avx2) return split_avx2(s, row, count);
#endif
    split_portable(s, row, count);
}

}  // namespace optkit
