// Runs programs: resolves the arguments of each kernel call and makes it. See program.h.
//
// An op is one row of OPS: its name, by which the Python side finds it, how many arguments it takes, and the function
// that unpacks them. Arguments stand in the order in which the function reads them.
#include "program.h"

#include <cstring>

#include "attention.h"
#include "dispatch.h"
#include "int4.h"
#include "pointwise.h"

OPTKIT_API void optkit_quantize_per_token(const float* x, int64_t stride, uint8_t* q, float* scale, int64_t rows,
                                          int64_t columns, int64_t group, int threads);

namespace optkit {
namespace {

// The resolved arguments of a call, read one after another.
class Reader {
  public:
    explicit Reader(const int64_t* at) : at_(at) {}

    template <class T>
    operator T*() {
        return reinterpret_cast<T*>(*at_++);
    }
    operator int64_t() { return *at_++; }
    operator int() { return static_cast<int>(*at_++); }
    operator float() {
        float value;
        const auto bits = static_cast<int32_t>(*at_++);
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

  private:
    const int64_t* at_;
};

// An op gives 0, or 1 for an index out of range.
using Op = int (*)(Reader a, int threads);

// rows of `table` [count][width bytes] by `index` [rows]
int gather_rows(Reader a, int) {
    const char* table = a;
    const int64_t* index = a;
    char* out = a;
    const int64_t rows = a, count = a, bytes = a;
    for (int64_t row = 0; row < rows; ++row) {
        if (index[row] < 0 || index[row] >= count) return 1;
        std::memcpy(out + row * bytes, table + index[row] * bytes, bytes);
    }
    return 0;
}

int run_norm(Reader a, int threads, void (*norm)(const Norm&, int64_t, int)) {
    Norm op;
    op.x = a, op.residual = a, op.weight = a, op.bias = a, op.out = a, op.total = a;
    const int64_t rows = a;
    op.width = a, op.x_stride = a, op.residual_stride = a, op.parts = a, op.eps = a, op.offset = a;
    op.quantized.q = a, op.quantized.scale = a, op.quantized.group = a;
    norm(op, rows, threads);
    return 0;
}

int run_rms_norm(Reader a, int threads) { return run_norm(a, threads, rms_norm); }
int run_layer_norm(Reader a, int threads) { return run_norm(a, threads, layer_norm); }

int run_gated(Reader a, int threads) {
    Gated op;
    op.gate = a, op.up = a, op.out = a;
    const int64_t rows = a;
    op.width = a, op.gate_stride = a, op.up_stride = a;
    const int activation = a;
    op.quantized.q = a, op.quantized.scale = a, op.quantized.group = a;
    gated(op, rows, static_cast<Activation>(activation), threads);
    return 0;
}

int run_rope(Reader a, int threads) {
    Rope op;
    op.x = a, op.cos = a, op.sin = a, op.out = a;
    const int64_t rows = a;
    op.heads = a, op.dim = a, op.x_token = a, op.x_head = a, op.table_stride = a;
    rope(op, rows, threads);
    return 0;
}

int run_rope_table(Reader a, int threads) {
    RopeTable op;
    op.positions = a, op.inv_freq = a, op.cos = a, op.sin = a;
    const int64_t rows = a;
    op.half = a, op.scale = a;
    rope_table(op, rows, threads);
    return 0;
}

int run_add(Reader a, int threads) {
    Add op;
    op.a = a, op.b = a, op.out = a;
    const int64_t rows = a;
    op.width = a, op.a_stride = a, op.b_stride = a;
    add(op, rows, threads);
    return 0;
}

int run_quantize(Reader a, int threads) {
    const float* x = a;
    const int64_t stride = a;
    uint8_t* q = a;
    float* scale = a;
    const int64_t rows = a, columns = a, group = a;
    optkit_quantize_per_token(x, stride, q, scale, rows, columns, group, threads);
    return 0;
}

int run_linear_w8a8(Reader a, int threads) {
    Linear p;
    p.q = a, p.q_stride = a, p.scale = a, p.weight = a, p.offset = a, p.weight_scale = a, p.bias = a, p.out = a;
    const int64_t rows = a, k = a;
    p.n = a, p.groups = a;
    p.steps = k / STEP;
    p.group_steps = p.steps / p.groups;
    linear_w8a8(p, rows, k, threads);
    return 0;
}

int run_linear_w4a8(Reader a, int threads) {
    LinearW4A8 p;
    p.q = a, p.q_stride = a, p.scale = a, p.weight = a, p.bias = a, p.out = a;
    const int64_t rows = a, k = a;
    p.n = a, p.groups = a, p.scale_groups = a;
    const int half = a, minimum = a;
    p.layout = {half != 0, minimum != 0};
    p.group_steps = k / p.groups / STEP;
    linear_w4a8(p, rows, k, threads);
    return 0;
}

int run_linear_w8a16(Reader a, int threads) {
    WeightOnly p{};
    p.x = a, p.x_stride = a;
    Linear& layer = p.layer;
    layer.weight = a, layer.offset = a, layer.weight_scale = a, layer.bias = a, layer.out = a;
    const int64_t rows = a, k = a;
    layer.n = a, layer.groups = a;
    layer.steps = k / STEP;
    layer.group_steps = layer.steps / layer.groups;
    linear_w8a16(p, rows, k, threads);
    return 0;
}

int run_attention(Reader a, int threads) {
    AttentionArgs p;
    p.q = a, p.k = a, p.v = a, p.k_cache = a, p.v_cache = a, p.out = a;
    p.slots = a, p.query_start = a, p.seq_lens = a, p.tables = a;
    p.tokens = a, p.sequences = a, p.table_width = a, p.block_size = a;
    p.q_token = a, p.q_head = a, p.k_token = a, p.k_head = a, p.v_token = a, p.v_head = a;
    p.heads = a, p.kv_heads = a, p.dim = a, p.v_dim = a;
    p.window = a, p.scale = a, p.softcap = a;
    const int int8_cache = a;
    p.int8_cache = int8_cache;
    attention(p, threads);
    return 0;
}

struct Row {
    const char* name;
    int arguments;
    Op run;
};

constexpr int MOST_ARGUMENTS = 32;
constexpr Row OPS[] = {
    {"gather_rows", 6, gather_rows},   {"rms_norm", 16, run_rms_norm}, {"layer_norm", 16, run_layer_norm},
    {"gated", 11, run_gated},          {"rope", 10, run_rope},         {"add", 7, run_add},
    {"quantize", 7, run_quantize},     {"linear_w8a8", 12, run_linear_w8a8},
    {"linear_w4a8", 13, run_linear_w4a8},
    {"linear_w8a16", 11, run_linear_w8a16},
    {"attention", 28, run_attention},
    {"rope_table", 7, run_rope_table},
};
constexpr int COUNT = sizeof OPS / sizeof OPS[0];

int64_t resolve(const Argument& a, const int64_t* sizes, const int64_t* inputs, const int64_t* arenas) {
    switch (a.source) {
        case Source::size: return sizes[a.index] * a.value;
        case Source::input: return inputs[a.index] + a.offset;
        case Source::arena: return arenas[a.index] + sizes[a.index] * a.value + a.offset;
        default: return a.value;
    }
}

}  // namespace
}  // namespace optkit

// The op's index in the table, or -1, and how many arguments it takes.
OPTKIT_API int optkit_program_op(const char* name, int* arguments) {
    for (int i = 0; i < optkit::COUNT; ++i)
        if (std::strcmp(optkit::OPS[i].name, name) == 0) {
            *arguments = optkit::OPS[i].arguments;
            return i;
        }
    return -1;
}

// Runs `count` calls. Gives 0, or 1 + the index of the call that met an index out of range; what follows was not run.
OPTKIT_API int64_t optkit_run_program(const optkit::Call* calls, int64_t count, const optkit::Argument* arguments,
                                      const int64_t* sizes, const int64_t* inputs, const int64_t* arenas,
                                      int threads) {
    int64_t values[optkit::MOST_ARGUMENTS];
    for (int64_t i = 0; i < count; ++i) {
        const optkit::Row& row = optkit::OPS[calls[i].op];
        for (int a = 0; a < row.arguments; ++a)
            values[a] = optkit::resolve(arguments[calls[i].first + a], sizes, inputs, arenas);
        if (row.run(optkit::Reader(values), threads)) return i + 1;
    }
    return 0;
}
