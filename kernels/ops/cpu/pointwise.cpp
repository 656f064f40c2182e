// The pointwise ops around the matrix products, in float32: norms, gated activations, rotary embedding.
//
// Each op is a function of one row (a token), so rows have the same bits in any batch and by any number of threads.
// Threads share the rows only where there is work enough to pay for waking them; a decode step stays on its thread.
#include "pointwise.h"

#include <cmath>
#include <cstring>

#include "quantize_row.h"
#include "scratch.h"
#include "simd_int8.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t kElementsAThread = 65'536;  // for which waking another thread pays: 10 us or so

// A row that only its quantized form is wanted of.
float* scratch_row(int64_t width) {
    thread_local GrowingMemory row;
    return row.at_least<float>(width);
}

// quantize_row by the instruction set of S.
template <class S>
struct RowQuantizer {
    static OPTKIT_INLINE void row(const float* x, int64_t columns, int64_t group, uint8_t* q, float* scale) {
        quantize_row(x, columns, group, q, scale);
    }
};
#if OPTKIT_X86
template <>
struct RowQuantizer<Avx512> {
    static OPTKIT_AVX512 OPTKIT_INLINE void row(const float* x, int64_t columns, int64_t group, uint8_t* q, float* scale) {
        quantize_row_avx512(x, columns, group, q, scale);
    }
};
#endif

struct RowFunctions {
    void (*rms_norm)(const Norm&, int64_t);
    void (*layer_norm)(const Norm&, int64_t);
    void (*rope)(const Rope&, int64_t);
    void (*add)(const Pair&, int64_t);
    void (*multiply)(const Pair&, int64_t);
    void (*softplus)(const Softplus&, int64_t);
    void (*gated[3])(const Gated&, int64_t);
};

#define OPTKIT_BODY "pointwise_rows.h"
#include "each_isa.h"

// The angle is rounded to float, as the spec has it; its sine and cosine are those of the C library in double.
void rope_table_row(const RopeTable& op, int64_t row) {
    float *cos = op.cos + row * 2 * op.half, *sin = op.sin + row * 2 * op.half;
    const float position = static_cast<float>(op.positions[row]);
    for (int64_t i = 0; i < op.half; ++i) {
        const float angle = position * op.inv_freq[i];
        cos[i] = cos[op.half + i] = static_cast<float>(std::cos(static_cast<double>(angle))) * op.scale;
        sin[i] = sin[op.half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * op.scale;
    }
}

template <class Op>
void each_row(void (*row)(const Op&, int64_t), const Op& op, int64_t rows, int64_t elements, int threads) {
    const int64_t useful = elements / kElementsAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    parallel_for(rows, even_chunk(rows, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) row(op, r);
    });
}

}  // namespace

void rms_norm(const Norm& op, int64_t rows, int threads) {
    each_row(functions_in_use().rms_norm, op, rows, rows * op.width, threads);
}

void layer_norm(const Norm& op, int64_t rows, int threads) {
    each_row(functions_in_use().layer_norm, op, rows, rows * op.width, threads);
}

void gated(const Gated& op, int64_t rows, Activation activation, int threads) {
    constexpr int64_t EXP = 4;  // an exp costs about 4 norms
    each_row(functions_in_use().gated[static_cast<int>(activation)], op, rows, EXP * rows * op.width, threads);
}

void rope(const Rope& op, int64_t rows, int threads) {
    each_row(functions_in_use().rope, op, rows, rows * op.heads * op.dim, threads);
}

void rope_table(const RopeTable& op, int64_t rows, int threads) {
    constexpr int64_t ANGLE = 64;  // sine and cosine cost about as much as so many additions
    each_row(rope_table_row, op, rows, ANGLE * rows * op.half, threads);
}

void add(const Pair& op, int64_t rows, int threads) {
    each_row(functions_in_use().add, op, rows, rows * op.width, threads);
}

void multiply(const Pair& op, int64_t rows, int threads) {
    each_row(functions_in_use().multiply, op, rows, rows * op.width, threads);
}

void softplus(const Softplus& op, int64_t rows, int threads) {
    constexpr int64_t EXP_AND_LOG = 8;  // as many additions
    each_row(functions_in_use().softplus, op, rows, EXP_AND_LOG * rows * op.width, threads);
}

}  // namespace optkit

// See reference.rms_norm and, where residual and total are not null, reference.add_rms_norm. x and residual [rows,
// width] with strides in floats; out and total contiguous; weight [width] or null. `parts`, q, scale and group: see Norm.
OPTKIT_API void optkit_rms_norm(const float* x, const float* residual, const float* weight, float* out, float* total,
                                int64_t rows, int64_t width, int64_t x_stride, int64_t residual_stride,
                                int64_t parts, float eps, float offset, uint8_t* q, float* scale, int64_t group,
                                int threads) {
    optkit::rms_norm({x, residual, weight, nullptr, out, total, width, x_stride, residual_stride, parts, eps, offset,
                      {q, scale, group}},
                     rows, threads);
}

// See reference.layer_norm. x [rows, width] with a stride; out contiguous; weight and bias [width] or null.
OPTKIT_API void optkit_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows,
                                  int64_t width, int64_t x_stride, int64_t parts, float eps, uint8_t* q, float* scale,
                                  int64_t group, int threads) {
    optkit::layer_norm({x, nullptr, weight, bias, out, nullptr, width, x_stride, 0, parts, eps, 0.0f,
                        {q, scale, group}},
                       rows, threads);
}

// act(gate) * up: act 0 silu, 1 gelu, 2 gelu by tanh. gate and up [rows, width] with strides; out contiguous.
OPTKIT_API void optkit_gated(const float* gate, const float* up, float* out, int64_t rows, int64_t width,
                             int64_t gate_stride, int64_t up_stride, int activation, uint8_t* q, float* scale, int64_t group,
                             int threads) {
    optkit::gated({gate, up, out, width, gate_stride, up_stride, {q, scale, group}}, rows,
                  static_cast<optkit::Activation>(activation), threads);
}

// See reference.rope. x [rows, heads, dim], cos and sin [rows, dim] with strides; out contiguous.
OPTKIT_API void optkit_rope(const float* x, const float* cos, const float* sin, float* out, int64_t rows,
                            int64_t heads, int64_t dim, int64_t x_token, int64_t x_head, int64_t cos_stride,
                            int64_t sin_stride, int threads) {
    optkit::rope({x, cos, sin, out, heads, dim, x_token, x_head, cos_stride, sin_stride}, rows, threads);
}

// See reference.rope_table. positions [rows], inv_freq [half]; cos and sin [rows, 2 half] contiguous.
OPTKIT_API void optkit_rope_table(const int64_t* positions, const float* inv_freq, float* cos, float* sin, int64_t rows,
                                  int64_t half, float scale, int threads) {
    optkit::rope_table({positions, inv_freq, cos, sin, half, scale}, rows, threads);
}

// a + b, both [rows, width] with strides, 0 for a vector [width]; out contiguous.
OPTKIT_API void optkit_add(const float* a, const float* b, float* out, int64_t rows, int64_t width, int64_t a_stride,
                           int64_t b_stride, int threads) {
    optkit::add({a, b, out, width, a_stride, b_stride}, rows, threads);
}

// a * b, like optkit_add.
OPTKIT_API void optkit_multiply(const float* a, const float* b, float* out, int64_t rows, int64_t width,
                                int64_t a_stride, int64_t b_stride, int threads) {
    optkit::multiply({a, b, out, width, a_stride, b_stride}, rows, threads);
}

// See reference.softplus. x [rows, width] with a stride; bias [width] or null; out contiguous.
OPTKIT_API void optkit_softplus(const float* x, const float* bias, float* out, int64_t rows, int64_t width,
                                int64_t x_stride, int threads) {
    optkit::softplus({x, bias, out, width, x_stride}, rows, threads);
}

// Rows `index` [rows] of `table` [count, width]. Gives 1 where an index is out of range.
OPTKIT_API int optkit_gather_rows(const float* table, const int64_t* index, float* out, int64_t rows, int64_t count,
                                  int64_t width, int) {
    for (int64_t row = 0; row < rows; ++row) {
        if (index[row] < 0 || index[row] >= count) return 1;
        std::memcpy(out + row * width, table + index[row] * width, width * sizeof(float));
    }
    return 0;
}
