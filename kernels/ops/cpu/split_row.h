// Float activations for the int8 units with 16 bits kept: each row becomes two rows of int8.
//
// A float activation is rounded to 16 bits within its group, `x ~ scale * r` with |r| <= 32639, and r is written as two
// bytes, `r = 256 * high + low`, both in [-128, 127]. So one row of activations becomes two rows of an integer layer,
// whose results are added. The rounding error, 2^-16 of the group's largest value, is below that of float16
// activations; the weights are read once, which is all that decode pays for.
//
// One source for all instruction sets: plain loops that the compiler vectorizes.
#pragma once

#include <cstring>

#include "quantize_row.h"
#include "scratch.h"

namespace optkit {

constexpr float SPLIT_MOST = 32639.0f;  // 256 * 127 + 127

// Rows to split: x [..][x_stride] of `columns` values, and the two rows that row m becomes, 2m and 2m + 1.
struct Split {
    const float* x;
    int64_t x_stride;
    const int32_t* order;  // [columns]: the column of x that comes i-th; null: they are in order
    int64_t columns, padded, group;
    uint8_t* q;    // [2 rows][padded], zero point 128, which is also what lies past `columns`
    float* scale;  // [2 rows][columns / group]
};

// out[i] = high[i] + low[i], then the bias unless it is null: the results of the two rows of a row become its result.
OPTKIT_INLINE void add_pair(const float* high, const float* low, const float* bias, float* out, int64_t n) {
    if (bias)
        for (int64_t i = 0; i < n; ++i) out[i] = high[i] + low[i] + bias[i];
    else
        for (int64_t i = 0; i < n; ++i) out[i] = high[i] + low[i];
}

// Splits `count` rows from `row` on.
void split_rows(const Split& s, int64_t row, int64_t count);

}  // namespace optkit
