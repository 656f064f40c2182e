// One work item of paged attention: some query tokens of one sequence, under one KV head. Included once an instruction
// set; see simd.h for OPTKIT_TARGET and S, and attention.cpp for Problem, Item, Scratch and the order of sums.
//
// Rows are the item's queries, token-major: row = token * group + head in the group. They are taken in blocks of
// `kRows`, whose scores against a tile of 64 keys fit the registers.
//   Scratch.q      [rows / kRows][D][kRows]  scaled queries, so that one step of the product reads kRows neighbours
//   Scratch.k      [D][64]                   the tile's keys, transposed: a vector holds 16 keys
//   Scratch.v      [64][Dv to 16]            the tile's values, or pointers into the cache where a copy doesn't pay
//   Scratch.k_scale, v_scale [64]            scales of an int8 tile, whose numbers stay whole numbers throughout
// An int8 tile becomes floats where many rows use it. For few it is used as it is: a word of Scratch.k, [D / 4][64]
// then, is four numbers of a key. Either way the same numbers are multiplied in the same order.
//   Scratch.scores [kRows][64]
//   Sums           [rows][Dv to 16], m, l    unnormalized output, largest score and sum of weights of each row

constexpr int kRows = S::tile_rows;
constexpr int kTileVecs = kTile / kLanes;

// What a block of rows needs to know about the tile at hand. Positions count from the tile's first key.
struct Block {
    const float* q;
    int rows, first_row;
    int64_t first, last;  // positions of the first and the last row's token
    int vecs;             // vectors of keys to look at
    int start, stop;      // keys that any row may see
};

// acc[r][n] += q[c][r] * number c of each word of key[n], for all c of a word.
template <class Value, int R, int NV, int C = 0>
OPTKIT_TARGET OPTKIT_INLINE void score_words(const float* q, const S::Vec (&words)[NV], S::Vec (&acc)[R][NV]) {
    S::Vec key[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) key[n] = S::number<Value, C>(words[n]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const S::Vec query = S::all(q[r]);
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = S::fma(query, key[n], acc[r][n]);
    }
    if constexpr ((C + 1) * sizeof(Value) < sizeof(float)) score_words<Value, R, NV, C + 1>(q + R, words, acc);
}

// scores[r][0..16 NV) = q[.][r] . k[.][0..16 NV), each a chain over D in order. A word of k is a float or four int8.
template <class Value, int R, int NV>
OPTKIT_TARGET void score_tile(const float* q, const float* k, int depth, float* scores) {
    constexpr int step = sizeof(float) / sizeof(Value);
    S::Vec acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = S::all(0.0f);
    for (int d = 0; d < depth; d += step, q += step * R, k += kTile) {
        S::Vec words[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) words[n] = S::load(k + n * kLanes);
        score_words<Value>(q, words, acc);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) S::store(scores + r * kTile + n * kLanes, acc[r][n]);
}

template <class Value, int R, int NV = S::tile_vecs>
OPTKIT_TARGET void score_block(const float* q, const float* k, int depth, int vecs, float* scores) {
    for (; vecs >= NV; vecs -= NV, k += NV * kLanes, scores += NV * kLanes)
        score_tile<Value, R, NV>(q, k, depth, scores);
    if constexpr (NV > 1) score_block<Value, R, NV - 1>(q, k, depth, vecs, scores);
}

// out[r][0..16 NV) = out[r] * rescale[r] + sum over keys of weight[r][key] * v[key], keys in order.
// The values are float or int8.
template <class Value, int R, int NV>
OPTKIT_TARGET void weigh_tile(const float* weights, const float* rescale, const char* const* v, int64_t column,
                              int start, int stop, float* out, int64_t out_stride) {
    S::Vec acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n)
            acc[r][n] = S::mul(S::load(out + r * out_stride + n * kLanes), S::all(rescale[r]));
    for (int j = start; j < stop; ++j) {
        const Value* row = reinterpret_cast<const Value*>(v[j]) + column;
        S::Vec value[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) value[n] = S::load(row + n * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const S::Vec weight = S::all(weights[r * kTile + j]);
#pragma GCC unroll 8
            for (int n = 0; n < NV; ++n) acc[r][n] = S::fma(weight, value[n], acc[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) S::store(out + r * out_stride + n * kLanes, acc[r][n]);
}

template <class Value, int R, int NV = S::tile_vecs>
OPTKIT_TARGET void weigh_block(const float* weights, const float* rescale, const char* const* v, int64_t column,
                               int start, int stop, float* out, int64_t width) {
    for (; width - column >= NV * kLanes; column += NV * kLanes)
        weigh_tile<Value, R, NV>(weights, rescale, v, column, start, stop, out + column, width);
    if constexpr (NV > 1) weigh_block<Value, R, NV - 1>(weights, rescale, v, column, start, stop, out, width);
}

// Each key's scores, or weights, times its scale.
OPTKIT_TARGET inline void scale_keys(float* scores, int rows, int vecs, const float* scale) {
    for (int r = 0; r < rows; ++r)
        for (int n = 0; n < vecs * kLanes; n += kLanes) {
            float* s = scores + r * kTile + n;
            S::store(s, S::mul(S::load(s), S::load(scale + n)));
        }
}

OPTKIT_TARGET inline void soft_cap(float* scores, int rows, int vecs, float cap) {
    const float to_exp2 = cap * kLog2e;  // the exponential that follows has base 2
    for (int r = 0; r < rows; ++r)
        for (int n = 0; n < vecs; ++n) {
            float* s = scores + r * kTile + n * kLanes;
            S::store(s, S::mul(tanh(S::load(s)), S::all(to_exp2)));
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

// One step of the online softmax of a row: scores become weights 2^(s - m). Gives what earlier sums must be
// multiplied by. A row that has seen no key yet has m = -inf; 0 stands in for it, which leaves weights 2^-inf = 0.
OPTKIT_TARGET inline float softmax_row(float* scores, int vecs, float& m, float& l) {
    S::Vec top = S::load(scores);
    for (int n = 1; n < vecs; ++n) top = S::max(top, S::load(scores + n * kLanes));
    const float old = m, highest = S::largest(top);
    m = old < highest ? highest : old;
    const float shift = m == -__builtin_inff() ? 0.0f : m;
    S::Vec total = S::all(0.0f);
    for (int n = 0; n < vecs; ++n) {
        const S::Vec weight = exp2(S::sub(S::load(scores + n * kLanes), S::all(shift)));
        S::store(scores + n * kLanes, weight);
        total = S::add(total, weight);
    }
    const float rescale = old == m ? 1.0f : exp2_of(old - shift);
    l = l * rescale + S::sum(total);
    return rescale;
}

// Rows whose limits differ within the tile: the diagonal of the causal mask, and the edge of the window.
OPTKIT_TARGET inline void mask_block(const Problem& p, const Block& block, float* scores) {
    const bool all_seen = block.first >= block.vecs * kLanes - 1 && (!p.window || block.last - p.window < 0);
    if (all_seen) return;
    for (int r = 0; r < block.rows; ++r) {
        const int64_t at = block.first + (block.first_row + r) / p.group - block.first_row / p.group;
        const float lo = p.window ? static_cast<float>(at - p.window + 1) : 0.0f;
        mask_row(scores + r * kTile, block.vecs, lo, static_cast<float>(at));
    }
}

template <class Value, int R>
OPTKIT_TARGET void attend_rows(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
    float rescale[kRows];
    score_block<Value, R>(block.q, scratch.k, p.depth, block.vecs, scratch.scores);
    if (p.int8_cache) scale_keys(scratch.scores, R, block.vecs, scratch.k_scale);
    if (p.softcap > 0) soft_cap(scratch.scores, R, block.vecs, p.softcap);
    mask_block(p, block, scratch.scores);
    for (int r = 0; r < R; ++r) {
        const int row = block.first_row + r;
        rescale[r] = softmax_row(scratch.scores + r * kTile, block.vecs, sums.m[row], sums.l[row]);
    }
    if (p.int8_cache) scale_keys(scratch.scores, R, block.vecs, scratch.v_scale);
    float* out = sums.out + block.first_row * p.width;
    weigh_block<Value, R>(scratch.scores, rescale, scratch.values, 0, block.start, block.stop, out, p.width);
}

template <class Value, int R = kRows>
OPTKIT_TARGET void attend_block(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
    if (block.rows == R) return attend_rows<Value, R>(p, block, scratch, sums);
    if constexpr (R > 1) attend_block<Value, R - 1>(p, block, scratch, sums);
}

// scratch.q from the item's queries.
OPTKIT_TARGET inline void pack_queries(const Problem& p, const Item& item, Scratch& scratch) {
    const int rows = item.count * p.group;
    const float scale = p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2e;
    for (int row = 0; row < rows; ++row) {
        const int block = row / kRows * kRows, in_block = rows - block < kRows ? rows - block : kRows;
        const int64_t token = item.token + row / p.group, head = item.kv_head * p.group + row % p.group;
        const float* from = p.q + token * p.q_token + head * p.q_head;
        float* to = scratch.q + block * p.depth + row - block;
        for (int d = 0; d < p.dim; ++d) to[d * in_block] = from[d] * scale;
        for (int d = p.dim; d < p.depth; ++d) to[d * in_block] = 0.0f;
    }
}

// scratch.k from `count` keys, word by word; the rest of the last vector is zero. The last word of an int8 key may hold
// bytes of its scale: whole numbers like the others, which meet zeros of the query.
OPTKIT_TARGET inline void pack_keys(const Problem& p, int count, Scratch& scratch) {
    const int words = p.int8_cache ? p.depth / 4 : p.depth;
    for (int j = 0; j < count; j += kLanes) {
        const char* rows[kLanes];
        for (int i = 0; i < kLanes; ++i)
            rows[i] = j + i < count ? scratch.keys[j + i] : reinterpret_cast<const char*>(scratch.zeros);
        float* to = scratch.k + j;
        int w = 0;
        for (; w + 4 <= words; w += 4, to += 4 * kTile) {
            S::Vec columns[4];
            S::transpose(rows, columns);
            for (int c = 0; c < 4; ++c) S::store(to + c * kTile, columns[c]);
            for (auto& row : rows) row += 4 * sizeof(float);
        }
        for (; w < words; ++w, to += kTile)
            for (int i = 0; i < kLanes; ++i, rows[i - 1] += sizeof(float)) std::memcpy(to + i, rows[i], sizeof(float));
    }
}

// The int8 of scratch.k as floats, from the last word to the first, since each becomes four.
OPTKIT_TARGET inline void widen_keys(const Problem& p, int count, Scratch& scratch) {
    for (int w = p.depth / 4 - 1; w >= 0; --w)
        for (int j = 0; j < count; j += kLanes) {
            const S::Vec words = S::load(scratch.k + w * kTile + j);
            float* to = scratch.k + 4 * w * kTile + j;
            S::store(to, S::number<int8_t, 0>(words));
            S::store(to + kTile, S::number<int8_t, 1>(words));
            S::store(to + 2 * kTile, S::number<int8_t, 2>(words));
            S::store(to + 3 * kTile, S::number<int8_t, 3>(words));
        }
}

// scratch.v from `count` values of float or int8, each padded with zeros to whole vectors.
template <class Value>
OPTKIT_TARGET void pack_values(const Problem& p, int count, Scratch& scratch) {
    for (int j = 0; j < count; ++j) {
        const Value* from = reinterpret_cast<const Value*>(scratch.values[j]);
        float* to = scratch.v + j * p.width;
        int d = 0;
        for (; d + kLanes <= p.v_dim; d += kLanes) S::store(to + d, S::load(from + d));
        if (d < p.v_dim) S::store(to + d, S::load_some(from + d, p.v_dim - d));
        scratch.values[j] = reinterpret_cast<const char*>(to);
    }
}

// All rows of the item against the tile of keys that starts at `begin`.
OPTKIT_TARGET inline void attend_tile(const Problem& p, const Item& item, int64_t begin, Scratch& scratch,
                                      const Sums& sums) {
    const int64_t end = item.position + item.count - begin;
    const int count = static_cast<int>(end < kTile ? end : kTile);
    const int rows = item.count * p.group;
    locate(p, item, begin, count, scratch);
    if (rows <= kRows) prefetch(p, item, begin + kTile);
    pack_keys(p, count, scratch);
    const bool as_it_is = rows <= kRows && p.v_dim % kLanes == 0;
    if (p.int8_cache && !as_it_is) widen_keys(p, count, scratch);
    if (!as_it_is) p.int8_cache ? pack_values<int8_t>(p, count, scratch) : pack_values<float>(p, count, scratch);
    const auto attend = p.int8_cache && as_it_is ? attend_block<int8_t> : attend_block<float>;
    for (int row = 0; row < rows; row += kRows) {
        Block block;
        block.q = scratch.q + row * p.depth;
        block.rows = rows - row < kRows ? rows - row : kRows;
        block.first_row = row;
        block.first = item.position + row / p.group - begin;
        block.last = item.position + (row + block.rows - 1) / p.group - begin;
        block.stop = static_cast<int>(block.last < count ? block.last + 1 : count);
        const int64_t start = p.window ? block.first - p.window + 1 : 0;
        block.start = start > 0 ? static_cast<int>(start < kTile ? start : kTile) : 0;
        block.vecs = (block.stop + kLanes - 1) / kLanes;
        if (block.start < block.stop) attend(p, block, scratch, sums);
    }
}

// The item's rows against the keys of one split, from nothing.
OPTKIT_TARGET inline void attend_split(const Problem& p, const Item& item, int64_t split, Scratch& scratch,
                                       const Sums& sums) {
    clear(p, item, sums);
    const int64_t seen = first_key(p, item.position), stop = item.position + item.count;
    const int64_t split_stop = (split + 1) * kSplit;
    int64_t begin = split * kSplit;
    if (begin < seen) begin = seen / kTile * kTile;
    if (item.count * p.group <= kRows) prefetch(p, item, begin);
    for (; begin < split_stop && begin < stop; begin += kTile) attend_tile(p, item, begin, scratch, sums);
}

// total += part, both relative to their own largest score.
OPTKIT_TARGET inline void merge(const Problem& p, const Item& item, const Sums& part, const Sums& total) {
    for (int row = 0; row < item.count * p.group; ++row) {
        const float m = total.m[row] < part.m[row] ? part.m[row] : total.m[row];
        const float shift = m == -__builtin_inff() ? 0.0f : m;
        const float keep = exp2_of(total.m[row] - shift), take = exp2_of(part.m[row] - shift);
        total.m[row] = m;
        total.l[row] = total.l[row] * keep + part.l[row] * take;
        const S::Vec keeps = S::all(keep), takes = S::all(take);
        float* to = total.out + row * p.width;
        const float* from = part.out + row * p.width;
        for (int d = 0; d < p.width; d += kLanes)
            S::store(to + d, S::fma(S::load(from + d), takes, S::mul(S::load(to + d), keeps)));
    }
}

// The output rows: sums divided by the sum of weights.
OPTKIT_TARGET inline void finish(const Problem& p, const Item& item, const Sums& total) {
    for (int row = 0; row < item.count * p.group; ++row) {
        const int64_t token = item.token + row / p.group, head = item.kv_head * p.group + row % p.group;
        float* to = p.out + (token * p.kv_heads * p.group + head) * p.v_dim;
        const float* from = total.out + row * p.width;
        const S::Vec by = S::all(1.0f / total.l[row]);
        int d = 0;
        for (; d + kLanes <= p.v_dim; d += kLanes) S::store(to + d, S::mul(S::load(from + d), by));
        if (d < p.v_dim) S::store_some(to + d, S::mul(S::load(from + d), by), p.v_dim - d);
    }
}

// A whole item: its splits one after another.
OPTKIT_TARGET inline void attend_all(const Problem& p, const Item& item, Scratch& scratch) {
    pack_queries(p, item, scratch);
    clear(p, item, scratch.total);
    for (int64_t split = first_split(p, item); split <= last_split(item); ++split) {
        attend_split(p, item, split, scratch, scratch.part);
        merge(p, item, scratch.part, scratch.total);
    }
    finish(p, item, scratch.total);
}

// One split of an item, into its place among the partial sums.
OPTKIT_TARGET inline void attend_part(const Problem& p, const Item& item, int64_t split, const Sums& part,
                                      Scratch& scratch) {
    pack_queries(p, item, scratch);
    attend_split(p, item, split, scratch, part);
}

// The partial sums of an item's splits, first to last: the same additions as attend_all's.
OPTKIT_TARGET inline void merge_parts(const Problem& p, const Item& item, float* parts, Scratch& scratch) {
    clear(p, item, scratch.total);
    for (int64_t split = first_split(p, item); split <= last_split(item); ++split)
        merge(p, item, part_of(p, item, parts, split), scratch.total);
    finish(p, item, scratch.total);
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

// K and V of a new token into its slot.
OPTKIT_TARGET inline void write_kv(const Problem& p, int64_t token) {
    const int64_t slot = p.slots[token] * p.kv_heads;
    char *k_cache = static_cast<char*>(p.k_cache), *v_cache = static_cast<char*>(p.v_cache);
    for (int h = 0; h < p.kv_heads; ++h) {
        write_row(p, p.k + token * p.k_token + h * p.k_head, p.dim, k_cache + (slot + h) * p.k_row);
        write_row(p, p.v + token * p.v_token + h * p.v_head, p.v_dim, v_cache + (slot + h) * p.v_row);
    }
}

inline Functions functions() { return {write_kv, attend_all, attend_part, merge_parts}; }
