// Weight-only int8 linear layers on the int8 units: activations keep 16 bits, as two int8 rows (split_row.h).
//
// First the two rows are added, then the bias, always in the same order: a result depends on nothing but its row.
#include <algorithm>

#include "bf16.h"
#include "dispatch.h"
#include "int8.h"
#include "split_row.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t ROWS = 64, PANELS = 8;  // of a task

// The layer of the panels [from, to) alone: their output channels are counted from 0 and lie in `out`, without bias.
Linear part_of(const Linear& p, int64_t from, int64_t to, float* out) {
    Linear part = from_panel(p, from, std::min(to * PANEL, p.n) - from * PANEL);
    part.bias = nullptr, part.out = out;
    return part;
}

// Panels [from, to) for output rows [row, row + rows): the int8 layer into `pairs`, then the sums of pairs.
void run_panels(const Linear& p, int64_t from, int64_t to, int64_t row, int64_t rows) {
    thread_local GrowingMemory scratch;
    auto* pairs = scratch.at_least<float>(2 * rows * PANELS * PANEL);
    Linear part = part_of(p, from, to, pairs);
    part.q += 2 * row * p.q_stride;
    part.scale += 2 * row * p.groups;
    linear_panels(part, 0, to - from, 0, 2 * rows);
    const int64_t first = from * PANEL;
    for (int64_t m = 0; m < rows; ++m) {
        const float* high = pairs + 2 * m * part.n;
        const float* bias = p.bias ? p.bias + first : nullptr;
        add_pair(high, high + part.n, bias, p.out + (row + m) * p.n + first, part.n);
    }
}

struct WeightOnly {
    const float* x;
    int64_t x_stride;
    const int32_t* order;  // [k]: the column of x that is input channel i; null: they are in order
    Linear layer;          // all but q, q_stride and scale
};

void run(const WeightOnly& p, int64_t m, int64_t k, int threads) {
    thread_local GrowingMemory q_memory, scale_memory;
    Linear layer = p.layer;
    layer.q_stride = layer.steps * STEP;
    auto* q = q_memory.at_least<uint8_t>(2 * m * layer.q_stride);
    auto* scale = scale_memory.at_least<float>(2 * m * layer.groups);
    layer.q = q;
    layer.scale = scale;
    split_rows({p.x, p.x_stride, p.order, k, layer.q_stride, k / layer.groups, q, scale}, 0, m);

    const int64_t panels = divide_up(layer.n, PANEL), across = divide_up(panels, PANELS);
    const int64_t chunk = std::max<int64_t>(1, across / (4 * threads));  // neighbours: cores don't share pages
    parallel_for(across * divide_up(m, ROWS), chunk, threads, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; ++task) {
            const int64_t row = task / across * ROWS, from = task % across * PANELS;
            run_panels(layer, from, std::min(from + PANELS, panels), row, std::min(ROWS, m - row));
        }
    });
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// reference.linear_w8a16 of x [rows, k] with rows `x_stride` apart, its columns in `order` [k] unless that is null: out
// [rows, n]. Weights as for optkit_linear_w8a8. With `bf16` and no order a CPU with AMX rounds activations and weights
// to bfloat16; other CPUs are more precise.
OPTKIT_API void optkit_linear_w8a16(const float* x, int64_t x_stride, const int32_t* order, const uint8_t* weight,
                                    const uint8_t* weight_scale, const float* bias, float* out, int64_t rows, int64_t n,
                                    int64_t k, int64_t groups, int half, int bf16, int threads) {
    const Linear layer = packed_linear(weight, weight_scale, half, bias, out, n, k, groups);
    if (rows == 0 || n == 0) return;
#ifdef OPTKIT_AMX
    if (bf16 && !order && isa() == Isa::amx) return linear_w8a16_amx({x, x_stride, k}, layer, rows, threads);
#endif
    run({x, x_stride, order, layer}, rows, k, threads);
}

// Three ops of linear layers in bfloat16: `down` [n, width] of act(gate) * up, the halves of `gate_up` [2 width, k] of x
// [rows, k] with rows `x_stride` apart: out [rows, n]. `width` is whole panels. Weights as for optkit_linear_w8a8;
// `activation` is one of enum Activation.
OPTKIT_API void optkit_gated_mlp_w8a16(const float* x, int64_t x_stride, const uint8_t* gate_up,
                                       const uint8_t* gate_up_scale, const float* gate_up_bias, int64_t gate_up_groups,
                                       int gate_up_half, const uint8_t* down, const uint8_t* down_scale,
                                       const float* down_bias, int64_t down_groups, int down_half, float* out,
                                       int64_t rows, int64_t n, int64_t width, int64_t k, int activation, int threads) {
    if (rows == 0 || n == 0) return;
    const auto act = static_cast<Activation>(activation);
    Linear first = packed_linear(gate_up, gate_up_scale, gate_up_half, gate_up_bias, nullptr, 2 * width, k, gate_up_groups);
    const Linear second = packed_linear(down, down_scale, down_half, down_bias, out, n, width, down_groups);
#ifdef OPTKIT_AMX
    if (isa() == Isa::amx) return gated_mlp_amx({x, x_stride, k}, first, act, second, rows, threads);
#endif
    thread_local GrowingMemory both_memory, hidden_memory;
    first.out = both_memory.at_least<float>(rows * 2 * width);
    auto* hidden = hidden_memory.at_least<float>(rows * width);
    run({x, x_stride, nullptr, first}, rows, k, threads);
    gated({first.out, first.out + width, hidden, width, 2 * width, 2 * width, {}}, rows, act, threads);
    run({hidden, width, nullptr, second}, rows, width, threads);
}
