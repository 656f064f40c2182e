// The int8 linear layer: common types of the variants. See int8.cpp for the layout.
#pragma once

#include "panels.h"
#include "scratch.h"

namespace optkit {

struct Linear {
    const uint8_t* q;       // [M][q_stride], zero point 128
    int64_t q_stride;       // at least steps * STEP
    const float* scale;     // [M][groups]
    const int8_t* weight;   // [panels][steps][PANEL][STEP]
    const int32_t* offset;  // [panels][groups][PANEL]: -128 * sum of the group's weights, undoing the zero point
    const uint8_t* weight_scale;  // [panels][groups][PANEL] float32, float16 with `half`
    bool half;
    const float* bias;  // [n] or null
    float* out;                 // [M][n]
    int64_t n;
    int64_t steps;        // of the whole row
    int64_t groups;       // 1: one scale a row and output channel
    int64_t group_steps;  // steps / groups
    const uint8_t* pairs_fit = nullptr;  // [panels]: 1 where no pair of products leaves 16 bits; null: unknown
    const float* sums = nullptr;  // [M][groups]: scale * sum of the group's (q - 128), for panels with minimums
};

// What a tile reads of one panel. Of an int8 weight these are pieces of `Linear`, of an int4 weight unpacked ones.
struct Panel {
    int64_t first;              // its first output channel
    const int8_t* weight;       // [steps][PANEL][STEP]
    const int32_t* offset;      // [groups][PANEL]
    const float* weight_scale;  // [groups][PANEL]
    const float* minimum;       // [groups][PANEL], what weight 0 stands for; null: it is 0 everywhere
    const void* next;           // memory to fetch meanwhile, `next_step` bytes for each step of this panel
    int64_t next_step;
    const uint16_t* half = nullptr;  // the scales in float16 for variants that widen them themselves; else null
    bool pairs_fit = false;          // any two neighbours add up to MOST_OF_TWO at most
};

// Panel `i` of an int8 weight for `rows` rows. Scales in float16 are widened into `memory`, or left to tiles of AVX-512.
Panel panel_of(const Linear& p, int64_t i, int64_t rows, GrowingMemory& memory);

// Neighbouring weights a and b with |a + b| up to here: x * a + y * b fits 16 bits for any bytes x and y. With one sign that is
// 255 * 128 < 2^15 at most, with two signs 255 * 128 for the greater one alone.
constexpr int MOST_OF_TWO = 128;

// out[row .. row + rows) of one panel. Each row's result depends on nothing but that row.
using LinearRows = void (*)(const Linear&, const Panel&, int64_t row, int64_t rows);
void linear_portable(const Linear& p, const Panel& panel, int64_t row, int64_t rows);
void linear_avx2(const Linear& p, const Panel& panel, int64_t row, int64_t rows);
void linear_pairs_avx2(const Linear& p, const Panel& panel, int64_t row, int64_t rows);  // of panels whose pairs fit
void linear_avx_vnni(const Linear& p, const Panel& panel, int64_t row, int64_t rows);
void linear_avx512(const Linear& p, const Panel& panel, int64_t row, int64_t rows);
void linear_amx(const Linear& p, const Panel& panel, int64_t row, int64_t rows);
void linear_neon(const Linear& p, const Panel& panel, int64_t row, int64_t rows);
void linear_i8mm(const Linear& p, const Panel& panel, int64_t row, int64_t rows);

// The variant of the instruction set in use.
LinearRows linear_rows();

// The same for the panels [from, to) of an int8 weight, with activations that are prepared once for all of them.
void linear_panels(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows);
void linear_panels_avx2(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows);
void linear_panels_i8mm(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows);

// The layer whose packed weight [n, k] is `blob`: all of `Linear` but q, q_stride and scale.
Linear packed_linear(const uint8_t* blob, const uint8_t* weight_scale, bool half, const float* bias, float* out,
                     int64_t n, int64_t k, int64_t groups);

// Bytes of a panel's scales.
inline int64_t scale_bytes(int64_t groups, bool half) { return groups * PANEL * (half ? 2 : 4); }

// The layer of the panels from `panel` on alone, with `n` output channels, which are counted from 0. `out` and `bias` stay.
Linear from_panel(const Linear& p, int64_t panel, int64_t n);

// Rows `index` [rows] of the packed weight: code * scale of `width` channels each, out [rows][width].
void gather_w8_rows(const Linear& p, const int64_t* index, int64_t rows, int64_t width, int threads);

// All of it: rows [0, m). `k` is 4 * steps.
void linear_w8a8(const Linear& p, int64_t m, int64_t k, int threads);

}  // namespace optkit
