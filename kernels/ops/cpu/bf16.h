// Linear layers that multiply in bfloat16: the entries for callers in C++. See w8a16_amx.cpp.
#pragma once

#include "int8.h"
#include "pointwise.h"

namespace optkit {

// Float activations, rounded to bfloat16 by the layer.
struct Bf16Input {
    const float* x;  // [M][x_stride]
    int64_t x_stride;
    int64_t k;
};

// All rows of `layer`, of which q, q_stride and scale are not used. Each row's result depends on nothing but that row.
void linear_w8a16_amx(const Bf16Input& input, const Linear& layer, int64_t m, int threads);

// `down` of act(gate) * up, where `gate_up` has all gates and then all ups, whole panels each.
void gated_mlp_amx(const Bf16Input& input, const Linear& gate_up, Activation activation, const Linear& down, int64_t m,
                   int threads);

}  // namespace optkit
