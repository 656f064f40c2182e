// Paged attention over one layer's KV cache: the entry for callers in C++. attention.cpp has the kernel and says what
// its results depend on; reference.attention is the spec.
#pragma once

#include <cstdint>

namespace optkit {

// Pointers to tensors of the flattened batch (docs/architecture.md). Rows of q, k and v lie as far apart as the strides
// say, in floats, with the D of a head contiguous; everything else is contiguous.
struct AttentionArgs {
    const float *q, *k, *v;                             // [T, H, D], [T, Hkv, D], [T, Hkv, Dv]
    void *k_cache, *v_cache;                            // [blocks, block_size, Hkv, D or Dv] float32, or int8 codes;
                                                        // v and v_cache null: values are the first Dv of keys in k_cache
    const float *sinks, *slopes;                        // [H] or null
    float* out;                                         // [T, H, Dv]
    const int64_t* slots;                               // [T], of each token the slot that the table of its sequence names, and
                                                        // no other sequence reads; null: the cache holds K and V already
    const int32_t *query_start, *seq_lens, *tables;     // [S + 1], [S], [S, table_width]
    int64_t tokens, sequences, table_width, block_size; // T, S
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    int heads, kv_heads, dim, v_dim;                    // H, Hkv, D, Dv
    int64_t window, chunk;                              // 0: none
    float scale, softcap;                               // softcap 0: none
    float sparse_cover;                                 // 0: dense; see attention_sparse.h
    int64_t sparse_from;                                // position of the first block of queries that may be sparse
    bool int8_cache;                                    // D + 4 bytes for D codes and their float32 scale, in rows or
                                                        // interleaved (attention_lines.h)
    const int64_t* positions;                           // [T] for trees of guesses; null: rows follow one another
};

// Writes K and V of the new tokens to the cache and attends, with at most so many threads.
void attention(const AttentionArgs& args, int threads);

}  // namespace optkit
