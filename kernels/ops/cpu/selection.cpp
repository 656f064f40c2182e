// Attention over selected blocks of the KV cache: reference.selected_attention in one call.
//
// Four steps: K and V of the call go to the cache; spans that became full get their bounds; for each token that selects,
// the blocks to read under each KV head are chosen; and the kernel of attention.cpp runs with tables of the chosen blocks.
// A token that selects is a sequence of its own there, whose context is the chosen blocks in their order. So its bits
// depend on its query, its position and the keys of its sequence alone. Other tokens keep the table of their sequence.
#include "selection.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "quantize_row.h"
#include "scratch.h"
#include "simd_int8.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t kTokensAtOnce = 16;      // whose scores are in memory
constexpr int64_t kBlocksATask = 32;
constexpr int64_t kWorkAThread = 400'000;  // multiply-adds for which another thread pays: 10 us or so

struct SelectionFunctions {
    void (*write_span)(const char*, int64_t, int, int, bool, float*, int8_t*);
    void (*round_query)(const float*, int, float, Query&);
    void (*score_blocks)(const Bounds&, const int32_t*, int64_t, const Query*, int, float*, int64_t);
    void (*add_weights)(float*, int64_t, int64_t, float*);
};

#define OPTKIT_BODY "selection_rows.h"
#include "each_isa.h"

struct Problem {
    const AttentionArgs& args;
    Bounds bounds;
    const int32_t* prompt_lens;
    int64_t kept, min_context;  // blocks that a token reads
    int group;

    int64_t chosen() const { return kept - kFirstBlocks - kLastBlocks; }
};

// A token that selects.
struct Reader {
    int64_t token, position;
    int sequence;

    int64_t blocks(const Problem& p) const { return position / p.args.block_size + 1; }
    int64_t candidates(const Problem& p) const { return blocks(p) - kFirstBlocks - kLastBlocks; }
};

// The batch as the attention kernel sees it: sequences with a table for each KV head.
struct Batch {
    std::vector<Reader> readers;
    std::vector<int> owner;             // of each new sequence: the number of its reader, or -1 - the sequence it is part of
    std::vector<int32_t> starts, lengths, tables;
    int64_t width;
};

// The first token of sequence s, counted in the batch, that selects.
int64_t first_reader(const Problem& p, int s) {
    const int64_t start = p.args.query_start[s], stop = p.args.query_start[s + 1];
    const int64_t first = p.args.seq_lens[s] - (stop - start);
    if (p.args.block_size % kSpan) return stop;  // blocks with tokens outside of all spans
    const int64_t from = std::max({int64_t(p.prompt_lens[s]), p.min_context - 1, p.kept * p.args.block_size});
    return std::min(stop, start + std::max<int64_t>(from - first, 0));
}

void split(const Problem& p, Batch& batch) {
    batch.readers.clear();
    batch.owner.clear();
    batch.starts.assign(1, 0);
    batch.lengths.clear();
    batch.width = p.kept;
    for (int s = 0; s < p.args.sequences; ++s) {
        const int64_t start = p.args.query_start[s], stop = p.args.query_start[s + 1], length = p.args.seq_lens[s];
        const int64_t reader = first_reader(p, s);
        if (reader > start || start == stop) {
            batch.owner.push_back(-1 - s);
            batch.starts.push_back(static_cast<int32_t>(reader));
            batch.lengths.push_back(static_cast<int32_t>(start == stop ? length : length - (stop - reader)));
            batch.width = std::max(batch.width, p.args.table_width);
        }
        for (int64_t t = reader; t < stop; ++t) {
            const int64_t position = length - (stop - t), size = p.args.block_size;
            batch.owner.push_back(static_cast<int>(batch.readers.size()));
            batch.readers.push_back({t, position, s});
            batch.starts.push_back(static_cast<int32_t>(t + 1));
            batch.lengths.push_back(static_cast<int32_t>((p.kept - 1) * size + position % size + 1));
        }
    }
    batch.tables.assign(batch.owner.size() * p.args.kv_heads * batch.width, 0);
}

// Tables of tokens that read everything: their sequence's for each KV head.
void copy_tables(const Problem& p, Batch& batch) {
    for (size_t i = 0; i < batch.owner.size(); ++i)
        for (int head = 0; batch.owner[i] < 0 && head < p.args.kv_heads; ++head) {
            const int32_t* from = p.args.tables + (-1 - batch.owner[i]) * p.args.table_width;
            std::copy(from, from + p.args.table_width, &batch.tables[(i * p.args.kv_heads + head) * batch.width]);
        }
}

// Memory of the choice for kTokensAtOnce tokens.
struct Room {
    float *scores, *weights;  // [tokens, H, blocks * spans], [tokens, Hkv, blocks]
    int16_t* halves;          // [tokens, H, 2, D]
    Query* queries;           // [tokens, H]
    int64_t blocks;
};

// The numbers of the `count` largest of weights [n], ascending; of equal ones the earlier. NaN counts as nothing.
void largest_of(const float* weights, int64_t n, int64_t count, std::vector<int32_t>& chosen) {
    const auto key = [&](int32_t i) { return weights[i] > 0 ? weights[i] : 0.0f; };
    const auto before = [&](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; };
    chosen.resize(n);
    for (int64_t i = 0; i < n; ++i) chosen[i] = static_cast<int32_t>(i);
    std::nth_element(chosen.begin(), chosen.begin() + count, chosen.end(), before);
    chosen.resize(count);
    std::sort(chosen.begin(), chosen.end());
}

// The table of a reader under one KV head, from the scores of its queries.
void choose(const Problem& p, const SelectionFunctions& f, const Room& room, const Reader& reader, int64_t place, int head,
            int32_t* to) {
    thread_local std::vector<int32_t> chosen;
    const int64_t count = reader.candidates(p), blocks = reader.blocks(p), heads = p.args.heads;
    float* weights = room.weights + (place * p.args.kv_heads + head) * room.blocks;
    std::fill(weights, weights + count, 0.0f);
    for (int g = 0; g < p.group; ++g) {
        float* scores = room.scores + (place * heads + head * p.group + g) * room.blocks * p.bounds.spans;
        f.add_weights(scores, count, p.bounds.spans, weights);
    }
    const int32_t* table = p.args.tables + reader.sequence * p.args.table_width;
    largest_of(weights, count, p.chosen(), chosen);
    for (int64_t n = 0; n < kFirstBlocks; ++n) *to++ = table[n];
    for (int32_t n : chosen) *to++ = table[kFirstBlocks + n];
    for (int64_t n = blocks - kLastBlocks; n < blocks; ++n) *to++ = table[n];
}

void round_queries(const Problem& p, const SelectionFunctions& f, const Room& room, const Reader* readers, int64_t count) {
    const int64_t heads = p.args.heads, dim = p.args.dim;
    for (int64_t i = 0; i < count * heads; ++i) {
        const float* q = p.args.q + readers[i / heads].token * p.args.q_token + i % heads * p.args.q_head;
        room.queries[i].halves = room.halves + 2 * i * dim;
        f.round_query(q, p.args.dim, p.args.scale, room.queries[i]);
    }
}

// The tables of `count` readers, from the first of `readers` on.
void choose_tables(const Problem& p, const SelectionFunctions& f, const Room& room, Batch& batch, int64_t first,
                   int64_t count, const std::vector<int64_t>& place, int threads) {
    const Reader* readers = &batch.readers[first];
    const int64_t heads = p.args.heads, kv_heads = p.args.kv_heads;
    round_queries(p, f, room, readers, count);
    const int64_t parts = (room.blocks + kBlocksATask - 1) / kBlocksATask;
    const int64_t useful = 1 + count * room.blocks * p.bounds.spans * heads * p.args.dim * 2 / kWorkAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    parallel_for(count * parts, 1, threads, [&](int64_t from, int64_t to) {
        for (; from < to; ++from) {
            const int64_t i = from / parts, begin = from % parts * kBlocksATask, spans = p.bounds.spans;
            const int64_t some = std::min(kBlocksATask, readers[i].candidates(p) - begin);
            const int32_t* table = p.args.tables + readers[i].sequence * p.args.table_width + kFirstBlocks + begin;
            float* scores = room.scores + i * heads * room.blocks * spans + begin * spans;
            if (some > 0)
                f.score_blocks(p.bounds, table, some, room.queries + i * heads, p.group, scores, room.blocks * spans);
        }
    });
    parallel_for(count * kv_heads, 1, threads, [&](int64_t from, int64_t to) {
        for (; from < to; ++from) {
            const int64_t i = from / kv_heads, head = from % kv_heads;
            int32_t* table = &batch.tables[(place[first + i] * kv_heads + head) * batch.width];
            choose(p, f, room, readers[i], i, static_cast<int>(head), table);
        }
    });
}

Room room_for(const Problem& p, const Batch& batch) {
    thread_local GrowingMemory scores, weights, halves, queries;
    const int64_t tokens = std::min<int64_t>(kTokensAtOnce, batch.readers.size()), heads = tokens * p.args.heads;
    int64_t blocks = 0;
    for (const Reader& reader : batch.readers) blocks = std::max(blocks, reader.candidates(p));
    return {scores.at_least<float>(heads * blocks * p.bounds.spans),
            weights.at_least<float>(tokens * p.args.kv_heads * blocks), halves.at_least<int16_t>(heads * 2 * p.args.dim),
            queries.at_least<Query>(heads), blocks};
}

// Bounds of the spans whose last token is in the batch.
void write_bounds(const Problem& p, const SelectionFunctions& f, int threads) {
    const AttentionArgs& a = p.args;
    thread_local std::vector<int64_t> ends;
    ends.clear();
    for (int64_t t = 0; t < a.tokens; ++t) {
        const int64_t slot = a.slots[t], offset = slot < 0 ? 0 : slot % a.block_size;
        if (slot >= 0 && (offset + 1) % kSpan == 0) ends.push_back(slot);
    }
    const int64_t row = a.int8_cache ? a.dim + sizeof(float) : a.dim * sizeof(float);
    const auto* spans = &ends;  // of this thread, for all
    parallel_for(ends.size(), even_chunk(ends.size(), threads), threads, [&](int64_t first, int64_t last) {
        thread_local GrowingMemory memory;
        float* room = memory.at_least<float>(3 * a.dim);
        for (; first < last; ++first) {
            const int64_t slot = (*spans)[first], block = slot / a.block_size, offset = slot % a.block_size;
            const int64_t span = offset / kSpan, begin = slot + 1 - kSpan;
            for (int head = 0; head < a.kv_heads; ++head) {
                const char* keys = static_cast<const char*>(a.k_cache) + (begin * a.kv_heads + head) * row;
                f.write_span(keys, a.kv_heads * row, kSpan, a.dim, a.int8_cache, room, p.bounds.at(block, span, head));
            }
        }
    });
}

void attend(const Problem& p, Batch& batch, int threads) {
    AttentionArgs args = p.args;
    args.slots = nullptr;
    args.query_start = batch.starts.data();
    args.seq_lens = batch.lengths.data();
    args.tables = batch.tables.data();
    args.sequences = static_cast<int64_t>(batch.owner.size());
    args.table_width = batch.width;
    args.table_a_head = true;
    attention(args, threads);
}

void selected_attention(const Problem& p, int threads) {
    const SelectionFunctions f = functions_in_use();
    thread_local Batch batch;
    split(p, batch);
    if (batch.readers.empty()) {
        attention(p.args, threads);
        return write_bounds(p, f, threads);
    }
    write_to_cache(p.args, threads);
    write_bounds(p, f, threads);
    copy_tables(p, batch);
    std::vector<int64_t> place(batch.readers.size());
    for (size_t i = 0; i < batch.owner.size(); ++i)
        if (batch.owner[i] >= 0) place[batch.owner[i]] = static_cast<int64_t>(i);
    const Room room = room_for(p, batch);
    const auto count = static_cast<int64_t>(batch.readers.size());
    for (int64_t first = 0; first < count; first += kTokensAtOnce)
        choose_tables(p, f, room, batch, first, std::min(kTokensAtOnce, count - first), place, threads);
    attend(p, batch, threads);
}

}  // namespace
}  // namespace optkit

// See reference.selected_attention and AttentionArgs.
OPTKIT_API void optkit_selected_attention(const float* q, const float* k, const float* v, void* k_cache, void* v_cache,
                                          void* k_bounds, const float* sinks, float* out, const int64_t* slot_mapping,
                                          const int32_t* query_start, const int32_t* seq_lens,
                                          const int32_t* block_tables, const int32_t* prompt_lens, int64_t tokens,
                                          int64_t sequences, int64_t table_width, int64_t block_size, int64_t q_token,
                                          int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token,
                                          int64_t v_head, int heads, int kv_heads, int dim, int v_dim, float scale,
                                          float softcap, int64_t budget, int64_t min_context, float sparse_cover,
                                          int64_t sparse_from, int int8_cache, int threads) {
    using namespace optkit;
    const AttentionArgs args{q,         k,         v,        k_cache,  v_cache, sinks,       nullptr,
                             out,       slot_mapping, query_start, seq_lens, block_tables, tokens, sequences,
                             table_width, block_size, q_token,  q_head,   k_token, k_head,      v_token,
                             v_head,    heads,     kv_heads, dim,      v_dim,   0,           0,
                             scale,     softcap,   sparse_cover, sparse_from, int8_cache != 0};
    const int64_t row = 2 * dim + static_cast<int64_t>(sizeof(float)), token_bytes = (kv_heads * row + kSpan - 1) / kSpan;
    const Bounds bounds{static_cast<int8_t*>(k_bounds), block_size * token_bytes, block_size / kSpan, kv_heads, dim};
    const int64_t kept = std::max(budget / block_size, kFirstBlocks + kLastBlocks + 1);
    selected_attention({args, bounds, prompt_lens, kept, min_context, heads / kv_heads}, threads);
}
