// Mixture-of-experts layers: linear layers of int8.cpp and int4.cpp with a weight for each expert.
//
// A call has `tokens` tokens of `each` experts. The packed weights of the experts follow each other, each in whole panels.
// Rows are grouped by expert, so a call reads the weights of the experts in use, once for a block of rows, and no others. A
// task is a block of an expert's rows and some of its panels: the rows are gathered, multiplied by the tiles of the linear
// layers, and each row of the result goes to its place. A lone row, as in decode, is read and written where it lies. Float
// activations become two int8 rows each (split_row.h), whose results are added, then the bias.
//
// A row's result depends on nothing but that row and its expert.
#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "int4.h"
#include "int8.h"
#include "scratch.h"
#include "split_row.h"

namespace optkit {
namespace {

struct Routing {
    const int64_t* experts;  // [tokens][each]
    int64_t tokens, each;
    int64_t rows_each;       // rows of activations of a token: 1 for all experts, or `each`
    int64_t num_experts;

    int64_t pairs() const { return tokens * each; }
    int64_t row_of(int64_t pair) const { return rows_each == 1 ? pair / each : pair; }
};

// The pairs of one expert, order[first .. first + rows), and their tasks, which are numbered from `start` on.
struct Group {
    int64_t expert, first, rows;
    Tasks tasks;
    int64_t start;
};

struct Groups {
    std::vector<int64_t> order;  // pairs of a token and an expert, by expert
    std::vector<Group> groups;   // of the experts in use
    int64_t tasks = 0;
};

// Groups the pairs by expert. False where an index is out of range.
bool group_by_expert(const Routing& r, int64_t panels, int64_t k, int threads, Groups& to) {
    constexpr int64_t TASKS_A_THREAD = 4;
    std::vector<int64_t> ends(r.num_experts + 1);
    for (int64_t pair = 0; pair < r.pairs(); ++pair) {
        const int64_t expert = r.experts[pair];
        if (expert < 0 || expert >= r.num_experts) return false;
        ++ends[expert + 1];
    }
    const int64_t used = std::count_if(ends.begin(), ends.end(), [](int64_t rows) { return rows > 0; });
    const auto share = static_cast<int>(divide_up(TASKS_A_THREAD * threads, std::max<int64_t>(used, 1)));
    for (int64_t e = 0; e < r.num_experts; ++e) {
        const int64_t rows = ends[e + 1];
        ends[e + 1] += ends[e];
        if (rows == 0) continue;
        const Tasks tasks(rows, panels, k, threads > 1 ? share : 1);
        to.groups.push_back({e, ends[e], rows, tasks, to.tasks});
        to.tasks += tasks.count;
    }
    to.order.resize(r.pairs());
    for (int64_t pair = 0; pair < r.pairs(); ++pair) to.order[ends[r.experts[pair]]++] = pair;
    return true;
}

// Activations of the tiles: `parts` int8 rows for each row.
struct Activations {
    const uint8_t* q;  // [rows][parts][stride]
    int64_t stride, bytes;
    const float* scale;  // [rows][parts][groups]
    int64_t groups, parts;
};

// Rows of a task, gathered, or where they lie.
struct Block {
    const uint8_t* q;
    int64_t q_stride;
    const float* scale;
    int64_t rows;  // times parts
};

Block gathered(const Activations& x, const Routing& r, const int64_t* pairs, int64_t count) {
    thread_local GrowingMemory q_memory, scale_memory;
    if (count == 1) {
        const int64_t row = r.row_of(*pairs) * x.parts;
        return {x.q + row * x.stride, x.stride, x.scale + row * x.groups, x.parts};
    }
    auto* q = q_memory.at_least<uint8_t>(count * x.parts * x.bytes);
    auto* scale = scale_memory.at_least<float>(count * x.parts * x.groups);
    for (int64_t i = 0; i < count * x.parts; ++i) {
        const int64_t row = r.row_of(pairs[i / x.parts]) * x.parts + i % x.parts;
        std::memcpy(q + i * x.bytes, x.q + row * x.stride, x.bytes);
        std::memcpy(scale + i * x.groups, x.scale + row * x.groups, x.groups * sizeof *scale);
    }
    return {q, x.bytes, scale, count * x.parts};
}

// The result of a task: out[pair][first .. first + n) for `count` pairs, from rows [count][parts][n] at `from`.
void scatter(const float* from, int64_t parts, const float* bias, const int64_t* pairs, int64_t count, float* out,
             int64_t width, int64_t n) {
    for (int64_t i = 0; i < count; ++i) {
        float* to = out + pairs[i] * width;
        const float* row = from + i * parts * n;
        if (parts == 2)
            add_pair(row, row + n, bias, to, n);
        else
            std::memcpy(to, row, n * sizeof *to);
    }
}

struct Output {
    float* out;         // [pairs][n]
    const float* bias;  // [experts][n] or null
    int64_t n, panels;  // of one expert
};

// Calls multiply(expert, panel, end, block, bias, out, columns) for each task: panels [panel, end) of the expert for the
// rows of the block, out [rows][columns] dense. False where an index is out of range.
template <class Multiply>
bool each_task(const Routing& r, const Activations& x, const Output& y, int64_t k, int threads,
               const Multiply& multiply) {
    Groups by_expert;
    if (!group_by_expert(r, y.panels, k, threads, by_expert)) return false;
    parallel_for(by_expert.tasks, 1, threads, [&](int64_t first, int64_t last) {
        thread_local GrowingMemory out_memory;
        for (int64_t task = first; task < last; ++task) {
            const auto after = std::upper_bound(by_expert.groups.begin(), by_expert.groups.end(), task,
                                                [](int64_t t, const Group& g) { return t < g.start; });
            const Group& g = *(after - 1);
            const int64_t local = task - g.start, row = local / g.tasks.across * g.tasks.rows;
            const int64_t panel = local % g.tasks.across * g.tasks.panels, end = std::min(panel + g.tasks.panels, y.panels);
            const int64_t count = std::min(g.tasks.rows, g.rows - row), column = panel * PANEL;
            const int64_t columns = std::min(end * PANEL, y.n) - column;
            const int64_t* pairs = by_expert.order.data() + g.first + row;
            const Block block = gathered(x, r, pairs, count);
            const float* bias = y.bias ? y.bias + g.expert * y.n + column : nullptr;
            const bool direct = block.rows == 1;
            float* out = direct ? y.out + *pairs * y.n + column : out_memory.at_least<float>(block.rows * columns);
            multiply(g.expert, panel, end, block, x.parts == 1 ? bias : nullptr, out, columns);
            if (!direct) scatter(out, x.parts, bias, pairs, count, y.out + column, y.n, columns);
        }
    });
    return true;
}

// The int8 layers of the experts, and what they are multiplied with.
bool int8_experts(const Routing& r, const Activations& x, const uint8_t* weight, const uint8_t* weight_scale,
                  bool half, const Output& y, int64_t k, int threads) {
    const int64_t bytes = optkit_w8_bytes(y.n, k, x.groups), scales = y.panels * scale_bytes(x.groups, half);
    return each_task(r, x, y, k, threads, [&](int64_t expert, int64_t panel, int64_t end, const Block& block,
                                              const float* bias, float* out, int64_t columns) {
        const uint8_t* own_scales = weight_scale + expert * scales;
        Linear p = packed_linear(weight + expert * bytes, own_scales, half, bias, out, y.n, k, x.groups);
        p = from_panel(p, panel, columns);
        p.q = block.q, p.q_stride = block.q_stride, p.scale = block.scale;
        linear_panels(p, 0, end - panel, 0, block.rows);
    });
}

bool int4_experts(const Routing& r, const Activations& x, const uint8_t* weight, RecordLayout layout, int64_t groups,
                  const Output& y, int64_t k, int threads) {
    const int64_t steps = k / groups / STEP, record = groups * layout.size(steps), bytes = y.panels * record;
    return each_task(r, x, y, k, threads, [&](int64_t expert, int64_t panel, int64_t end, const Block& block,
                                              const float* bias, float* out, int64_t columns) {
        const uint8_t* first = weight + expert * bytes + panel * record;
        const LinearW4A8 p{block.q, block.q_stride, block.scale, x.groups, first, layout, bias, out, columns, groups, steps};
        linear_w4a8_panels(p, 0, end - panel, 0, block.rows);
    });
}

// Float rows as two int8 rows each, of `columns` channels in `groups` groups.
Activations split_activations(const float* x, int64_t x_stride, int64_t rows, int64_t columns, int64_t groups, int threads) {
    thread_local GrowingMemory q_memory, scale_memory;
    constexpr int64_t ROWS_A_RANGE = 8;
    const int64_t padded = divide_up(columns, STEP) * STEP;
    auto* q = q_memory.at_least<uint8_t>(2 * rows * padded);
    auto* scale = scale_memory.at_least<float>(2 * rows * groups);
    const Split split{x, x_stride, nullptr, columns, padded, columns / groups, q, scale};
    parallel_for(rows, ROWS_A_RANGE, threads,
                 [&](int64_t first, int64_t last) { split_rows(split, first, last - first); });
    return {q, padded, padded, scale, groups, 2};
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// reference.expert_w8a8 of q [tokens][rows_each][k] with rows `q_stride` apart, rows_each 1 or `each`, k a multiple of 4 *
// groups, and experts [tokens][each]: out [tokens][each][n]. `weight` are the blobs of optkit_pack_w8 of all experts,
// `weight_scale` is [experts][panels][groups][32], float16 with `half`, bias [experts][n] or null. Gives 1 where an expert is
// out of range.
OPTKIT_API int optkit_expert_w8a8(const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
                                  const uint8_t* weight_scale, const float* bias, const int64_t* experts, float* out,
                                  int64_t tokens, int64_t each, int64_t rows_each, int64_t num_experts, int64_t n,
                                  int64_t k, int64_t groups, int half, int threads) {
    const Routing routing{experts, tokens, each, rows_each, num_experts};
    const Activations x{q, q_stride, k, scale, groups, 1};
    return !int8_experts(routing, x, weight, weight_scale, half, {out, bias, n, divide_up(n, PANEL)}, k, threads);
}

// reference.expert_w4a8; `weight` are the blobs of optkit_pack_w4 of all experts. See optkit_linear_w4a8.
OPTKIT_API int optkit_expert_w4a8(const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
                                  const float* bias, const int64_t* experts, float* out, int64_t tokens, int64_t each,
                                  int64_t rows_each, int64_t num_experts, int64_t n, int64_t k, int64_t groups,
                                  int64_t scale_groups, int half, int levels, int threads) {
    const Routing routing{experts, tokens, each, rows_each, num_experts};
    const Activations x{q, q_stride, k, scale, scale_groups, 1};
    const RecordLayout layout{half != 0, static_cast<Levels>(levels)};
    return !int4_experts(routing, x, weight, layout, groups, {out, bias, n, divide_up(n, PANEL)}, k, threads);
}

// reference.expert_w8a16 of x [tokens][rows_each][k] with rows `x_stride` apart; weights as for optkit_expert_w8a8.
OPTKIT_API int optkit_expert_w8a16(const float* x, int64_t x_stride, const uint8_t* weight, const uint8_t* weight_scale,
                                   const float* bias, const int64_t* experts, float* out, int64_t tokens, int64_t each,
                                   int64_t rows_each, int64_t num_experts, int64_t n, int64_t k, int64_t groups,
                                   int half, int threads) {
    const Routing routing{experts, tokens, each, rows_each, num_experts};
    const Activations rows = split_activations(x, x_stride, tokens * rows_each, k, groups, threads);
    return !int8_experts(routing, rows, weight, weight_scale, half, {out, bias, n, divide_up(n, PANEL)}, k, threads);
}

// reference.expert_wna16 of up to 4 bits; weights as for optkit_expert_w4a8.
OPTKIT_API int optkit_expert_w4a16(const float* x, int64_t x_stride, const uint8_t* weight, const float* bias,
                                   const int64_t* experts, float* out, int64_t tokens, int64_t each, int64_t rows_each,
                                   int64_t num_experts, int64_t n, int64_t k, int64_t groups, int half, int levels,
                                   int threads) {
    const Routing routing{experts, tokens, each, rows_each, num_experts};
    const Activations rows = split_activations(x, x_stride, tokens * rows_each, k, groups, threads);
    const RecordLayout layout{half != 0, static_cast<Levels>(levels)};
    return !int4_experts(routing, rows, weight, layout, groups, {out, bias, n, divide_up(n, PANEL)}, k, threads);
}

// reference.weighted_sum of x [rows][each][width] and weights [rows][each]: out [rows][width].
OPTKIT_API void optkit_weighted_sum(const float* x, const float* weights, float* out, int64_t rows, int64_t each,
                                    int64_t width, int threads) {
    constexpr int64_t ELEMENTS_A_THREAD = 65'536;  // for which waking another thread pays
    threads = static_cast<int>(std::min<int64_t>(threads, rows * each * width / ELEMENTS_A_THREAD));
    parallel_for(rows, even_chunk(rows, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float* sum = out + row * width;
            std::memset(sum, 0, width * sizeof *sum);
            for (int64_t j = 0; j < each; ++j) {
                const float weight = weights[row * each + j];
                const float* part = x + (row * each + j) * width;
                for (int64_t i = 0; i < width; ++i) sum[i] += weight * part[i];
            }
        }
    });
}
