// Dynamic quantization of activations; reference.quantize_per_token is the spec, to the bit.
//
// One source for all instruction sets: plain loops that the compiler vectorizes for each.
#include <cstdint>
#include <cstring>

#include "dispatch.h"

namespace {

struct Rows {
    const float* x;      // [rows][stride]
    int64_t stride;      // in floats
    uint8_t* q;          // [rows][columns]
    float* scale;        // [rows][columns / group]
    int64_t columns;
    int64_t group;
};

OPTKIT_INLINE float from_bits(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

OPTKIT_INLINE int32_t to_bits(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The largest |x|. Compared as integers, which orders non-negative floats and puts NaN on top, so that it wins.
OPTKIT_INLINE float largest(const float* x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = to_bits(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return from_bits(most);
}

// Adding 1.5 * 2^23 + 128 rounds to an integer, half to even, and leaves `round(v) + 128` in the low byte. NaN and
// what overflowed (the group's scale is then NaN, infinite or below 2^-126) become 0.
OPTKIT_INLINE void quantize_group(const float* x, int64_t n, uint8_t* q, float* scale) {
    const float most = largest(x, n);
    const float inverse = most > 0 ? 1.0f / most * 127.0f : 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        const float value = x[i] * inverse;
        const int32_t rounded = to_bits(value + 12583040.0f) & 255;
        q[i] = value >= -128.0f && value <= 127.5f ? rounded : 0;
    }
    *scale = most / 127.0f;
}

OPTKIT_INLINE void quantize_row(const Rows& p, int64_t row) {
    const float* x = p.x + row * p.stride;
    const int64_t groups = p.columns / p.group;
    for (int64_t g = 0; g < groups; ++g)
        quantize_group(x + g * p.group, p.group, p.q + row * p.columns + g * p.group, p.scale + row * groups + g);
}

void quantize_portable(const Rows& p, int64_t row) { quantize_row(p, row); }
#if OPTKIT_X86
OPTKIT_AVX2 void quantize_avx2(const Rows& p, int64_t row) { quantize_row(p, row); }
OPTKIT_AVX512 void quantize_avx512(const Rows& p, int64_t row) { quantize_row(p, row); }
#endif

using Variant = void (*)(const Rows&, int64_t);

Variant variant() {
#if OPTKIT_X86
    if (optkit::isa() == optkit::Isa::avx512_vnni) return quantize_avx512;
    if (optkit::isa() == optkit::Isa::avx2) return quantize_avx2;
#endif
    return quantize_portable;
}

}  // namespace

// q [rows, columns] and scale [rows, columns / group] of x, whose rows are `stride` floats apart.
OPTKIT_API void optkit_quantize_per_token(const float* x, int64_t stride, uint8_t* q, float* scale, int64_t rows,
                                          int64_t columns, int64_t group, int threads) {
    const Rows p{x, stride, q, scale, columns, group};
    const Variant quantize = variant();
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1 && rows * columns >= 1 << 15)
    for (int64_t row = 0; row < rows; ++row) quantize(p, row);
}
