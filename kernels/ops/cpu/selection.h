// Attention over selected blocks of the KV cache: the parts of selection.cpp that do arithmetic on many numbers.
// reference.selected_attention is the spec.
#pragma once

#include <cstdint>

namespace optkit {

constexpr int kSpan = 8;                                 // tokens with common bounds: reference.BOUNDS_SPAN
constexpr int64_t kFirstBlocks = 1, kLastBlocks = 2;     // of a context, always read

// A pool of bounds: blocks of `block_bytes`, which begin with [spans][Hkv] rows: the upper and the lower bounds of a span of
// keys, D int8 each, and their float32 scale.
struct Bounds {
    int8_t* pool;
    int64_t block_bytes, spans;
    int kv_heads, dim;

    int64_t row() const { return 2 * dim + static_cast<int64_t>(sizeof(float)); }
    int8_t* at(int64_t block, int64_t span, int64_t head) const {
        return pool + block * block_bytes + (span * kv_heads + head) * row();
    }
};

// A query of one head, in steps: its positive and then its negative numbers [2][D], and what a step is worth as a score.
struct Query {
    int16_t* halves;
    float step;
};

}  // namespace optkit
