// Dynamic quantization of activations as an op of its own; quantize_row.h has the arithmetic.
#include "quantize_row.h"
#include "threads.h"

namespace {

struct Rows {
    const float* x;      // [rows][stride]
    int64_t stride;      // in floats
    uint8_t* q;          // [rows][columns]
    float* scale;        // [rows][columns / group]
    int64_t columns;
    int64_t group;
};

OPTKIT_INLINE void row_of(const Rows& p, int64_t row) {
    optkit::quantize_row(p.x + row * p.stride, p.columns, p.group, p.q + row * p.columns,
                         p.scale + row * (p.columns / p.group));
}

void quantize_portable(const Rows& p, int64_t row) { row_of(p, row); }
#if OPTKIT_X86
OPTKIT_AVX2 void quantize_avx2(const Rows& p, int64_t row) { row_of(p, row); }
OPTKIT_AVX512 void quantize_avx512(const Rows& p, int64_t row) {
    optkit::quantize_row_avx512(p.x + row * p.stride, p.columns, p.group, p.q + row * p.columns,
                                p.scale + row * (p.columns / p.group));
}
#endif

using Variant = void (*)(const Rows&, int64_t);

Variant variant() {
#if OPTKIT_X86
    if (optkit::base_isa() == optkit::Isa::avx512_vnni) return quantize_avx512;
    if (optkit::base_isa() == optkit::Isa::avx2) return quantize_avx2;
#endif
    return quantize_portable;
}

}  // namespace

// q [rows, columns] and scale [rows, columns / group] of x, whose rows are `x_stride` floats apart.
OPTKIT_API void optkit_quantize_per_token(const float* x, int64_t x_stride, uint8_t* q, float* scale, int64_t rows,
                                          int64_t columns, int64_t group, int threads) {
    const Rows p{x, x_stride, q, scale, columns, group};
    const Variant quantize = variant();
    if (rows * columns < 1 << 15) threads = 1;
    optkit::parallel_for(rows, optkit::even_chunk(rows, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) quantize(p, row);
    });
}
