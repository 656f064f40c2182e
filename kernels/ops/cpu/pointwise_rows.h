// The pointwise ops on one row. Included once an instruction set; see simd.h for OPTKIT_TARGET and S.
//
// Sums over a row run in four vectors, taken in turn and added in order at the end: a fixed order for a given width.

#include "activations.h"

// sum(square(x[i] - shift)) or, without `square`, sum(x[i]), for i < n. The tail is zeros in the same lanes.
template <bool square>
OPTKIT_TARGET float row_sum(const float* x, int64_t n, float shift) {
    const S::Vec by = S::all(shift);
    S::Vec acc[4] = {S::all(0.0f), S::all(0.0f), S::all(0.0f), S::all(0.0f)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
#pragma GCC unroll 4
        for (int a = 0; a < 4; ++a) {
            const S::Vec v = S::sub(S::load(x + i + a * kLanes), by);
            acc[a] = square ? S::fma(v, v, acc[a]) : S::add(acc[a], v);
        }
    for (; i + kLanes <= n; i += kLanes) {
        const S::Vec v = S::sub(S::load(x + i), by);
        acc[0] = square ? S::fma(v, v, acc[0]) : S::add(acc[0], v);
    }
    float total = S::sum(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])));
    for (; i < n; ++i) total += square ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
    return total;
}

// A vector at p of which `lanes`, or all 16, are there: the tail of a row goes through the code of the rest.
OPTKIT_TARGET OPTKIT_INLINE S::Vec get(const float* p, int64_t lanes) {
    return lanes >= kLanes ? S::load(p) : S::load_some(p, static_cast<int>(lanes));
}
OPTKIT_TARGET OPTKIT_INLINE void put(float* p, S::Vec a, int64_t lanes) {
    lanes >= kLanes ? S::store(p, a) : S::store_some(p, a, static_cast<int>(lanes));
}

OPTKIT_INLINE const float* input_row(const Norm& op, int64_t row) {
    if (op.parts == 1) return op.x + row * op.x_stride;
    return op.x + row / op.parts * op.x_stride + row % op.parts * op.width;
}

// Where an op writes its row: the output, or a scratch row that only `quantize_output` reads.
template <class Op>
OPTKIT_INLINE float* output_row(const Op& op, int64_t row) {
    return op.out ? op.out + row * op.width : scratch_row(op.width);
}

template <class Op>
OPTKIT_TARGET OPTKIT_INLINE void quantize_output(const Op& op, int64_t row, const float* out) {
    const Quantized& to = op.quantized;
    if (to.q) RowQuantizer<S>::row(out, op.width, to.group, to.q + row * op.width, to.scale + row * (op.width / to.group));
}

OPTKIT_TARGET inline void rms_norm_row(const Norm& op, int64_t row) {
    const int64_t n = op.width;
    const float* x = input_row(op, row);
    if (op.residual) {
        float* total = op.total + row * n;
        const float* residual = op.residual + row * op.residual_stride;
        for (int64_t i = 0; i < n; i += kLanes)
            put(total + i, S::add(get(residual + i, n - i), get(x + i, n - i)), n - i);
        x = total;
    }
    const S::Vec by = S::all(1.0f / sqrtf(row_sum<true>(x, n, 0.0f) / n + op.eps)), offset = S::all(op.offset);
    float* out = output_row(op, row);
    for (int64_t i = 0; i < n; i += kLanes) {
        S::Vec v = S::mul(get(x + i, n - i), by);
        if (op.weight) v = S::mul(S::add(get(op.weight + i, n - i), offset), v);
        put(out + i, v, n - i);
    }
    quantize_output(op, row, out);
}

OPTKIT_TARGET inline void layer_norm_row(const Norm& op, int64_t row) {
    const int64_t n = op.width;
    const float* x = input_row(op, row);
    const float mean = row_sum<false>(x, n, 0.0f) / n;
    const S::Vec center = S::all(mean), by = S::all(1.0f / sqrtf(row_sum<true>(x, n, mean) / n + op.eps));
    float* out = output_row(op, row);
    for (int64_t i = 0; i < n; i += kLanes) {
        S::Vec v = S::mul(S::sub(get(x + i, n - i), center), by);
        if (op.weight) v = S::mul(v, get(op.weight + i, n - i));
        if (op.bias) v = S::add(v, get(op.bias + i, n - i));
        put(out + i, v, n - i);
    }
    quantize_output(op, row, out);
}

template <Activation kind>
OPTKIT_TARGET void gated_row(const Gated& op, int64_t row) {
    const int64_t n = op.width;
    const float *gate = op.gate + row * op.gate_stride, *up = op.up + row * op.up_stride;
    float* out = output_row(op, row);
    for (int64_t i = 0; i < n; i += kLanes) {
        const S::Vec x = get(gate + i, n - i);
        put(out + i, S::mul(activated<kind>(x), get(up + i, n - i)), n - i);
    }
    quantize_output(op, row, out);
}

template <bool product>
OPTKIT_TARGET void pair_row(const Pair& op, int64_t row) {
    const int64_t n = op.width;
    const float *a = op.a + row * op.a_stride, *b = op.b + row * op.b_stride;
    float* out = op.out + row * n;
    for (int64_t i = 0; i < n; i += kLanes) {
        const S::Vec x = get(a + i, n - i), y = get(b + i, n - i);
        put(out + i, product ? S::mul(x, y) : S::add(x, y), n - i);
    }
}

OPTKIT_TARGET inline void softplus_row(const Softplus& op, int64_t row) {
    const int64_t n = op.width;
    const float* x = op.x + row * op.x_stride;
    float* out = op.out + row * n;
    for (int64_t i = 0; i < n; i += kLanes) {
        const S::Vec v = get(x + i, n - i);
        put(out + i, softplus(op.bias ? S::add(v, get(op.bias + i, n - i)) : v), n - i);
    }
}

// x cos + (-x2, x1) sin for one token: all its heads.
OPTKIT_TARGET inline void rope_row(const Rope& op, int64_t row) {
    const int64_t n = op.dim / 2;
    const float *cos = op.cos + row * op.cos_stride, *sin = op.sin + row * op.sin_stride;
    for (int64_t head = 0; head < op.heads; ++head) {
        const float* x = op.x + row * op.x_token + head * op.x_head;
        float* out = op.out + (row * op.heads + head) * op.dim;
        for (int64_t i = 0; i < n; i += kLanes) {
            const S::Vec a = get(x + i, n - i), b = get(x + n + i, n - i);
            const S::Vec first = S::mul(b, get(sin + i, n - i)), second = S::mul(a, get(sin + n + i, n - i));
            put(out + i, S::sub(S::mul(a, get(cos + i, n - i)), first), n - i);
            put(out + n + i, S::fma(b, get(cos + n + i, n - i), second), n - i);
        }
    }
}

OPTKIT_TARGET inline RowFunctions functions() {
    return {rms_norm_row, layer_norm_row, rope_row, pair_row<false>, pair_row<true>, softplus_row,
            {gated_row<Activation::silu>, gated_row<Activation::gelu>, gated_row<Activation::gelu_tanh>}};
}
