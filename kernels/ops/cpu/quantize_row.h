// Dynamic quantization of one row of activations; reference.quantize_per_token is the spec, to the bit.
//
// One source for all instruction sets: plain loops that the compiler vectorizes for whichever function they are
// inlined into.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "dispatch.h"

namespace optkit {

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

// Adding 1.5 * 2^23 + 128 rounds to an integer, half to even, and leaves `round(v) + 128` in the low byte. With
// `any_range`, NaN and what overflowed become 0.
template <bool any_range>
OPTKIT_INLINE void round_group(const float* x, int64_t n, float inverse, uint8_t* q) {
    for (int64_t i = 0; i < n; ++i) {
        const float value = x[i] * inverse;
        const int32_t rounded = to_bits(value + 12583040.0f) & 255;
        q[i] = !any_range || (value >= -128.0f && value <= 127.5f) ? rounded : 0;
    }
}

// quantize_group with the largest |x| given. Numbers overflow only in a group whose scale is NaN, infinite or below 2^-126;
// in all others each is -127 to 127.
OPTKIT_INLINE void quantize_by(const float* x, int64_t n, float most, uint8_t* q, float* scale) {
    constexpr float MOST = std::numeric_limits<float>::max();
    const float inverse = most > 0 ? 1.0f / most * 127.0f : 0.0f;
    if (most <= MOST && inverse <= MOST)
        round_group<false>(x, n, inverse, q);
    else
        round_group<true>(x, n, inverse, q);
    *scale = most / 127.0f;
}

OPTKIT_INLINE void quantize_group(const float* x, int64_t n, uint8_t* q, float* scale) {
    quantize_by(x, n, largest(x, n), q, scale);
}

// q [columns] and scale [columns / group] of x [columns]. Short groups get a constant length, which unrolls them.
OPTKIT_INLINE void quantize_row(const float* x, int64_t columns, int64_t group, uint8_t* q, float* scale) {
    if (group == 32)
        for (int64_t i = 0; i < columns; i += 32) quantize_group(x + i, 32, q + i, scale++);
    else
        for (int64_t i = 0; i < columns; i += group) quantize_group(x + i, group, q + i, scale++);
}

}  // namespace optkit
