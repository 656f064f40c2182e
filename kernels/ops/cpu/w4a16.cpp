// Weight-only int4 linear layers: float activations as two int8 rows each (split_row.h) on the int4 layer (int4.cpp).
//
// Rows are computed in blocks, so that the results of the pairs, which are added here, stay in the cache. First the two
// rows are added, then the bias, always in the same order: a result depends on nothing but its row.
#include <algorithm>

#include "dispatch.h"
#include "int4.h"
#include "split_row.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t BLOCK = 128;  // rows of activations
constexpr int64_t ROWS_A_RANGE = 8;

template <class Row>
void each_row(int64_t rows, int threads, const Row& row) {
    parallel_for(rows, ROWS_A_RANGE, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) row(i);
    });
}

void add_pairs(const float* pairs, const float* bias, float* out, int64_t rows, int64_t n, int threads) {
    each_row(rows, threads, [&](int64_t m) {
        const float* high = pairs + 2 * m * n;
        add_pair(high, high + n, bias, out + m * n, n);
    });
}

struct WeightOnly {
    const float* x;
    int64_t x_stride;
    const int32_t* order;  // [k]: the column of x that is input channel i; null: they are in order
    LinearW4A8 layer;      // all but q, q_stride, scale and scale_groups
};

void run(const WeightOnly& p, int64_t m, int64_t k, int threads) {
    thread_local GrowingMemory q_memory, scale_memory, pair_memory;
    const int64_t most = std::min(m, BLOCK), n = p.layer.n, groups = p.layer.groups;
    LinearW4A8 layer = p.layer;
    auto* q = q_memory.at_least<uint8_t>(2 * most * k);
    auto* scale = scale_memory.at_least<float>(2 * most * groups);
    layer.q = q, layer.q_stride = k, layer.scale = scale, layer.scale_groups = groups, layer.bias = nullptr;
    layer.out = pair_memory.at_least<float>(2 * most * n);
    for (int64_t row = 0; row < m; row += BLOCK) {
        const int64_t rows = std::min(BLOCK, m - row);
        const Split split{p.x + row * p.x_stride, p.x_stride, p.order, k, k, k / groups, q, scale};
        each_row(rows, threads, [&](int64_t i) { split_rows(split, i, 1); });
        linear_w4a8(layer, 2 * rows, k, threads);
        add_pairs(layer.out, p.layer.bias, p.layer.out + row * n, rows, n, threads);
    }
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// reference.linear_wna16 of x [rows, k] with rows `x_stride` apart, its columns in `order` [k] unless that is null: out
// [rows, n]. Weights as for optkit_linear_w4a8.
OPTKIT_API void optkit_linear_w4a16(const float* x, int64_t x_stride, const int32_t* order, const uint8_t* weight,
                                    const float* bias, float* out, int64_t rows, int64_t n, int64_t k, int64_t groups,
                                    int half, int levels, int threads) {
    WeightOnly p{x, x_stride, order, {}};
    p.layer.weight = weight, p.layer.bias = bias, p.layer.out = out, p.layer.n = n, p.layer.groups = groups;
    p.layer.layout = {half != 0, static_cast<Levels>(levels)};
    p.layer.group_steps = k / groups / STEP;
    if (rows > 0 && n > 0) run(p, rows, k, threads);
}
