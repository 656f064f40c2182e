// The int4 linear layer: common types of the variants. See int4.cpp for the layout.
#pragma once

#include <cstring>

#include "dispatch.h"
#include "int8.h"
#include "scales.h"

namespace optkit {

// What a code stands for, besides its scale. The order is the Python side's too.
enum class Levels : int {
    symmetric = 0,   // (code - 8) * scale
    minimum = 1,     // code * scale + minimum: floats like the scales
    zero_point = 2,  // (code - zero) * scale, computed as code * scale + -zero * scale: one byte each
};

// Scales and minimums or zero points of one group of one panel, then its weights. Sizes in bytes.
struct RecordLayout {
    bool half;  // scales and minimums are float16, else float32
    Levels levels;

    constexpr bool minimum() const { return levels != Levels::symmetric; }
    constexpr int64_t row() const { return PANEL * (half ? 2 : 4); }  // of scales, or of minimums
    constexpr int64_t low_row() const {
        return levels == Levels::minimum ? row() : levels == Levels::zero_point ? PANEL : 0;
    }
    constexpr int64_t codes() const { return row() + low_row(); }  // where the weights start
    constexpr int64_t size(int64_t group_steps) const { return codes() + group_steps * (STEP_BYTES / 2); }
};

struct LinearW4A8 {
    const uint8_t* q;       // [M][q_stride], zero point 128
    int64_t q_stride;       // at least k
    const float* scale;     // [M][scale_groups]
    int64_t scale_groups;   // divides groups
    const uint8_t* weight;  // [panels][groups] records
    RecordLayout layout;
    const float* bias;      // [n] or null
    float* out;             // [M][n]
    int64_t n;
    int64_t groups;
    int64_t group_steps;    // even
};

// All of it: rows [0, m). `k` is 4 * groups * group_steps.
void linear_w4a8(const LinearW4A8& p, int64_t m, int64_t k, int threads);

// The panels [from, to) for rows [row, row + rows), on the calling thread.
void linear_w4a8_panels(const LinearW4A8& p, int64_t from, int64_t to, int64_t row, int64_t rows);

// A panel unpacked: what `Panel` points to, in a thread's scratch memory.
struct Unpacked {
    int8_t* weight;
    int32_t* offset;
    float* scale;
    float* minimum;
};

void unpack_avx512(const LinearW4A8& p, const uint8_t* records, const Unpacked& to);
// The codes as they are, 0 .. 15, and no offsets: for linear_codes_avx2 and linear_codes_avx_vnni.
void unpack_avx2(const LinearW4A8& p, const uint8_t* records, const Unpacked& to);
// Neither computes offsets, which the tiles of Neon do without.
void unpack_neon(const LinearW4A8& p, const uint8_t* records, const Unpacked& to);
// Weights in pairs (paired_rows.h), for linear_paired_codes.
void unpack_i8mm(const LinearW4A8& p, const uint8_t* records, const Unpacked& to);

// For few rows, unpacking in registers: out[row .. row + rows) of the panel whose records start at `records` and whose
// first output channel is `first`. `p.q` holds q - 128 as s8 and `start` [M][groups] the accumulators' initial values.
using FewRows = void (*)(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                         int64_t first, int64_t row, int64_t rows);
void linear_w4a8_avx2(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                      int64_t first, int64_t row, int64_t rows);
void linear_w4a8_avx_vnni(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                          int64_t first, int64_t row, int64_t rows);
void linear_w4a8_avx512(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                        int64_t first, int64_t row, int64_t rows);
void linear_w4a8_neon(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                      int64_t first, int64_t row, int64_t rows);

// For many rows of an unpacked panel whose weights are codes: out[row .. row + rows); `p.q` and `start` as in FewRows.
using ManyRows = void (*)(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows);
void linear_codes_avx2(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows);
void linear_codes_avx_vnni(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows);
// `p.q` holds all rows in pairs (paired_rows.h), and so does the panel: `row` is 0, and `start` is not read.
void linear_paired_codes(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows);

// The 32 minimums of a record, whose scales are `scale`.
OPTKIT_INLINE void widen_minimums(const uint8_t* record, RecordLayout layout, const float* scale, float* to) {
    const uint8_t* low = record + layout.row();
    if (layout.levels == Levels::minimum) return widen(low, layout.half, to);
    for (int64_t c = 0; c < PANEL; ++c) to[c] = (0.0f - static_cast<float>(low[c])) * scale[c];
}

}  // namespace optkit
