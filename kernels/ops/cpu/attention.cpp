// Paged attention over a float32 or int8 KV cache: reference.attention in one call, cache write included.
//
// Work is cut into items: some query tokens of one sequence under one KV head, so keys and values are read once for
// all query heads of the group. Within an item attention_tile.h runs the online softmax (arXiv 2205.14135) over tiles
// of keys.
//
// Batch invariance. The bits of an output row of finite numbers depend on its query and on the keys and values of its
// sequence only, not on what else is in the batch, how the prompt was cut into chunks, or how many threads there are:
//   - tiles of 64 keys and splits of 256 keys (kTile, kSplit) start at fixed absolute positions;
//   - a score is one chain of multiply-adds over D, an output element one chain over the keys of a split, both in
//     order, whatever the number of rows in the register tile; masked keys add exact zeros;
//   - every row, prefill or decode, sums each split from nothing and adds the splits first to last.
//   - a row of a tree of guesses (AttentionArgs.positions) attends to its context and its ancestors, each at the place
//     that it has in its own sequence: the bits are those of a step with this branch alone.
// So one split is also the unit of parallel work when there are few queries, at no loss of invariance.
//
// Block-sparse prefill (attention_sparse.h) leaves tiles out, and so the bits of a row depend on the queries of its block
// of 64, too: a block is sparse where a call has all of it, else dense.
//
// An int8 cache holds D codes of a byte and their scale for each token and head, in rows or in the order of the products
// (attention_lines.h). Products are then of integers, which are exact: see attention_int8.h. Every token is attended
// through the cache, those of this call too, so chunks don't show here either.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "amx_tiles.h"
#include "quantize_row.h"
#include "scratch.h"
#include "simd_int8.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int kTile = 64;
constexpr int kSplit = 256;
constexpr int kMaxTileRows = 16;  // of the blocks of attention_tile.h
constexpr int kMaxRows = 192;     // rows of an item: enough to pay for transposing the keys
constexpr int kSplitRows = 24;    // items of more rows are cut along the keys only where there are fewer than threads
constexpr int kTurns = 4;  // of a thread: from here on it takes all heads of a split, which are neighbours in memory
constexpr int kCutItems = 64;     // where there are more items they are parallel enough, and parts would cost memory
constexpr int64_t kWorkAThread = 400'000;  // multiply-adds for which another thread pays: 10 us or so
constexpr int64_t kWritesAThread = 65'536;   // the same for floats written to the cache
constexpr float kLog2e = 1.44269504089f;
constexpr int kStride = 16;                  // of block-sparse prefill: tokens of a group
constexpr int kGroups = kTile / kStride;

alignas(64) constexpr float kLaneIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Problem : AttentionArgs {
    int group;             // query heads of a KV head
    int depth, width;      // dim to whole words of an int8 key, v_dim to whole vectors
    int depth_bytes;       // dim to whole vectors
    float to_exp2;         // what queries are multiplied by, so that weights are powers of 2 (or tanh's argument)
    int64_t k_row, v_row;  // bytes of one head of a token in the pools
    int v_scale;           // where in a row of int8 values the scale is
    bool limited;          // not all earlier keys are seen
    bool sparse;           // blocks of queries may choose tiles
    bool latent;           // values are parts of keys: v_cache is k_cache
    bool interleaved;      // int8 codes lie in the order of the products; see attention_lines.h
    bool writes_late;      // each sequence has one new token, which is written by the task that reads it
};

struct Item {
    int sequence, kv_head, count;
    int64_t token, position;  // of its first query: row of the batch, position in the sequence
    int64_t prefix = 0;       // tokens of a tree's sequence before this call
    bool is_tree = false;     // rows are nodes of a tree in preorder, stored in this order behind the prefix
    const int* path = nullptr;  // of a branch: the node at each depth, up to the last query's
};

// Unnormalized output [rows][width], largest score and sum of weights of each row.
struct Sums {
    float *out, *m, *l;
};

// A tile of keys in a layer's cache, by the position of its first key; no item: none.
struct Tile {
    const Item* item = nullptr;
    int64_t begin = 0;
    const void* cache = nullptr;
    bool operator==(const Tile& other) const {
        return item == other.item && begin == other.begin && cache == other.cache;
    }
};

// The rows of a tile that are still to be asked of memory. A head's part of a token is too short for the hardware to see
// the pattern, and decode has too little arithmetic to wait behind; so the rows of the next tile are asked for while one is
// packed. A core waits where too many are on their way at once.
struct Ahead {
    const int32_t* table = nullptr;  // of the blocks after the one at hand
    const char *key = nullptr, *value = nullptr;
    int64_t in_block = 0;  // tokens of the block at hand
    int kv_head = 0, left = 0;
};

// Codes of a tile in the order of the products, 16 tokens a pointer. Keys: words of four bytes of a key, 16 keys side by
// side. Values: words of one byte of four values, Dv words side by side.
struct Lines {
    const uint32_t* of[kTile / kLanes];
    int64_t step;  // words from four bytes of a key to the next four, or from four values to the next four
    int together;  // fours of values that lie a step apart, from a multiple of so many on
};

// What one thread needs for an item; see attention_tile.h for the layouts.
struct Scratch {
    float *q, *k, *v, *scores, *zeros;
    float *q_scale, *k_scale, *v_scale, *v_log, *v_inverse;  // these three lines are for an int8 cache
    int32_t* q_sums;
    uint8_t *weights, *halves;
    Sums part, total;
    Tile* asked;                              // the tile asked for last, whose rest is `ahead`; of the thread
    const char *keys[kTile] = {}, *values[kTile] = {};  // of rows; of interleaved tokens the first word
    uint8_t lanes[kTile] = {};                // of interleaved tokens: the byte of the words of `values`
    Lines key_lines = {}, value_lines = {};   // these three lines are for an int8 cache
    Lines next_keys = {}, next_values = {};   // of interleaved codes: what to ask memory for meanwhile
    bool scattered = false;                   // interleaved tokens lie anywhere: `keys` and `values` hold, no lines
    bool lines_ahead = false;                 // `next_keys` and `next_values` hold
    Tile following = {};                      // the first tile that the thread is likely to read after the item
    Ahead ahead = {};
    const uint8_t* selected = nullptr;        // the tiles to read, a byte each; null: all
};

// What a thread needs to select tiles; see attention_sparse.h for the layouts.
struct Selection {
    float *q, *k, *scores, *mass;
    int64_t stride;  // of scores
    int32_t* order;
    uint8_t* selected;
};

size_t sums_size(const Problem& p, int64_t rows) { return rows * p.width + (2 * rows + kLanes - 1) / kLanes * kLanes; }

Sums sums_at(const Problem& p, float* at, int64_t rows) {
    return {at, at + rows * p.width, at + rows * p.width + rows};
}

Scratch scratch_of_thread(const Problem& p, int64_t rows) {
    thread_local GrowingMemory buffer;
    thread_local Tile asked;
    const size_t depth = p.depth, width = p.width, sums = sums_size(p, rows);
    const size_t zeros = std::max({depth, width, size_t(kTile)});
    const size_t whole_blocks = (rows + kMaxTileRows - 1) / kMaxTileRows * kMaxTileRows;  // of whole lines each
    const size_t sizes[] = {whole_blocks * ((depth + 63) / 64 * 64), (depth + 16) * kTile, width * kTile,
                            kMaxTileRows * kTile, zeros, size_t(rows), kSplit, kSplit, kSplit, kSplit, size_t(rows),
                            kMaxTileRows * 2 * kTile / 4, 2 * size_t(p.depth_bytes) / 4, sums, sums};
    constexpr int count = sizeof sizes / sizeof *sizes;
    size_t total = 0;
    for (size_t size : sizes) total += (size + kLanes - 1) / kLanes * kLanes;
    float* at = buffer.at_least<float>(total);
    float* parts[count];
    for (int i = 0; i < count; ++i) {
        parts[i] = at;
        at += (sizes[i] + kLanes - 1) / kLanes * kLanes;
    }
    std::memset(parts[4], 0, zeros * sizeof(float));
    return {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], parts[7], parts[8], parts[9],
            reinterpret_cast<int32_t*>(parts[10]), reinterpret_cast<uint8_t*>(parts[11]),
            reinterpret_cast<uint8_t*>(parts[12]), sums_at(p, parts[13], rows), sums_at(p, parts[14], rows), &asked};
}

Selection selection_of_thread(const Problem& p, int64_t tiles) {
    thread_local GrowingMemory buffer;
    const int64_t stride = (tiles * kGroups + kLanes - 1) / kLanes * kLanes, all = (tiles + kLanes - 1) / kLanes * kLanes;
    const int64_t q = int64_t(p.group) * kTile * p.depth_bytes, k = int64_t(kTile) * p.depth_bytes;
    const int64_t scores = p.group * kGroups * stride;
    float* at = buffer.at_least<float>(q + k + scores + 3 * all);
    float *mass = at + q + k + scores, *order = mass + all, *selected = order + all;
    return {at, at + q, at + q + k, mass, stride, reinterpret_cast<int32_t*>(order), reinterpret_cast<uint8_t*>(selected)};
}

std::atomic<int64_t> tiles_read, tiles_seen;  // of blocks of queries with a selection

// Marks the fewest tiles with `cover` of the mass, the first, the last and the one before the last.
void choose_tiles(const Selection& s, int64_t tiles, float cover) {
    for (int64_t tile = 0; tile < tiles; ++tile) s.order[tile] = static_cast<int32_t>(tile);
    std::sort(s.order, s.order + tiles,
              [&](int32_t a, int32_t b) { return s.mass[a] != s.mass[b] ? s.mass[a] > s.mass[b] : a < b; });
    std::memset(s.selected, 0, tiles);
    float covered = 0.0f;
    for (int64_t i = 0; i < tiles && covered < cover; ++i) {
        s.selected[s.order[i]] = 1;
        covered += s.mass[s.order[i]];
    }
    s.selected[0] = s.selected[tiles - 1] = s.selected[tiles > 1 ? tiles - 2 : 0] = 1;
    tiles_read.fetch_add(std::count(s.selected, s.selected + tiles, 1), std::memory_order_relaxed);
    tiles_seen.fetch_add(tiles, std::memory_order_relaxed);
}

void clear(const Problem& p, const Item& item, const Sums& sums) {
    const int64_t rows = int64_t(item.count) * p.group;
    std::memset(sums.out, 0, rows * p.width * sizeof(float));
    std::memset(sums.l, 0, rows * sizeof(float));
    for (int64_t row = 0; row < rows; ++row) sums.m[row] = -INFINITY;
}

// The first key that the token at `position` sees.
OPTKIT_INLINE int64_t first_key(const Problem& p, int64_t position) {
    const int64_t first = p.window && position >= p.window ? position - p.window + 1 : 0;
    const int64_t chunk = p.chunk ? position / p.chunk * p.chunk : 0;
    return first > chunk ? first : chunk;
}

// True for an item whose queries choose the tiles that they read: a whole block, far enough from the first token.
bool is_sparse(const Problem& p, const Item& item) {
    return p.sparse && !item.is_tree && item.count == kTile && item.position % kTile == 0 && item.position >= p.sparse_from;
}

int64_t first_split(const Problem& p, const Item& item) {
    return first_key(p, item.is_tree ? item.prefix : item.position) / kSplit;
}
int64_t last_split(const Item& item) { return (item.position + item.count - 1) / kSplit; }

Sums part_of(const Problem& p, const Item& item, float* parts, int64_t split) {
    const int64_t rows = int64_t(item.count) * p.group;
    return sums_at(p, parts + (split - first_split(p, item)) * sums_size(p, rows), rows);
}

// Calls visit(j, row) for `count` tokens from position `begin`: row of the pool, counting heads.
template <class Visit>
OPTKIT_INLINE void each_key(const Problem& p, const Item& item, int64_t begin, int count, Visit visit) {
    const int32_t* table = p.tables + item.sequence * p.table_width;
    if (item.path) {
        for (int j = 0; j < count; ++j) {
            const int64_t depth = begin + j - item.prefix, at = depth < 0 ? begin + j : item.prefix + item.path[depth];
            visit(j, (table[at / p.block_size] * p.block_size + at % p.block_size) * p.kv_heads + item.kv_head);
        }
        return;
    }
    int64_t block = begin / p.block_size, offset = begin % p.block_size;
    for (int j = 0; j < count; ++block, offset = 0) {
        int64_t row = (table[block] * p.block_size + offset) * p.kv_heads + item.kv_head;
        for (; j < count && offset < p.block_size; ++j, ++offset, row += p.kv_heads) visit(j, row);
    }
}

#include "attention_lines.h"

// Where the keys and values of `count` tokens from position `begin` lie, in scratch.keys and scratch.values, and the
// scales of int8 ones; those of the rest of the last vector are zero. Of interleaved codes, their lines.
void locate(const Problem& p, const Item& item, int64_t begin, int count, Scratch& scratch) {
    if (p.interleaved)
        locate_lines(p, item, begin, count, scratch);
    else
        each_key(p, item, begin, count, [&](int j, int64_t row) {
            const char* key = static_cast<const char*>(p.k_cache) + row * p.k_row;
            const char* value = static_cast<const char*>(p.v_cache) + row * p.v_row;
            scratch.keys[j] = key;
            scratch.values[j] = value;
            if (!p.int8_cache) return;
            std::memcpy(scratch.k_scale + j, key + p.dim, sizeof(float));
            std::memcpy(scratch.v_scale + j, value + p.v_scale, sizeof(float));
        });
    for (int j = count; j % kLanes; ++j) scratch.k_scale[j] = scratch.v_scale[j] = 0.0f;
}

OPTKIT_INLINE void prefetch_row(const char* first, int64_t bytes) {
    constexpr int64_t kWord = sizeof(float);  // rows are whole words
    for (int64_t at = 0; at < bytes - kWord; at += kLine) __builtin_prefetch(first + at, 0, 2);
    __builtin_prefetch(first + bytes - kWord, 0, 2);
}

// Makes token `at` of a block the next one of `ahead`.
OPTKIT_INLINE void enter_block(const Problem& p, int64_t block, int64_t at, Ahead& ahead) {
    const int64_t row = (block * p.block_size + at) * p.kv_heads + ahead.kv_head;
    ahead.key = static_cast<const char*>(p.k_cache) + row * p.k_row;
    ahead.value = static_cast<const char*>(p.v_cache) + row * p.v_row;
    ahead.in_block = p.block_size - at;
}

// Starts loading the next `count` tokens of Scratch.ahead into the second-level cache. All of it is inlined, since GCC
// takes a function that only prefetches for one without effect and drops its calls.
OPTKIT_INLINE void fetch(const Problem& p, Scratch& scratch, int count) {
    Ahead ahead = scratch.ahead;
    if (count > ahead.left) count = ahead.left;
    for (ahead.left -= count; count > 0; --count, --ahead.in_block) {
        if (ahead.in_block == 0) enter_block(p, *ahead.table++, 0, ahead);
        prefetch_row(ahead.key, p.k_row);
        if (!p.latent) prefetch_row(ahead.value, p.v_row);
        ahead.key += p.kv_heads * p.k_row;
        ahead.value += p.kv_heads * p.v_row;
    }
    scratch.ahead = ahead;
}

// Makes `tile` the one that `fetch` asks for. The tokens of a branch of a tree don't follow one another: its tiles are
// read without.
OPTKIT_INLINE void look_ahead(const Problem& p, const Tile& tile, Scratch& scratch) {
    *scratch.asked = tile;
    scratch.ahead.left = 0;
    scratch.lines_ahead = tile.item && p.interleaved && !tile.item->path;
    if (!tile.item || tile.item->path) return;
    if (p.interleaved) return look_ahead_of_lines(p, tile, scratch);
    const int64_t left = tile.item->position + tile.item->count - tile.begin, block = tile.begin / p.block_size;
    const int32_t* table = p.tables + tile.item->sequence * p.table_width + block;
    scratch.ahead = {table + 1, nullptr, nullptr, 0, tile.item->kv_head, static_cast<int>(left < kTile ? left : kTile)};
    enter_block(p, *table, tile.begin % p.block_size, scratch.ahead);
}

// The depth of a node of a tree below the last known token, the first row of the sequence.
OPTKIT_INLINE int64_t depth_of(const Problem& p, int sequence, int64_t token) {
    return p.positions[token] - p.positions[p.query_start[sequence]];
}

// True where some new token of a sequence is not after the one before: a tree of guesses. Gaps make no tree.
bool is_tree(const Problem& p, int sequence) {
    const int64_t first = p.query_start[sequence], last = p.query_start[sequence + 1] - 1;
    bool chain = true;
    for (int64_t t = first + 1; p.positions && t <= last && chain; ++t) chain = p.positions[t] > p.positions[t - 1];
    return !chain;
}

// The branch that begins `row` rows into a tree's item: the rows up to the next that is no child of the row before it.
// Their ancestors, which may lie in other items, go to `path`.
Item branch_of(const Problem& p, const Item& item, int row, std::vector<int>& path) {
    const int64_t start = p.query_start[item.sequence], first = item.token + row;
    const int64_t depth = depth_of(p, item.sequence, first);
    int count = 1;
    while (row + count < item.count && depth_of(p, item.sequence, first + count) == depth + count) ++count;
    path.resize(depth + count);
    int64_t missing = depth;
    for (int64_t t = first - 1; t >= start && missing; --t)
        if (depth_of(p, item.sequence, t) == missing - 1) path[--missing] = static_cast<int>(t - start);
    for (int i = 0; i < count; ++i) path[depth + i] = static_cast<int>(first + i - start);
    return {item.sequence, item.kv_head, count, first, item.prefix + depth, item.prefix, false, path.data()};
}

// The entry points of attention_tile.h.
struct Functions {
    void (*write)(const Problem&, int64_t first, int64_t stop);
    void (*all)(const Problem&, const Item&, Scratch&);
    void (*part)(const Problem&, const Item&, int64_t, const Sums&, Scratch&);
    void (*merge)(const Problem&, const Item&, float*, Scratch&);
};

#define OPTKIT_BODY "attention_tile.h"
#define OPTKIT_INTEGERS
#define OPTKIT_TILED
#include "each_isa.h"

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

// Items of the queries at positions [from, to) of a sequence, whose first of the call is at `prefix`; the last first.
void add_range(const Problem& p, int sequence, int64_t prefix, int64_t from, int64_t to, int tokens, bool tree,
               Schedule& schedule) {
    const int64_t start = p.query_start[sequence] - prefix;
    if (from >= to) return;
    for (int64_t first = from + (to - from - 1) / tokens * tokens; first >= from; first -= tokens) {
        const int size = static_cast<int>(to - first < tokens ? to - first : tokens);
        for (int head = 0; head < p.kv_heads; ++head)
            schedule.items.push_back({sequence, head, size, start + first, first, prefix, tree});
    }
}

// Items of one sequence, the last queries first: they see most keys, and long work should start early. Where blocks may
// be sparse an item is a block, at a fixed position.
void add_items(const Problem& p, int sequence, int tokens, Schedule& schedule) {
    const int64_t end = p.seq_lens[sequence], prefix = end - p.query_start[sequence + 1] + p.query_start[sequence];
    const bool tree = is_tree(p, sequence);
    const int64_t least = p.sparse && !tree ? std::max(prefix, p.sparse_from) : end;
    const int64_t blocks = std::min(end, (least + kTile - 1) / kTile * kTile);
    add_range(p, sequence, prefix, blocks, end, kTile, tree, schedule);
    add_range(p, sequence, prefix, prefix, blocks, tokens, tree, schedule);
}

// Tasks of the items `first` and on, which are the KV heads of the same queries. Items of at most `cut_rows` rows are
// cut along the keys, and their heads take turns: a token's heads are neighbours in memory.
void add_tasks(const Problem& p, int first, int64_t cut_rows, Schedule& schedule) {
    const Item& item = schedule.items[first];
    const int64_t rows = int64_t(item.count) * p.group, from = first_split(p, item), to = last_split(item);
    const int64_t keys = item.position + item.count - first_key(p, item.position);
    const bool cut = rows <= cut_rows && from < to && !is_sparse(p, item);
    schedule.max_rows = rows > schedule.max_rows ? rows : schedule.max_rows;
    // 8: moving keys costs about as much as so many rows
    schedule.work += p.kv_heads * keys * (rows + 8) * (p.dim + p.v_dim);
    for (int head = 0; head < p.kv_heads; ++head) {
        schedule.left.push_back(static_cast<int>(to - from + 1));
        schedule.parts.push_back(schedule.parts_size);
        if (cut) schedule.parts_size += (to - from + 1) * sums_size(p, rows);
        if (!cut) schedule.tasks.push_back({first + head, -1});
    }
    for (int64_t split = from; cut && split <= to; ++split)
        for (int head = 0; head < p.kv_heads; ++head) schedule.tasks.push_back({first + head, split});
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
    // Latent KV has one KV head for all query heads: a single token of 128 heads is one item.
    const int64_t cut_rows = items < threads ? INT64_MAX : items <= kCutItems ? kSplitRows : 0;
    for (int i = 0; i < items; i += p.kv_heads) add_tasks(p, i, cut_rows, schedule);
    return schedule;
}

// The first tile that the task with this number reads; none where there is no such task.
Tile first_tile(const Problem& p, const Schedule& s, int64_t number) {
    if (number >= static_cast<int64_t>(s.tasks.size())) return {};
    const Task& task = s.tasks[number];
    const Item& item = s.items[task.item];
    const int64_t seen = first_key(p, item.position) / kTile * kTile;
    return {&item, task.split < 0 ? seen : std::max(task.split * kSplit, seen), p.k_cache};
}

// Runs a task. The thread that finishes the last split of an item adds up the parts, in their order: no thread waits.
void run_task(const Problem& p, Schedule& s, const Functions& f, const Task& task, float* parts, Scratch& scratch) {
    const Item& item = s.items[task.item];
    if (task.split < 0) return f.all(p, item, scratch);
    parts += s.parts[task.item];
    f.part(p, item, task.split, part_of(p, item, parts, task.split), scratch);
    if (__atomic_sub_fetch(&s.left[task.item], 1, __ATOMIC_ACQ_REL) == 0) f.merge(p, item, parts, scratch);
}

void run_alone(const Problem& p, Schedule& s, const Functions& f, float* parts) {
    if (p.slots && !p.writes_late) f.write(p, 0, p.tokens);
    Scratch scratch = scratch_of_thread(p, s.max_rows);
    for (size_t i = 0; i < s.tasks.size(); ++i) {
        scratch.following = first_tile(p, s, i + 1);
        run_task(p, s, f, s.tasks[i], parts, scratch);
    }
}

void run_together(const Problem& p, Schedule& s, const Functions& f, float* parts, int threads) {
    const bool write_alone = p.tokens * p.kv_heads * (p.dim + (p.latent ? 0 : p.v_dim)) < kWritesAThread;
    const auto write = [&](int64_t first, int64_t last) { f.write(p, first, last); };
    int64_t chunk = even_chunk(p.tokens, threads);
    if (p.interleaved) chunk = (chunk + kLanes - 1) / kLanes * kLanes;  // whole lines
    if (p.slots && !p.writes_late) parallel_for(p.tokens, chunk, write_alone ? 1 : threads, write);
    const int64_t tasks = static_cast<int64_t>(s.tasks.size());
    const int64_t at_once = tasks >= kTurns * threads * p.kv_heads ? p.kv_heads : 1;
    parallel_for(tasks, at_once, threads, [&](int64_t first, int64_t last) {
        Scratch scratch = scratch_of_thread(p, s.max_rows);
        for (int64_t i = first; i < last; ++i) {  // ranges take about as long, so threads take turns
            scratch.following = first_tile(p, s, i + 1 < last ? i + 1 : first + threads * at_once);
            run_task(p, s, f, s.tasks[i], parts, scratch);
        }
    });
}

Problem problem_of(const AttentionArgs& args) {
    Problem p;
    static_cast<AttentionArgs&>(p) = args;
    p.window = args.window > 0 ? args.window : 0;
    p.chunk = args.chunk > 0 ? args.chunk : 0;
    p.limited = p.window || p.chunk;
    p.sparse = args.sparse_cover > 0 && !p.limited && !args.slopes;
    p.group = args.heads / args.kv_heads;
    p.depth = args.int8_cache ? (args.dim + 3) / 4 * 4 : args.dim;
    p.width = (args.v_dim + kLanes - 1) / kLanes * kLanes;
    p.depth_bytes = (args.dim + kLanes - 1) / kLanes * kLanes;
    p.to_exp2 = args.softcap > 0 ? args.scale / args.softcap : args.scale * kLog2e;
    p.k_row = args.int8_cache ? args.dim + sizeof(float) : args.dim * sizeof(float);
    p.v_row = args.int8_cache ? args.v_dim + sizeof(float) : args.v_dim * sizeof(float);
    p.v_scale = args.v_dim;
    p.latent = !args.v_cache;
    if (p.latent) {
        p.v_cache = args.k_cache;
        p.v_row = p.k_row;
        p.v_scale = args.dim;
    }
    p.interleaved = interleaves(args);
    p.writes_late = args.slots != nullptr;
    for (int s = 0; s < args.sequences; ++s) p.writes_late &= args.query_start[s + 1] - args.query_start[s] == 1;
    return p;
}

}  // namespace

void attention(const AttentionArgs& args, int threads) {
    const Problem p = problem_of(args);
    Schedule& schedule = plan(p, threads);
    const int64_t useful = 1 + schedule.work / kWorkAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    thread_local GrowingMemory parts_buffer;
    float* parts = schedule.parts_size ? parts_buffer.at_least<float>(schedule.parts_size) : nullptr;
    if (threads > 1)
        run_together(p, schedule, functions_in_use(), parts, threads);
    else
        run_alone(p, schedule, functions_in_use(), parts);
}

}  // namespace optkit

// See reference.attention and AttentionArgs.
OPTKIT_API void optkit_attention(const float* q, const float* k, const float* v, void* k_cache, void* v_cache,
                                 const float* sinks, const float* slopes, float* out, const int64_t* slot_mapping,
                                 const int32_t* query_start, const int32_t* seq_lens, const int32_t* block_tables,
                                 int64_t tokens, int64_t sequences, int64_t table_width, int64_t block_size,
                                 int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token,
                                 int64_t v_head, int heads, int kv_heads, int dim, int v_dim, int64_t window,
                                 int64_t chunk, float scale, float softcap, float sparse_cover, int64_t sparse_from,
                                 int int8_cache, const int64_t* positions, int threads) {
    optkit::attention({q,            k,           v,          k_cache,         v_cache,     sinks,    slopes,
                       out,          slot_mapping, query_start, seq_lens,      block_tables, tokens,  sequences,
                       table_width,  block_size,  q_token,    q_head,          k_token,     k_head,   v_token,
                       v_head,       heads,       kv_heads,   dim,             v_dim,       window,   chunk,
                       scale,        softcap,     sparse_cover, sparse_from,  int8_cache != 0, positions},
                      threads);
}

// counts[0]: tiles of keys that blocks of queries with a selection have read so far; counts[1]: that they could have.
OPTKIT_API void optkit_sparse_tiles(int64_t* counts) {
    counts[0] = optkit::tiles_read.load(std::memory_order_relaxed);
    counts[1] = optkit::tiles_seen.load(std::memory_order_relaxed);
}
