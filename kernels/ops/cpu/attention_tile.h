// One work item of paged attention: some query tokens of one sequence, under one KV head. Included once an instruction
// set; see simd.h for OPTKIT_TARGET and S, and attention.cpp for Problem, Item, Scratch and the order of sums.
//
// Rows are the item's queries, token-major: row = token * group + head in the group. They are taken in blocks of
// `kRows`, whose scores against a tile of 64 keys fit the registers. What differs between the kinds of cache is how
// queries, keys and values are packed and multiplied: attention_float.h and attention_int8.h.
//   Scratch.scores [kRows][64]
//   Sums           [rows][Dv to 16], m, l    unnormalized output, largest score and sum of weights of each row

constexpr int kRows = S::tile_rows;
static_assert(kRows <= kMaxTileRows, "Scratch is sized for the largest register tile");
constexpr int kTileVecs = kTile / kLanes;

// What a block of rows needs to know about the tile at hand. Positions count from the tile's first key.
struct Block {
    int rows, first_row, kv_head;
    int64_t first, last;  // positions of the first and the last row's token
    int64_t begin;        // of the tile, in the sequence
    int vecs;             // vectors of keys to look at
    int start, stop;      // keys that any row may see
};

// Caps scores, and adds `more` [64] to each row's.
OPTKIT_TARGET inline void soft_cap(float* scores, int rows, int vecs, float cap, const float* more) {
    const float to_exp2 = cap * kLog2e;  // the exponential that follows has base 2
    for (int r = 0; r < rows; ++r)
        for (int n = 0; n < vecs; ++n) {
            float* s = scores + r * kTile + n * kLanes;
            S::store(s, S::fma(tanh(S::load(s)), S::all(to_exp2), S::load(more + n * kLanes)));
        }
}

// The position of row r's token, from the tile's first key.
OPTKIT_INLINE int64_t position_of(const Problem& p, const Block& block, int r) {
    return block.first + (block.first_row + r) / p.group - block.first_row / p.group;
}

// Adds slope * (key - query), positions both, to the scores of each row (ALiBi, arXiv 2108.12409). Distances are exact.
OPTKIT_TARGET inline void add_distances(const Problem& p, const Block& block, float* scores) {
    for (int r = 0; r < block.rows; ++r) {
        const float query = static_cast<float>(position_of(p, block, r));
        const S::Vec slope = S::all(p.slopes[block.kv_head * p.group + (block.first_row + r) % p.group] * kLog2e);
        for (int n = 0; n < block.vecs; ++n) {
            float* s = scores + r * kTile + n * kLanes;
            const S::Vec distance = S::add(S::load(kLaneIndex), S::all(static_cast<float>(n * kLanes) - query));
            S::store(s, S::fma(slope, distance, S::load(s)));
        }
    }
}

// Scores of keys outside [lo, hi] become -inf.
OPTKIT_TARGET inline void mask_row(float* scores, int vecs, float lo, float hi) {
    const S::Vec none = S::all(-__builtin_inff());
    for (int n = 0; n < vecs; ++n) {
        const S::Vec key = S::add(S::load(kLaneIndex), S::all(static_cast<float>(n * kLanes)));
        const S::Vec s = S::load(scores + n * kLanes);
        const S::Vec seen = S::where_less(key, S::all(lo), none, s);
        S::store(scores + n * kLanes, S::where_less(S::all(hi), key, none, seen));
    }
}

// Rows whose limits differ within the tile: the diagonal of the causal mask, and the edge of the window.
OPTKIT_TARGET inline void mask_block(const Problem& p, const Block& block, float* scores) {
    const bool from_first = !p.limited || first_key(p, block.begin + block.last) <= block.begin;
    if (from_first && block.first >= block.vecs * kLanes - 1) return;
    for (int r = 0; r < block.rows; ++r) {
        const int64_t at = position_of(p, block, r);
        const float lo = p.limited ? static_cast<float>(first_key(p, block.begin + at) - block.begin) : 0.0f;
        mask_row(scores + r * kTile, block.vecs, lo, static_cast<float>(at));
    }
}

// Sixteen words of bytes, signed to unsigned or back.
OPTKIT_TARGET OPTKIT_INLINE void flip_signs(void* words) { I::store(words, I::flip_signs(I::load(words))); }

// Word w of rows[r], XOR `flip` in all bytes, to to[w * stride + r] of 16 rows of so many words, whose pointers move to their
// end. `Vectors` is S: what depends on it is compiled for one that has it.
template <class Vectors>
OPTKIT_TARGET OPTKIT_INLINE void transpose_rows(const char* (&rows)[kLanes], int words, float* to, int64_t stride, bool flip) {
    int w = 0;
    if constexpr (Vectors::transposes_lines)
        for (; w + kLanes <= words; w += kLanes, to += kLanes * stride) {
            Vectors::transpose_lines(rows, to, static_cast<int>(stride), flip ? 0x80808080u : 0u);
            for (auto& row : rows) row += kLanes * sizeof(float);
        }
    for (; w + 4 <= words; w += 4, to += 4 * stride) {
        S::Vec columns[4];
        S::transpose(rows, columns);
        for (int c = 0; c < 4; ++c) S::store(to + c * stride, columns[c]);
        for (int c = 0; flip && c < 4; ++c) flip_signs(to + c * stride);
        for (auto& row : rows) row += 4 * sizeof(float);
    }
    for (; w < words; ++w, to += stride) {
        for (int i = 0; i < kLanes; ++i, rows[i - 1] += sizeof(float)) std::memcpy(to + i, rows[i], sizeof(float));
        if (flip) flip_signs(to);
    }
}

// Scratch.k [words][64] from `count` keys of so many words, with `flip` of unsigned bytes; the rest of the last vector is
// zero. Asks for as many tokens of the next tile.
OPTKIT_TARGET inline void transpose_words(const Problem& p, int words, int count, bool flip, Scratch& scratch) {
    for (int j = 0; j < count; j += kLanes) {
        const char* rows[kLanes];
        for (int i = 0; i < kLanes; ++i)
            rows[i] = j + i < count ? scratch.keys[j + i] : reinterpret_cast<const char*>(scratch.zeros);
        fetch(p, scratch, kLanes);
        transpose_rows<S>(rows, words, scratch.k + j, kTile, flip);
    }
}

// The rows of the item from `row` on, at most so many, beside the tile at `begin` of `count` keys.
OPTKIT_INLINE Block block_of(const Problem& p, const Item& item, int64_t begin, int count, int row, int most) {
    Block block;
    const int left = item.count * p.group - row;
    block.rows = left < most ? left : most;
    block.first_row = row;
    block.kv_head = item.kv_head;
    block.begin = begin;
    block.first = item.position + row / p.group - begin;
    block.last = item.position + (row + block.rows - 1) / p.group - begin;
    block.stop = static_cast<int>(block.last < count ? block.last + 1 : count);
    const int64_t start = p.limited ? first_key(p, begin + block.first) - begin : 0;
    block.start = start > 0 ? static_cast<int>(start < kTile ? start : kTile) : 0;
    block.vecs = (block.stop + kLanes - 1) / kLanes;
    return block;
}

// The keys of the tile at `begin` that some row of the item sees, or all before the first row.
OPTKIT_INLINE int keys_of(const Item& item, int64_t begin) {
    const int64_t left = item.position + item.count - begin;
    return static_cast<int>(left < kTile ? left : kTile);
}

inline const float* query_of(const Problem& p, const Item& item, int row) {
    const int64_t token = item.token + row / p.group, head = item.kv_head * p.group + row % p.group;
    return p.q + token * p.q_token + head * p.q_head;
}

#include "attention_float.h"
#include "attention_int8.h"
#include "attention_sparse.h"
#ifdef OPTKIT_TILES
#include "attention_amx.h"
#endif

// Calls attend for one block of rows, whose number becomes a constant.
template <class Kind, int R = kRows>
OPTKIT_TARGET void attend_block(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
    if (block.rows == R) return Kind::template attend<R>(p, block, scratch, sums);
    if constexpr (R > 1) attend_block<Kind, R - 1>(p, block, scratch, sums);
}

OPTKIT_TARGET inline void pack_queries(const Problem& p, const Item& item, Scratch& scratch) {
#ifdef OPTKIT_TILES
    if (OnTiles::takes(p, item)) return OnTiles::pack_queries(p, item, scratch);
#endif
    p.int8_cache ? OnInt8::pack_queries(p, item, scratch) : OnFloat::pack_queries(p, item, scratch);
}

// All rows of the item against the tile of keys that starts at `begin`; the thread reads `next` after it. Few rows have too
// little arithmetic to hide what they wait for memory, so they ask for the next tile; of interleaved codes the first block
// of rows does.
template <class Kind>
OPTKIT_TARGET void attend_tile(const Problem& p, const Item& item, int64_t begin, const Tile& next, Scratch& scratch,
                               const Sums& sums) {
    const int count = keys_of(item, begin), rows = item.count * p.group;
    const Tile tile = {&item, begin, p.k_cache};
    if (rows <= kRows && !(*scratch.asked == tile)) {
        look_ahead(p, tile, scratch);
        fetch(p, scratch, kTile);
    }
    locate(p, item, begin, count, scratch);
    look_ahead(p, rows <= kRows || p.interleaved ? next : Tile{}, scratch);
    Kind::pack_tile(p, rows, count, scratch);
    fetch(p, scratch, kTile);  // of a longer tile
    for (int row = 0; row < rows; row += kRows) {
        const Block block = block_of(p, item, begin, count, row, kRows);
        if (block.start < block.stop) attend_block<Kind>(p, block, scratch, sums);
        scratch.lines_ahead = false;
    }
}

// After the last tile of an item: tile registers in use make switches between threads slower.
OPTKIT_TARGET inline void release(const Problem& p, const Item& item) {
#ifdef OPTKIT_TILES
    if (p.int8_cache && item.count * p.group >= OnTiles::block_rows) _tile_release();
#else
    static_cast<void>(p), static_cast<void>(item);
#endif
}

// Sixteen heads' keys or values [D], rounded, into codes [16][D], signed ones with `is_value`; and their scales.
OPTKIT_TARGET OPTKIT_INLINE void quantize_rows(const float* const* x, int dim, bool is_value, uint8_t* codes, float* scales) {
    float most[kLanes];
    S::store(most, largest_of_rows<S>(x, kLanes, dim));
    for (int r = 0; r < kLanes; ++r, codes += dim) {
        quantize_by(x[r], dim, most[r], codes, scales + r);
        if (is_value)
            for (int d = 0; d < dim; ++d) codes[d] ^= 0x80;  // from zero point 128 to 0
    }
}

// K and V of 16 new tokens from `token` on, a head of each, into a whole line of interleaved codes (attention_lines.h).
OPTKIT_TARGET inline void write_line(const Problem& p, int64_t token, int h) {
    const int64_t block = p.slots[token] / p.block_size, at = p.slots[token] % p.block_size;
    char *keys = key_codes(p, block, h), *values = value_codes(p, block, h);
    thread_local GrowingMemory buffer;
    uint8_t* codes = buffer.at_least<uint8_t>(kLanes * std::max(p.dim, p.v_dim));
    const float* rows[kLanes];
    const char* codes_of[kLanes];
    float scales[kLanes];
    for (int r = 0; r < kLanes; ++r) {
        rows[r] = p.k + (token + r) * p.k_token + h * p.k_head;
        codes_of[r] = reinterpret_cast<const char*>(codes) + r * p.dim;
    }
    quantize_rows(rows, p.dim, false, codes, scales);
    std::memcpy(scale_of(p, keys, p.dim, at), scales, sizeof scales);
    transpose_rows<S>(codes_of, p.dim / 4, reinterpret_cast<float*>(key_word(keys, at)), p.block_size, false);
    for (int r = 0; r < kLanes; ++r) {
        rows[r] = p.v + (token + r) * p.v_token + h * p.v_head;
        codes_of[r] = reinterpret_cast<const char*>(codes) + r * p.v_dim;
    }
    quantize_rows(rows, p.v_dim, true, codes, scales);
    std::memcpy(scale_of(p, values, p.v_dim, at), scales, sizeof scales);
    for (int r = 0; r < kLanes; r += 4)
        interleave_rows(codes_of + r, p.v_dim, reinterpret_cast<uint32_t*>(value_word(p, values, at + r)));
}

// One head's key or value of a new token, rounded, into the interleaved codes of a block; signed codes are those of values.
OPTKIT_TARGET inline void write_codes(const float* from, int dim, char* word, int64_t step, bool is_value, char* scale_at) {
    thread_local GrowingMemory buffer;
    uint8_t* codes = buffer.at_least<uint8_t>(dim);
    float scale;
    quantize_group(from, dim, codes, &scale);
    std::memcpy(scale_at, &scale, sizeof scale);
    if (is_value)
        for (int d = 0; d < dim; ++d) word[d * step] = static_cast<char>(codes[d] ^ 0x80);  // from zero point 128 to 0
    else
        for (int d = 0; d < dim; d += 4) std::memcpy(word + d * step, codes + d, 4);
}

// One head of a new token into its row of the pool.
OPTKIT_TARGET inline void write_row(const Problem& p, const float* from, int dim, char* to) {
    if (!p.int8_cache) {
        std::memcpy(to, from, dim * sizeof(float));
        return;
    }
    float scale;
    quantize_group(from, dim, reinterpret_cast<uint8_t*>(to), &scale);
    for (int d = 0; d < dim; ++d) to[d] ^= '\x80';  // from zero point 128 to 0
    std::memcpy(to + dim, &scale, sizeof scale);
}

// True where the 16 tokens from `token` on, before `stop`, fill a line of a block.
inline bool fills_line(const Problem& p, int64_t token, int64_t stop) {
    if (stop - token < kLanes || p.slots[token] % kLanes != 0) return false;
    for (int i = 1; i < kLanes; ++i)
        if (p.slots[token + i] != p.slots[token] + i) return false;
    return true;
}

// A head of K and V of a new token into its slot.
OPTKIT_TARGET inline void write_head(const Problem& p, int64_t token, int h) {
    const float *key = p.k + token * p.k_token + h * p.k_head, *value = p.v + token * p.v_token + h * p.v_head;
    if (p.interleaved) {
        const int64_t block = p.slots[token] / p.block_size, at = p.slots[token] % p.block_size;
        char *keys = key_codes(p, block, h), *values = value_codes(p, block, h);
        write_codes(key, p.dim, key_word(keys, at), p.block_size, false, scale_of(p, keys, p.dim, at));
        write_codes(value, p.v_dim, value_word(p, values, at) + at % 4, 4, true, scale_of(p, values, p.v_dim, at));
        return;
    }
    const int64_t row = p.slots[token] * p.kv_heads + h;
    write_row(p, key, p.dim, static_cast<char*>(p.k_cache) + row * p.k_row);
    if (!p.latent) write_row(p, value, p.v_dim, static_cast<char*>(p.v_cache) + row * p.v_row);
}

// K and V of the new tokens [first, stop) into their slots.
OPTKIT_TARGET inline void write_kv(const Problem& p, int64_t first, int64_t stop) {
    while (first < stop) {
        const bool whole = p.interleaved && fills_line(p, first, stop);
        for (int h = 0; h < p.kv_heads; ++h) whole ? write_line(p, first, h) : write_head(p, first, h);
        first += whole ? kLanes : 1;
    }
}

// All rows of the item against the tiles of keys from `begin` on, up to `stop` or the end of a split; the thread reads
// `after` then. Gives the position after the last tile.
OPTKIT_TARGET inline int64_t attend_tiles(const Problem& p, const Item& item, int64_t begin, int64_t stop, const Tile& after,
                                       Scratch& scratch, const Sums& sums) {
    if (p.writes_late && stop == item.position + item.count) write_head(p, item.token, item.kv_head);
#ifdef OPTKIT_TILES
    if (OnTiles::takes(p, item)) return OnTiles::attend_tiles(p, item, begin, stop, scratch, sums);
#endif
    const auto attend = p.int8_cache ? attend_tile<OnInt8> : attend_tile<OnFloat>;
    for (; begin < stop; begin += kTile) {
        const Tile next = begin + kTile < stop ? Tile{&item, begin + kTile, p.k_cache} : after;
        if (!scratch.selected || scratch.selected[begin / kTile]) attend(p, item, begin, next, scratch, sums);
    }
    return begin;
}

// The branches of a tree against the keys of a split from position `begin` on, one after another: each has keys of its own.
OPTKIT_TARGET inline void attend_branches(const Problem& p, const Item& item, int64_t begin, int64_t split_stop,
                                          Scratch& scratch, const Sums& sums) {
    thread_local std::vector<int> path;
    for (int row = 0, count; row < item.count; row += count) {
        const Item branch = branch_of(p, item, row, path);
        count = branch.count;
        const int64_t first = int64_t(row) * p.group, stop = branch.position + count;
        const Sums part = {sums.out + first * p.width, sums.m + first, sums.l + first};
        const int64_t seen = first_key(p, branch.position) / kTile * kTile;
        pack_queries(p, branch, scratch);
        attend_tiles(p, branch, std::max(begin, seen), std::min(split_stop, stop), {}, scratch, part);
    }
}

// The item's rows against the keys of one split, from nothing; the thread reads `after` then.
OPTKIT_TARGET inline void attend_split(const Problem& p, const Item& item, int64_t split, const Tile& after, Scratch& scratch,
                                       const Sums& sums) {
    clear(p, item, sums);
    const int64_t seen = first_key(p, item.position), split_stop = (split + 1) * kSplit;
    int64_t begin = split * kSplit, stop = item.position + item.count;
    // Tiles before a tree are common to its nodes, unless what a node sees of them depends on its position.
    if (item.is_tree) stop = p.limited || p.slopes ? 0 : item.prefix / kTile * kTile;
    if (!item.is_tree && begin < seen) begin = seen / kTile * kTile;
    begin = attend_tiles(p, item, begin, std::min(split_stop, stop), item.is_tree ? Tile{} : after, scratch, sums);
    // Branches take the place of the item in Scratch.q, so none before the last common tile.
    if (item.is_tree && begin < split_stop) attend_branches(p, item, begin, split_stop, scratch, sums);
}

// True where the item reads a tile of the split.
inline bool reads_split(const Item& item, int64_t split, const Scratch& scratch) {
    const int64_t first = split * kSplit / kTile, last = std::min((split + 1) * kSplit / kTile, item.position / kTile + 1);
    return !scratch.selected || std::any_of(scratch.selected + first, scratch.selected + last, [](uint8_t on) { return on; });
}

// The largest scores and the sums of weights of up to 16 rows from `row` on, and what both outputs are worth from now on.
OPTKIT_TARGET inline void merge_rows(const Sums& part, const Sums& total, int row, int count, float* keep, float* take) {
    const S::Vec old = S::load_some(total.m + row, count), new_m = S::load_some(part.m + row, count);
    const S::Vec m = S::where_less(old, new_m, new_m, old);
    const S::Vec shift = or_zero(m);
    const S::Vec keeps = exp2(S::sub(old, shift)), takes = exp2(S::sub(new_m, shift));
    const S::Vec kept = S::mul(S::load_some(total.l + row, count), keeps);
    S::store_some(total.m + row, m, count);
    S::store_some(total.l + row, S::add(kept, S::mul(S::load_some(part.l + row, count), takes)), count);
    S::store(keep, keeps);
    S::store(take, takes);
}

// total += part, both relative to their own largest score.
OPTKIT_TARGET inline void merge(const Problem& p, const Item& item, const Sums& part, const Sums& total) {
    for (int row = 0; row < item.count * p.group; row += kLanes) {
        const int count = std::min(item.count * p.group - row, kLanes);
        float keep[kLanes], take[kLanes];
        merge_rows(part, total, row, count, keep, take);
        for (int r = 0; r < count; ++r) {
            const S::Vec keeps = S::all(keep[r]), takes = S::all(take[r]);
            float* to = total.out + (row + r) * p.width;
            const float* from = part.out + (row + r) * p.width;
            for (int d = 0; d < p.width; d += kLanes)
                S::store(to + d, S::fma(S::load(from + d), takes, S::mul(S::load(to + d), keeps)));
        }
    }
}

// What the sums of a row with largest score `m` and sum of weights `l` are multiplied by, with the sink's share of the
// weights; scores and sink are exponents of 2.
OPTKIT_TARGET inline float share_beside(float sink, float m, float l) {
    const float top = m < sink ? sink : m, keep = exp2_of(m - top);
    return keep / (l * keep + exp2_of(sink - top));
}

// The output rows: sums divided by the sum of weights.
OPTKIT_TARGET inline void finish(const Problem& p, const Item& item, const Sums& total) {
    for (int row = 0; row < item.count * p.group; ++row) {
        const int64_t token = item.token + row / p.group, head = item.kv_head * p.group + row % p.group;
        float* to = p.out + (token * p.kv_heads * p.group + head) * p.v_dim;
        const float* from = total.out + row * p.width;
        const float l = total.l[row];
        const S::Vec by = S::all(p.sinks ? share_beside(p.sinks[head] * kLog2e, total.m[row], l) : 1.0f / l);
        int d = 0;
        for (; d + kLanes <= p.v_dim; d += kLanes) S::store(to + d, S::mul(S::load(from + d), by));
        if (d < p.v_dim) S::store_some(to + d, S::mul(S::load(from + d), by), p.v_dim - d);
    }
}

// A whole item: its splits one after another.
OPTKIT_TARGET inline void attend_all(const Problem& p, const Item& item, Scratch& scratch) {
    pack_queries(p, item, scratch);
    scratch.selected = is_sparse(p, item) ? select_tiles(p, item, scratch) : nullptr;
    bool is_first = true;  // the sums of one split need no merging
    for (int64_t split = first_split(p, item); split <= last_split(item); ++split) {
        if (!reads_split(item, split, scratch)) continue;
        const Tile after = split < last_split(item) ? Tile{&item, (split + 1) * kSplit, p.k_cache} : scratch.following;
        attend_split(p, item, split, after, scratch, is_first ? scratch.total : scratch.part);
        if (!is_first) merge(p, item, scratch.part, scratch.total);
        is_first = false;
    }
    release(p, item);
    finish(p, item, scratch.total);
}

// One split of an item, into its place among the partial sums.
OPTKIT_TARGET inline void attend_part(const Problem& p, const Item& item, int64_t split, const Sums& part,
                                      Scratch& scratch) {
    pack_queries(p, item, scratch);
    scratch.selected = nullptr;
    attend_split(p, item, split, scratch.following, scratch, part);
    release(p, item);
}

// The partial sums of an item's splits, first to last: the same additions as attend_all's.
OPTKIT_TARGET inline void merge_parts(const Problem& p, const Item& item, float* parts, Scratch& scratch) {
    clear(p, item, scratch.total);
    for (int64_t split = first_split(p, item); split <= last_split(item); ++split)
        merge(p, item, part_of(p, item, parts, split), scratch.total);
    finish(p, item, scratch.total);
}

inline Functions functions() { return {write_kv, attend_all, attend_part, merge_parts}; }
