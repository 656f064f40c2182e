// Paged attention in float32: reference.attention in one call, cache write included.
//
// Work is cut into items: some query tokens of one sequence under one KV head, so keys and values are read once for
// all query heads of the group. Within an item attention_tile.h runs the online softmax (arXiv 2205.14135) over tiles of
// keys.
//
// Batch invariance. The bits of an output row depend on its query and on the keys and values of its sequence
// only, not on what else is in the batch, how the prompt was cut into chunks, or how many threads there are:
//   - tiles of 64 keys and splits of 256 keys (kTile, kSplit) start at fixed absolute positions;
//   - a score is one chain of multiply-adds over D, an output element one chain over the keys of a split, both in
//     order, whatever the number of rows in the register tile; masked keys add exact zeros;
//   - every row, prefill or decode, sums each split from nothing and adds the splits first to last.
// So one split is also the unit of parallel work when there are few queries, at no loss of invariance.
#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>

#include "simd.h"

namespace optkit {
namespace {

constexpr int kTile = 64;
constexpr int kSplit = 256;
constexpr int kMaxRows = 192;     // rows of an item: enough to pay for transposing the keys
constexpr int kSplitRows = 24;    // items of at most so many rows may be cut along the keys
constexpr int64_t kWorkAThread = 1'500'000;  // multiply-adds for which waking another thread pays: 30 us or so
constexpr int64_t kWritesAThread = 65'536;   // the same for floats written to the cache
constexpr float kLog2e = 1.44269504089f;

alignas(64) constexpr float kLaneIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Problem {
    const float *q, *k, *v;
    float *k_cache, *v_cache, *out;
    const int64_t* slots;
    const int32_t *query_start, *seq_lens, *tables;
    int64_t tokens, sequences, table_stride, block_size;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides in floats
    int group, kv_heads, dim, v_dim, width;                     // width: v_dim to whole vectors
    int64_t window;
    float scale, softcap;
};

struct Item {
    int sequence, kv_head, count;
    int64_t token, position;  // of its first query: row of the batch, position in the sequence
};

// Unnormalized output [rows][width], largest score and sum of weights of each row.
struct Sums {
    float *out, *m, *l;
};

// What one thread needs for an item; see attention_tile.h for the layouts.
struct Scratch {
    float *q, *k, *v, *scores, *zeros;
    Sums part, total;
    const float *keys[kTile], *values[kTile];
};

// Floats that live as long as the thread and grow rarely.
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    float* at_least(size_t floats) {
        if (floats > size_) {
            std::free(data_);
            size_ = 0;
            data_ = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
            if (!data_) throw std::bad_alloc();
            size_ = floats;
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

size_t sums_size(const Problem& p, int64_t rows) { return rows * p.width + (2 * rows + kLanes - 1) / kLanes * kLanes; }

Sums sums_at(const Problem& p, float* at, int64_t rows) {
    return {at, at + rows * p.width, at + rows * p.width + rows};
}

Scratch scratch_of_thread(const Problem& p, int64_t rows) {
    thread_local Buffer buffer;
    const size_t sizes[] = {rows * size_t(p.dim), size_t(p.dim) * kTile, size_t(kTile) * p.width, 6 * kTile,
                            size_t(p.dim), sums_size(p, rows), sums_size(p, rows)};
    size_t total = 0;
    for (size_t size : sizes) total += (size + kLanes - 1) / kLanes * kLanes;
    float* at = buffer.at_least(total);
    float* parts[7];
    for (int i = 0; i < 7; ++i) {
        parts[i] = at;
        at += (sizes[i] + kLanes - 1) / kLanes * kLanes;
    }
    std::memset(parts[4], 0, p.dim * sizeof(float));
    return {parts[0], parts[1], parts[2], parts[3], parts[4], sums_at(p, parts[5], rows), sums_at(p, parts[6], rows), {}, {}};
}

void clear(const Problem& p, const Item& item, const Sums& sums) {
    const int64_t rows = int64_t(item.count) * p.group;
    std::memset(sums.out, 0, rows * p.width * sizeof(float));
    std::memset(sums.l, 0, rows * sizeof(float));
    for (int64_t row = 0; row < rows; ++row) sums.m[row] = -INFINITY;
}

int64_t first_key(const Problem& p, int64_t position) {
    return p.window && position >= p.window ? position - p.window + 1 : 0;
}

int64_t first_split(const Problem& p, const Item& item) { return first_key(p, item.position) / kSplit; }
int64_t last_split(const Item& item) { return (item.position + item.count - 1) / kSplit; }

Sums part_of(const Problem& p, const Item& item, float* parts, int64_t split) {
    const int64_t rows = int64_t(item.count) * p.group;
    return sums_at(p, parts + (split - first_split(p, item)) * sums_size(p, rows), rows);
}

// Calls visit(j, row) for `count` tokens from position `begin`: row of the pool, counting heads.
template <class Visit>
OPTKIT_INLINE void each_key(const Problem& p, const Item& item, int64_t begin, int count, Visit visit) {
    const int32_t* table = p.tables + item.sequence * p.table_stride;
    int64_t block = begin / p.block_size, offset = begin % p.block_size;
    for (int j = 0; j < count; ++block, offset = 0) {
        int64_t row = (table[block] * p.block_size + offset) * p.kv_heads + item.kv_head;
        for (; j < count && offset < p.block_size; ++j, ++offset, row += p.kv_heads) visit(j, row);
    }
}

// Where the keys and values of `count` tokens from position `begin` lie, in scratch.keys and scratch.values.
void locate(const Problem& p, const Item& item, int64_t begin, int count, Scratch& scratch) {
    each_key(p, item, begin, count, [&](int j, int64_t row) {
        scratch.keys[j] = p.k_cache + row * p.dim;
        scratch.values[j] = p.v_cache + row * p.v_dim;
    });
}

// Start loading the tile at `begin` into the second-level cache. A head's part of a token is too short for the
// hardware to see the pattern, and decode has too little arithmetic to wait behind.
void prefetch(const Problem& p, const Item& item, int64_t begin) {
    const int64_t left = item.position + item.count - begin;
    if (left <= 0) return;
    each_key(p, item, begin, static_cast<int>(left < kTile ? left : kTile), [&](int, int64_t row) {
        for (int d = 0; d < p.dim; d += kLanes) __builtin_prefetch(p.k_cache + row * p.dim + d, 0, 2);
        for (int d = 0; d < p.v_dim; d += kLanes) __builtin_prefetch(p.v_cache + row * p.v_dim + d, 0, 2);
    });
}

#if OPTKIT_X86
namespace avx512 {
#define OPTKIT_TARGET OPTKIT_AVX512
using S = Avx512;
#include "vector_math.h"
#include "attention_tile.h"
#undef OPTKIT_TARGET
}  // namespace avx512
namespace avx2 {
#define OPTKIT_TARGET OPTKIT_AVX2
using S = Avx2;
#include "vector_math.h"
#include "attention_tile.h"
#undef OPTKIT_TARGET
}  // namespace avx2
#endif
namespace portable {
#define OPTKIT_TARGET
using S = Portable;
#include "vector_math.h"
#include "attention_tile.h"
#undef OPTKIT_TARGET
}  // namespace portable

struct Functions {
    void (*all)(const Problem&, const Item&, Scratch&);
    void (*part)(const Problem&, const Item&, int64_t, const Sums&, Scratch&);
    void (*merge)(const Problem&, const Item&, float*, Scratch&);
};

Functions functions() {
    switch (isa()) {
#if OPTKIT_X86
        case Isa::avx512_vnni: return {avx512::attend_all, avx512::attend_part, avx512::merge_parts};
        case Isa::avx2: return {avx2::attend_all, avx2::attend_part, avx2::merge_parts};
#endif
        default: return {portable::attend_all, portable::attend_part, portable::merge_parts};
    }
}

// One entry of the queue: a whole item (split < 0), or one of its splits with the place of its partial sums.
struct Task {
    int item;
    int64_t split;
};

struct Schedule {
    std::vector<Item> items;
    std::vector<Task> tasks;
    std::vector<int> left;        // of each item: splits to do, where it is cut along the keys
    std::vector<size_t> parts;    // of each item: where its partial sums start
    size_t parts_size;
    int64_t max_rows, work;
};

// Query tokens of an item: many, but so that there are some items for each thread.
int tokens_an_item(const Problem& p, int threads) {
    int tokens = kMaxRows / p.group < 1 ? 1 : kMaxRows / p.group;
    while (tokens > 16 && (p.tokens + tokens - 1) / tokens * p.kv_heads < 6 * threads) tokens = (tokens + 1) / 2;
    return tokens;
}

// Items of one sequence, the last queries first: they see most keys, and long work should start early.
void add_items(const Problem& p, int sequence, int tokens, Schedule& schedule) {
    const int64_t start = p.query_start[sequence], count = p.query_start[sequence + 1] - start;
    const int64_t prefix = p.seq_lens[sequence] - count;
    for (int64_t first = (count - 1) / tokens * tokens; count > 0 && first >= 0; first -= tokens) {
        const int size = static_cast<int>(count - first < tokens ? count - first : tokens);
        for (int head = 0; head < p.kv_heads; ++head)
            schedule.items.push_back({sequence, head, size, start + first, prefix + first});
    }
}

void add_tasks(const Problem& p, int item, bool may_cut, Schedule& schedule) {
    const Item& it = schedule.items[item];
    const int64_t rows = int64_t(it.count) * p.group, from = first_split(p, it), to = last_split(it);
    const int64_t keys = it.position + it.count - first_key(p, it.position);
    schedule.max_rows = rows > schedule.max_rows ? rows : schedule.max_rows;
    schedule.work += keys * (rows + 8) * (p.dim + p.v_dim);  // 8: moving keys costs about as much as so many rows
    schedule.parts.push_back(schedule.parts_size);
    schedule.left.push_back(static_cast<int>(to - from + 1));
    if (!may_cut || rows > kSplitRows || from == to) {
        schedule.tasks.push_back({item, -1});
        return;
    }
    for (int64_t split = from; split <= to; ++split) schedule.tasks.push_back({item, split});
    schedule.parts_size += (to - from + 1) * sums_size(p, rows);
}

Schedule& plan(const Problem& p, int threads) {
    thread_local Schedule schedule;
    schedule.items.clear();
    schedule.tasks.clear();
    schedule.left.clear();
    schedule.parts.clear();
    schedule.parts_size = schedule.max_rows = schedule.work = 0;
    const int tokens = tokens_an_item(p, threads);
    for (int s = 0; s < p.sequences; ++s) add_items(p, s, tokens, schedule);
    const int items = static_cast<int>(schedule.items.size());
    const bool may_cut = threads > 1 && items < 8 * threads;
    for (int i = 0; i < items; ++i) add_tasks(p, i, may_cut, schedule);
    return schedule;
}

void write_kv(const Problem& p, int64_t token) {
    const int64_t slot = p.slots[token] * p.kv_heads;
    for (int h = 0; h < p.kv_heads; ++h) {
        std::memcpy(p.k_cache + (slot + h) * p.dim, p.k + token * p.k_token + h * p.k_head, p.dim * sizeof(float));
        std::memcpy(p.v_cache + (slot + h) * p.v_dim, p.v + token * p.v_token + h * p.v_head, p.v_dim * sizeof(float));
    }
}

// Runs a task. Whoever finishes the last split of an item adds up its parts, in their order: no thread waits.
void run_task(const Problem& p, Schedule& s, const Functions& f, const Task& task, float* parts, Scratch& scratch) {
    const Item& item = s.items[task.item];
    if (task.split < 0) return f.all(p, item, scratch);
    parts += s.parts[task.item];
    f.part(p, item, task.split, part_of(p, item, parts, task.split), scratch);
    if (__atomic_sub_fetch(&s.left[task.item], 1, __ATOMIC_ACQ_REL) == 0) f.merge(p, item, parts, scratch);
}

void run_alone(const Problem& p, const Schedule& s, const Functions& f) {
    for (int64_t t = 0; t < p.tokens; ++t) write_kv(p, t);
    Scratch scratch = scratch_of_thread(p, s.max_rows);
    for (const Item& item : s.items) f.all(p, item, scratch);
}

// One parallel region with one barrier, two where there is much to write first: on a machine with other work each
// barrier may wait for a thread that isn't running.
void run_together(const Problem& p, Schedule& s, const Functions& f, int threads) {
    thread_local Buffer parts_buffer;
    float* parts = s.parts_size ? parts_buffer.at_least(s.parts_size) : nullptr;
    const int tasks = static_cast<int>(s.tasks.size());
    const bool write_alone = p.tokens * p.kv_heads * (p.dim + p.v_dim) < kWritesAThread;
    for (int64_t t = 0; write_alone && t < p.tokens; ++t) write_kv(p, t);
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch = scratch_of_thread(p, s.max_rows);
        if (!write_alone) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < p.tokens; ++t) write_kv(p, t);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int i = 0; i < tasks; ++i) run_task(p, s, f, s.tasks[i], parts, scratch);
    }
}

}  // namespace
}  // namespace optkit

// See reference.attention. q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] with the given strides in floats and contiguous
// heads; everything else contiguous. Caches [blocks, block_size, Hkv, D or Dv]; tables [S, table_width].
OPTKIT_API void optkit_attention(const float* q, const float* k, const float* v, float* k_cache, float* v_cache,
                                 float* out, const int64_t* slots, const int32_t* query_start,
                                 const int32_t* seq_lens, const int32_t* tables, int64_t tokens, int64_t sequences,
                                 int64_t table_width, int64_t block_size, int64_t q_token, int64_t q_head,
                                 int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int heads,
                                 int kv_heads, int dim, int v_dim, int64_t window, float scale, float softcap,
                                 int threads) {
    using namespace optkit;
    const int width = (v_dim + kLanes - 1) / kLanes * kLanes;
    const Problem p = {q,         k,          v,      k_cache, v_cache, out,     slots,            query_start,
                       seq_lens,  tables,     tokens, sequences, table_width, block_size, q_token,  q_head,
                       k_token,   k_head,     v_token, v_head, heads / kv_heads, kv_heads, dim,    v_dim,
                       width,     window > 0 ? window : 0, scale, softcap};
    Schedule& schedule = plan(p, threads);
    const int64_t useful = 1 + schedule.work / kWorkAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    if (threads > 1)
        run_together(p, schedule, functions(), threads);
    else
        run_alone(p, schedule, functions());
}
