// Weight-only int8 linear layers on the int8 units: activations keep 16 bits, as two int8 rows (split_row.h).
//
// First the two rows are added, then the bias, always in the same order: a result depends on nothing but its row.
#include <algorithm>

#include "dispatch.h"
#include "int8.h"
#include "split_row.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t ROWS = 64;  // of a task

// One panel for output rows [row, row + rows): the int8 layer into `pairs`, then the sums of pairs.
void run_panel(const Linear& p, LinearRows variant, int64_t panel, int64_t row, int64_t rows) {
    alignas(64) float pairs[2 * ROWS * PANEL];
    const int64_t first = panel * PANEL, columns = std::min(PANEL, p.n - first);
    Panel weights = panel_of(p, panel);
    weights.first = 0;  // of `pairs`
    Linear part = p;
    part.q += 2 * row * p.q_stride;
    part.scale += 2 * row * p.groups;
    part.bias = nullptr;
    part.out = pairs;
    part.n = columns;
    variant(part, weights, 0, 2 * rows);
    for (int64_t m = 0; m < rows; ++m) {
        const float *high = pairs + 2 * m * columns, *low = high + columns;
        float* out = p.out + (row + m) * p.n + first;
        for (int64_t c = 0; c < columns; ++c) {
            const float sum = high[c] + low[c];
            out[c] = p.bias ? sum + p.bias[first + c] : sum;
        }
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

    const LinearRows variant = linear_rows();
    const int64_t panels = divide_up(layer.n, PANEL), blocks = divide_up(m, ROWS);
    const int64_t chunk = std::max<int64_t>(1, panels / (4 * threads));  // neighbours: cores don't share pages
    parallel_for(panels * blocks, chunk, threads, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; ++task) {
            const int64_t row = task / panels * ROWS;
            run_panel(layer, variant, task % panels, row, std::min(ROWS, m - row));
        }
    });
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// reference.linear_w8a16 of x [rows, k] with rows `x_stride` apart, its columns in `order` [k] unless that is null: out
// [rows, n]. Weights as for optkit_linear_w8a8.
OPTKIT_API void optkit_linear_w8a16(const float* x, int64_t x_stride, const int32_t* order, const uint8_t* weight,
                                    const float* weight_scale, const float* bias, float* out, int64_t rows, int64_t n,
                                    int64_t k, int64_t groups, int threads) {
    const Linear layer = packed_linear(weight, weight_scale, bias, out, n, k, groups);
    if (rows > 0 && n > 0) run({x, x_stride, order, layer}, rows, k, threads);
}
