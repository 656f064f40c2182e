// The pointwise ops around the matrix products, in float32: norms, gated activations, rotary embedding.
//
// Each op is a function of one row (a token), so rows have the same bits in any batch and by any number of threads.
// Threads share the rows only where there is work enough to pay for waking them; a decode step stays on its thread.
#include "pointwise.h"

#include <cmath>
#include <vector>

#include "quantize_row.h"
#include "simd.h"

namespace optkit {
namespace {

constexpr int64_t kElementsAThread = 65'536;  // for which waking another thread pays: 10 us or so

// Floats that live as long as the thread and grow rarely: a row that only its quantized form is wanted of.
float* scratch_row(int64_t width) {
    thread_local std::vector<float> row;
    if (static_cast<int64_t>(row.size()) < width) row.resize(width);
    return row.data();
}

struct RowFunctions {
    void (*rms_norm)(const Norm&, int64_t);
    void (*layer_norm)(const Norm&, int64_t);
    void (*rope)(const Rope&, int64_t);
    void (*add)(const Add&, int64_t);
    void (*gated[3])(const Gated&, int64_t);
};

#if OPTKIT_X86
namespace avx512 {
#define OPTKIT_TARGET OPTKIT_AVX512
using S = Avx512;
#include "vector_math.h"
#include "pointwise_rows.h"
#undef OPTKIT_TARGET
}  // namespace avx512
namespace avx2 {
#define OPTKIT_TARGET OPTKIT_AVX2
using S = Avx2;
#include "vector_math.h"
#include "pointwise_rows.h"
#undef OPTKIT_TARGET
}  // namespace avx2
#endif
namespace portable {
#define OPTKIT_TARGET
using S = Portable;
#include "vector_math.h"
#include "pointwise_rows.h"
#undef OPTKIT_TARGET
}  // namespace portable

RowFunctions row_functions() {
    switch (isa()) {
#if OPTKIT_X86
        case Isa::avx512_vnni: return avx512::row_functions();
        case Isa::avx2: return avx2::row_functions();
#endif
        default: return portable::row_functions();
    }
}

template <class Op>
void each_row(void (*row)(const Op&, int64_t), const Op& op, int64_t rows, int64_t elements, int threads) {
    const int64_t useful = elements / kElementsAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    if (threads <= 1) {
        for (int64_t r = 0; r < rows; ++r) row(op, r);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; ++r) row(op, r);
}

}  // namespace

void rms_norm(const Norm& op, int64_t rows, int threads) {
    each_row(row_functions().rms_norm, op, rows, rows * op.width, threads);
}

void layer_norm(const Norm& op, int64_t rows, int threads) {
    each_row(row_functions().layer_norm, op, rows, rows * op.width, threads);
}

void gated(const Gated& op, int64_t rows, Activation activation, int threads) {
    constexpr int64_t EXP = 4;  // an exp costs about 4 norms
    each_row(row_functions().gated[static_cast<int>(activation)], op, rows, EXP * rows * op.width, threads);
}

void rope(const Rope& op, int64_t rows, int threads) {
    each_row(row_functions().rope, op, rows, rows * op.heads * op.dim, threads);
}

void add(const Add& op, int64_t rows, int threads) {
    each_row(row_functions().add, op, rows, rows * op.width, threads);
}

}  // namespace optkit

// See reference.rms_norm and, where residual and total are not null, reference.add_rms_norm. x and residual [rows,
// width] with strides in floats; out and total contiguous; weight [width] or null.
OPTKIT_API void optkit_rms_norm(const float* x, const float* residual, const float* weight, float* out, float* total,
                                int64_t rows, int64_t width, int64_t x_stride, int64_t residual_stride, float eps,
                                float offset, int threads) {
    optkit::rms_norm({x, residual, weight, nullptr, out, total, width, x_stride, residual_stride, 1, eps, offset,
                      {}},
                     rows, threads);
}

// See reference.layer_norm. x [rows, width] with a stride; out contiguous; weight and bias [width] or null.
OPTKIT_API void optkit_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows,
                                  int64_t width, int64_t x_stride, float eps, int threads) {
    optkit::layer_norm({x, nullptr, weight, bias, out, nullptr, width, x_stride, 0, 1, eps, 0.0f, {}}, rows, threads);
}

// act(gate) * up: act 0 silu, 1 gelu, 2 gelu by tanh. gate and up [rows, width] with strides; out contiguous.
OPTKIT_API void optkit_gated(const float* gate, const float* up, float* out, int64_t rows, int64_t width,
                             int64_t gate_stride, int64_t up_stride, int activation, int threads) {
    optkit::gated({gate, up, out, width, gate_stride, up_stride, {}}, rows,
                  static_cast<optkit::Activation>(activation), threads);
}

// See reference.rope. x [rows, heads, dim] with strides, cos and sin [rows, dim] with one stride; out contiguous.
OPTKIT_API void optkit_rope(const float* x, const float* cos, const float* sin, float* out, int64_t rows,
                            int64_t heads, int64_t dim, int64_t x_token, int64_t x_head, int64_t table_stride,
                            int threads) {
    optkit::rope({x, cos, sin, out, heads, dim, x_token, x_head, table_stride}, rows, threads);
}
