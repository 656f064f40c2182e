// Scales of packed weights, float32, or float16 where that costs no accuracy: 32 numbers of a group, one for each output
// channel of a panel.
#pragma once

#include <cstdint>
#include <cstring>

#include "dispatch.h"
#include "panels.h"

namespace optkit {

// Exactly the number that `half`, an IEEE binary16, stands for. Subnormals go by a subtraction, not by way of float32
// subnormals, which some processes flush to zero.
OPTKIT_INLINE float to_float(uint16_t half) {
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t normal = magnitude + (112u << 23), shifted = magnitude + (113u << 23), one = 113u << 23;
    float value, subnormal, base;
    std::memcpy(&value, &normal, sizeof value);
    std::memcpy(&subnormal, &shifted, sizeof subnormal);
    std::memcpy(&base, &one, sizeof base);
    value = magnitude < (1u << 23) ? subnormal - base : value;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The 32 scales or minimums of a group, at `from`, float16 with `half`.
OPTKIT_INLINE void widen(const uint8_t* from, bool half, float* to) {
    if (!half) {
        std::memcpy(to, from, PANEL * sizeof(float));
        return;
    }
    uint16_t values[PANEL];
    std::memcpy(values, from, sizeof values);
    for (int64_t c = 0; c < PANEL; ++c) to[c] = to_float(values[c]);
}

// Number `i` of scales at `from`.
OPTKIT_INLINE float scale_at(const uint8_t* from, int64_t i, bool half) {
    if (half) {
        uint16_t value;
        std::memcpy(&value, from + 2 * i, sizeof value);
        return to_float(value);
    }
    float value;
    std::memcpy(&value, from + 4 * i, sizeof value);
    return value;
}

}  // namespace optkit
