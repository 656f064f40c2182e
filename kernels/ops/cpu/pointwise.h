// The pointwise ops around the matrix products, for callers in C++; pointwise.cpp has them.
#pragma once

#include <cstdint>

namespace optkit {

// int8 of an op's output rows, made while they are in the nearest cache (quantize_row.h). `q` null: not wanted.
struct Quantized {
    uint8_t* q;     // [rows][width]
    float* scale;   // [rows][width / group]
    int64_t group;
};

// rms_norm, or add_rms_norm where `residual` is set, or layer_norm. Null weights and biases are none. `out` may be
// null where only its quantized form is wanted. A token may have several rows (`parts`, the heads of a query), one after
// another; `x_stride` is from token to token.
struct Norm {
    const float *x, *residual, *weight, *bias;
    float *out, *total;
    int64_t width, x_stride, residual_stride, parts;
    float eps, offset;
    Quantized quantized;
};

enum class Activation { silu, gelu, gelu_tanh };

// act(gate) * up. `out` may be null as in Norm.
struct Gated {
    const float *gate, *up;
    float* out;
    int64_t width, gate_stride, up_stride;
    Quantized quantized;
};

struct Rope {
    const float *x, *cos, *sin;
    float* out;
    int64_t heads, dim, x_token, x_head, cos_stride, sin_stride;
};

// Cosines and sines of positions[row] * inv_freq, twice in a row, times `scale`.
struct RopeTable {
    const int64_t* positions;
    const float* inv_freq;  // [half]
    float *cos, *sin;       // [rows][2 half]
    int64_t half;
    float scale;
};

// a + b or a * b, row by row; a stride of 0 repeats a vector.
struct Pair {
    const float *a, *b;
    float* out;
    int64_t width, a_stride, b_stride;
};

// log(1 + e^(x + bias)). A null bias is none.
struct Softplus {
    const float *x, *bias;  // bias [width]
    float* out;
    int64_t width, x_stride;
};

void rms_norm(const Norm& op, int64_t rows, int threads);
void layer_norm(const Norm& op, int64_t rows, int threads);
void gated(const Gated& op, int64_t rows, Activation activation, int threads);
void rope(const Rope& op, int64_t rows, int threads);
void rope_table(const RopeTable& op, int64_t rows, int threads);
void add(const Pair& op, int64_t rows, int threads);
void multiply(const Pair& op, int64_t rows, int threads);
void softplus(const Softplus& op, int64_t rows, int threads);

}  // namespace optkit
