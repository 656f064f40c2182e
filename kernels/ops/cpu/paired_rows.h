// Operands of smmla, the matrix product of Armv8.6 (FEAT_I8MM): two registers of 2 x 8 signed bytes give 2 x 2 sums.
//
//   activations  [rows / 2][pairs][2][8]         row 2i and row 2i + 1 of 8 input channels: a pair of steps
//   weights      [pairs][PANEL / 2][2][8]        output channels 2j and 2j + 1 of the same 8
//
// A pair of steps is the 8 input channels of one register. A group of an odd number of steps ends with a half pair, whose
// other half is zero in the activations. The rows are padded with a row of zeros to an even number.
#pragma once

#include "dispatch.h"
#include "int8.h"

#if OPTKIT_ARM

namespace optkit {

constexpr int64_t PAIR_BYTES = 2 * STEP_BYTES;  // the weights of a pair of steps
constexpr int64_t PAIRED_ROW = 2 * 2 * STEP;    // the activations of a pair of steps, of two rows

// Activations in pairs, of a number of rows.
struct PairedRows {
    const int8_t* at;
    int64_t pairs;  // of all groups
};

inline int64_t pairs_of(int64_t steps) { return divide_up(steps, 2); }

// Bytes of `rows` rows of `groups` groups in pairs.
inline int64_t paired_bytes(int64_t rows, int64_t groups, int64_t group_steps) {
    return divide_up(rows, 2) * groups * pairs_of(group_steps) * PAIRED_ROW;
}

// Rows [row, row + rows) of `q`, less their zero point, to `to`.
void pair_rows(const uint8_t* q, int64_t q_stride, int64_t rows, int64_t groups, int64_t group_steps, int8_t* to);

// out[row .. row + rows) of a panel whose weights lie in pairs; the first of the rows `x` is row `row` of the layer.
void linear_paired(const Linear& p, const Panel& panel, PairedRows x, int64_t row, int64_t rows);

}  // namespace optkit

#endif
