// The int8 linear layer: what its variants share. See int8.cpp for the layout.
#pragma once

#include <cstdint>

namespace optkit {

constexpr int64_t PANEL = 32;            // output channels of a panel: two AVX-512 registers of int32
constexpr int64_t STEP = 4;              // input channels of a step: what vpdpbusd adds up in one lane
constexpr int64_t STEP_BYTES = PANEL * STEP;

struct Linear {
    const uint8_t* q;       // [M][q_stride], zero point 128
    int64_t q_stride;       // at least steps * STEP
    const float* scale;     // [M][groups]
    const int8_t* weight;   // [panels][steps][PANEL][STEP]
    const int32_t* offset;  // [panels][groups][PANEL]: -128 * sum of the group's weights, undoing the zero point
    const float* weight_scale;  // [panels][groups][PANEL]
    const float* bias;          // [n] or null
    float* out;                 // [M][n]
    int64_t n;
    int64_t steps;        // of the whole row
    int64_t groups;       // 1: one scale a row and output channel
    int64_t group_steps;  // steps / groups
};

// out[row .. row + rows) of one panel. Each row's result depends on nothing but that row.
void linear_portable(const Linear& p, int64_t panel, int64_t row, int64_t rows);
void linear_avx2(const Linear& p, int64_t panel, int64_t row, int64_t rows);
void linear_avx512(const Linear& p, int64_t panel, int64_t row, int64_t rows);

// The variant of the instruction set in use.
using LinearRows = void (*)(const Linear&, int64_t, int64_t, int64_t);
LinearRows linear_rows();

// All of it: rows [0, m). `k` is 4 * steps.
void linear_w8a8(const Linear& p, int64_t m, int64_t k, int threads);

// reference.linear_w8a16: out [m][n] of float activations x [m][x_stride]. See w8a16.cpp.
struct WeightOnly {
    const float* x;
    int64_t x_stride;
    Linear layer;  // all but q, q_stride and scale
};
void linear_w8a16(const WeightOnly& p, int64_t m, int64_t k, int threads);

}  // namespace optkit
