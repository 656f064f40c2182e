// The pointwise ops around the matrix products, in float32: norms, gated activations, rotary embedding.
//
// Each op is a function of one row (a token), so rows have the same bits in any batch and by any number of threads.
// Threads share the rows only where there is work enough to pay for waking them; a decode step stays on its thread.
#include <cmath>

#include "simd.h"

namespace optkit {
namespace {

constexpr int64_t kElementsAThread = 65'536;  // for which waking another thread pays: 10 us or so

// rms_norm, or add_rms_norm where `residual` is set, or layer_norm. Null weights and biases are none.
struct Norm {
    const float *x, *residual, *weight, *bias;
    float *out, *total;
    int64_t width, x_stride, residual_stride;
    float eps, offset;
};

enum class Activation { silu, gelu, gelu_tanh };

struct Gated {
    const float *gate, *up;
    float* out;
    int64_t width, gate_stride, up_stride;
};

struct Rope {
    const float *x, *cos, *sin;
    float* out;
    int64_t heads, dim, x_token, x_head, table_stride;
};

struct RowFunctions {
    void (*rms_norm)(const Norm&, int64_t);
    void (*layer_norm)(const Norm&, int64_t);
    void (*rope)(const Rope&, int64_t);
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
}  // namespace optkit

// See reference.rms_norm and, where residual and total are not null, reference.add_rms_norm. x and residual [rows,
// width] with strides in floats; out and total contiguous; weight [width] or null.
OPTKIT_API void optkit_rms_norm(const float* x, const float* residual, const float* weight, float* out, float* total,
                                int64_t rows, int64_t width, int64_t x_stride, int64_t residual_stride, float eps,
                                float offset, int threads) {
    using namespace optkit;
    const Norm op = {x, residual, weight, nullptr, out, total, width, x_stride, residual_stride, eps, offset};
    each_row(row_functions().rms_norm, op, rows, rows * width, threads);
}

// See reference.layer_norm. x [rows, width] with a stride; out contiguous; weight and bias [width] or null.
OPTKIT_API void optkit_layer_norm(const float* x, const float* weight, const float* bias, float* out, int64_t rows,
                                  int64_t width, int64_t x_stride, float eps, int threads) {
    using namespace optkit;
    const Norm op = {x, nullptr, weight, bias, out, nullptr, width, x_stride, 0, eps, 0.0f};
    each_row(row_functions().layer_norm, op, rows, rows * width, threads);
}

// act(gate) * up: act 0 silu, 1 gelu, 2 gelu by tanh. gate and up [rows, width] with strides; out contiguous.
OPTKIT_API void optkit_gated(const float* gate, const float* up, float* out, int64_t rows, int64_t width,
                             int64_t gate_stride, int64_t up_stride, int activation, int threads) {
    using namespace optkit;
    const Gated op = {gate, up, out, width, gate_stride, up_stride};
    each_row(row_functions().gated[activation], op, rows, 4 * rows * width, threads);  // an exp costs about 4 norms
}

// See reference.rope. x [rows, heads, dim] with strides, cos and sin [rows, dim] with one stride; out contiguous.
OPTKIT_API void optkit_rope(const float* x, const float* cos, const float* sin, float* out, int64_t rows,
                            int64_t heads, int64_t dim, int64_t x_token, int64_t x_head, int64_t table_stride,
                            int threads) {
    using namespace optkit;
    const Rope op = {x, cos, sin, out, heads, dim, x_token, x_head, table_stride};
    each_row(row_functions().rope, op, rows, rows * heads * dim, threads);
}
