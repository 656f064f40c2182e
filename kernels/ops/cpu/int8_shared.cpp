// int8 layers whose input channels are shared by ranks, to the bits of the whole layer: quantization by a scale of the
// whole row, int32 sums of a part of the row, and their conversion to floats once they are added.
//
// The sums come from the kernels of linear_w8a8 with scales of 1: float(sum) is exact below 2^24, which products of
// MOST_CHANNELS channels do not reach. Wider weights are packed in pieces, whose sums are added as integers.
#include <algorithm>
#include <cmath>

#include "dispatch.h"
#include "int8.h"
#include "quantize_row.h"
#include "scratch.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t MOST_CHANNELS = 1024;  // 1024 * 127 * 128 < 2^24
constexpr int64_t SMALL = 1 << 15;       // elements that one thread takes alone

int threads_for(int64_t elements, int threads) { return elements < SMALL ? 1 : threads; }

struct Rows {
    const float* x;  // [rows][stride]
    int64_t stride, columns;
    float* most;     // [rows]: the largest |x|
    uint8_t* q;      // [rows][columns]; null: only `most` is computed
    float* scale;    // [rows]
};

OPTKIT_INLINE void row_of(const Rows& p, int64_t row) {
    const float* x = p.x + row * p.stride;
    if (p.q)
        quantize_by(x, p.columns, p.most[row], p.q + row * p.columns, p.scale + row);
    else
        p.most[row] = largest(x, p.columns);
}

void row_portable(const Rows& p, int64_t row) { row_of(p, row); }
#if OPTKIT_X86
OPTKIT_AVX2 void row_avx2(const Rows& p, int64_t row) { row_of(p, row); }
OPTKIT_AVX512 void row_avx512(const Rows& p, int64_t row) { row_of(p, row); }
#endif

using Variant = void (*)(const Rows&, int64_t);

Variant variant() {
#if OPTKIT_X86
    if (base_isa() == Isa::avx512_vnni) return row_avx512;
    if (base_isa() == Isa::avx2) return row_avx2;
#endif
    return row_portable;
}

template <class Row>
void for_rows(int64_t rows, int64_t columns, int threads, const Row& row_of) {
    threads = threads_for(rows * columns, threads);
    parallel_for(rows, even_chunk(rows, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) row_of(row);
    });
}

// The piece of a packed weight from channel `first` on: `k` channels of `n` rows.
int64_t piece_bytes(int64_t n, int64_t k) { return optkit_w8_bytes(n, k, 1); }

// float(sum) of `count` elements as int32, in place or added to `out`.
void add_sums(const float* sums, int32_t* out, int64_t count, bool first) {
    for (int64_t i = 0; i < count; ++i) {
        const auto sum = static_cast<int32_t>(sums[i]);
        out[i] = first ? sum : out[i] + sum;
    }
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// most [rows] = the largest |x| of each row; NaN is the largest.
OPTKIT_API void optkit_absmax_per_token(const float* x, int64_t x_stride, float* most, int64_t rows, int64_t columns,
                                        int threads) {
    const Rows p{x, x_stride, columns, most, nullptr, nullptr};
    for_rows(rows, columns, threads, [&p, run = variant()](int64_t row) { run(p, row); });
}

// optkit_quantize_per_token with the largest |x| of each row given: most [rows].
OPTKIT_API void optkit_quantize_by(const float* x, int64_t x_stride, const float* most, uint8_t* q, float* scale,
                                   int64_t rows, int64_t columns, int threads) {
    const Rows p{x, x_stride, columns, const_cast<float*>(most), q, scale};
    for_rows(rows, columns, threads, [&p, run = variant()](int64_t row) { run(p, row); });
}

// Bytes of a weight int8 [n, k] packed in pieces of MOST_CHANNELS channels.
OPTKIT_API int64_t optkit_w8_pieces_bytes(int64_t n, int64_t k) {
    int64_t bytes = 0;
    for (int64_t first = 0; first < k; first += MOST_CHANNELS)
        bytes += piece_bytes(n, std::min(MOST_CHANNELS, k - first));
    return bytes;
}

OPTKIT_API void optkit_pack_w8_pieces(const int8_t* weight, uint8_t* blob, int64_t n, int64_t k, int threads) {
    GrowingMemory copied;
    for (int64_t first = 0; first < k; first += MOST_CHANNELS) {
        const int64_t count = std::min(MOST_CHANNELS, k - first);
        auto* piece = copied.at_least<int8_t>(n * count);
        for (int64_t row = 0; row < n; ++row) std::copy_n(weight + row * k + first, count, piece + row * count);
        optkit_pack_w8(piece, blob, n, count, 1, threads);
        blob += piece_bytes(n, count);
    }
}

// reference.int8_sums of q [rows, k], k a multiple of 4, and a weight of optkit_pack_w8_pieces: out [rows, n].
OPTKIT_API void optkit_int8_sums(const uint8_t* q, int64_t q_stride, const uint8_t* weight, int32_t* out, int64_t rows,
                                 int64_t n, int64_t k, int threads) {
    thread_local GrowingMemory ones_memory, sums_memory;
    const int64_t padded = divide_up(n, PANEL) * PANEL, count = rows * n;
    auto* ones = ones_memory.at_least<float>(std::max(rows, padded));
    std::fill_n(ones, std::max(rows, padded), 1.0f);
    auto* sums = sums_memory.at_least<float>(count);
    for (int64_t first = 0; first < k; first += MOST_CHANNELS) {
        const int64_t channels = std::min(MOST_CHANNELS, k - first);
        Linear p = packed_linear(weight, reinterpret_cast<const uint8_t*>(ones), false, nullptr, sums, n, channels, 1);
        p.q = q + first, p.q_stride = q_stride, p.scale = ones;
        linear_w8a8(p, rows, channels, threads);
        add_sums(sums, out, count, first == 0);
        weight += piece_bytes(n, channels);
    }
}

// What linear_w8a8 makes of its int32 sums [rows, n]: times scale [rows] and weight_scale [n], plus bias, which may be null.
OPTKIT_API void optkit_dequantize_sums(const int32_t* sums, const float* scale, const float* weight_scale,
                                       const float* bias, float* out, int64_t rows, int64_t n, int threads) {
    for_rows(rows, n, threads, [&](int64_t row) {
        for (int64_t i = 0; i < n; ++i) {
            const float value = static_cast<float>(sums[row * n + i]) * (scale[row] * weight_scale[i]);
            out[row * n + i] = bias ? value + bias[i] : value;
        }
    });
}
