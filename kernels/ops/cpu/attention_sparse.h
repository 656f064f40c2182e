// Block-sparse prefill: the tiles of keys that a block of 64 queries reads. Included by attention_tile.h.
//
// The antidiagonals of XAttention (arXiv 2503.16428): tokens are taken in groups of kStride. The score of a group of
// queries against a group of keys is the sum over t of q[kStride - 1 - t] . k[t]: every query and every key counts once,
// at the price of one key a group. A softmax over the groups of keys, added up over the groups of queries and the query
// heads of the KV head, is the mass of each tile. The block reads the fewest tiles that have `sparse_cover` of the mass,
// and always the first tile, its own and the one before. reference_sparse_prefill.py is the spec.
//
//   Selection.q       [heads of the group][groups][kStride, reversed][D to 16]  queries times what makes exponents of 2
//   Selection.k       [groups of the tile][kStride][D to 16]                    the tile's keys as floats
//   Selection.scores  [heads][groups][groups of keys to 16]
//
// Interleaved codes are multiplied as they lie: a vector has a word of each key of a group, so that of queries has a word of
// each query, reversed. Queries are rounded to 16 bits as for attention itself (attention_int8.h).
//
//   Selection.q       [heads][groups][2][D / 4][kStride, reversed]  halves of four numbers of a query, instead of floats;
//                     behind them, for each query, what a step is worth and what undoes the zero point of keys

constexpr int kPairs = S::tile_vecs >= 4 ? 4 : 2;  // of a register tile: groups of queries, and of keys
static_assert(kGroups % kPairs == 0, "a block has whole register tiles");

OPTKIT_TARGET inline void pack_groups(const Problem& p, const Item& item, float* to) {
    const float by = p.scale * kLog2e / kStride;
    for (int h = 0; h < p.group; ++h)
        for (int t = 0; t < kTile; ++t, to += p.depth_bytes) {
            const int token = t / kStride * kStride + kStride - 1 - t % kStride;
            const float* from = query_of(p, item, token * p.group + h);
            for (int d = 0; d < p.dim; ++d) to[d] = from[d] * by;
            for (int d = p.dim; d < p.depth_bytes; ++d) to[d] = 0.0f;
        }
}

// The keys of the tile that `locate` found.
OPTKIT_TARGET inline void widen_keys(const Problem& p, const Scratch& scratch, float* to) {
    for (int j = 0; j < kTile; ++j, to += p.depth_bytes) {
        if (p.int8_cache) {
            const float scale = scratch.k_scale[j];
            const auto* codes = reinterpret_cast<const int8_t*>(scratch.keys[j]);
            for (int d = 0; d < p.dim; ++d) to[d] = static_cast<float>(codes[d]) * scale;
        } else {
            std::memcpy(to, scratch.keys[j], p.dim * sizeof(float));
        }
        for (int d = p.dim; d < p.depth_bytes; ++d) to[d] = 0.0f;
    }
}

// Scores of one head's groups of queries against the tile's groups of keys, as floats.
OPTKIT_TARGET inline void score_groups(const float* q, const float* k, int64_t length, float* scores, int64_t stride) {
    for (int a = 0; a < kGroups; a += kPairs)
        for (int b = 0; b < kGroups; b += kPairs) {
            S::Vec acc[kPairs][kPairs];
#pragma GCC unroll 4
            for (int m = 0; m < kPairs; ++m)
#pragma GCC unroll 4
                for (int n = 0; n < kPairs; ++n) acc[m][n] = S::all(0.0f);
            for (int64_t i = 0; i < length; i += kLanes) {
                S::Vec key[kPairs];
#pragma GCC unroll 4
                for (int n = 0; n < kPairs; ++n) key[n] = S::load(k + (b + n) * length + i);
#pragma GCC unroll 4
                for (int m = 0; m < kPairs; ++m) {
                    const S::Vec query = S::load(q + (a + m) * length + i);
#pragma GCC unroll 4
                    for (int n = 0; n < kPairs; ++n) acc[m][n] = S::fma(query, key[n], acc[m][n]);
                }
            }
#pragma GCC unroll 4
            for (int m = 0; m < kPairs; ++m)
#pragma GCC unroll 4
                for (int n = 0; n < kPairs; ++n) scores[(a + m) * stride + b + n] = S::sum(acc[m][n]);
        }
}

// Queries as words of Selection.q, and of each what a step is worth and what undoes the zero point of keys.
struct WordQueries {
    static_assert(kStride == kLanes, "a vector has a word of each token of a group");
    uint32_t* words;
    float* scale;
    int32_t* sums;
    int64_t half;  // words

    WordQueries(const Problem& p, const Selection& s) : words(reinterpret_cast<uint32_t*>(s.q)), half(kStride * p.dim / 4) {
        scale = s.q + p.group * kGroups * 2 * half;
        sums = reinterpret_cast<int32_t*>(scale + p.group * kTile);
    }
};

OPTKIT_TARGET inline void pack_words(const Problem& p, const Item& item, const Scratch& scratch, const WordQueries& to) {
    const float by = p.scale * kLog2e / kStride;
    uint8_t *first = scratch.halves, *second = first + p.depth_bytes;
    for (int h = 0; h < p.group; ++h)
        for (int t = 0; t < kTile; ++t) {
            const int group = h * kGroups + t / kStride, lane = kStride - 1 - t % kStride, at = group * kStride + lane;
            to.scale[at] = by * OnInt8::round_query(query_of(p, item, t * p.group + h), p, first, second, to.sums[at]);
            uint32_t* words = to.words + group * 2 * to.half + lane;
            for (int w = 0; w < p.dim / 4; ++w) {
                words[w * kStride] = word_at<uint32_t>(first + 4 * w);
                words[to.half + w * kStride] = word_at<uint32_t>(second + 4 * w);
            }
        }
}

// acc[m][n] += the words of half `half` of group m of queries, `next` words apart, times group n of keys, lane by lane.
template <int half>
OPTKIT_TARGET OPTKIT_INLINE void add_words(I::Ints (&acc)[kPairs][kPairs], const uint32_t* q, int64_t next,
                                           const uint32_t* const* keys, int64_t step, int words) {
    using Kind = I::Dot<Bytes::keys, half>;
    for (int w = 0; w < words; ++w, q += kStride) {
        typename Kind::Column column[kPairs];
#pragma GCC unroll 4
        for (int n = 0; n < kPairs; ++n) {
            column[n] = Kind::column(keys[n] + w * step);
            if constexpr (!I::key_zero) column[n] = I::flip_signs(column[n]);  // codes have a zero point
        }
#pragma GCC unroll 4
        for (int m = 0; m < kPairs; ++m) {
            const typename Kind::Rows rows = Kind::rows(q + m * next);
#pragma GCC unroll 4
            for (int n = 0; n < kPairs; ++n) acc[m][n] = Kind::add(acc[m][n], rows, column[n]);
        }
    }
}

// The same scores from the tile's interleaved codes.
OPTKIT_TARGET inline void score_words(const Problem& p, const WordQueries& queries, int head, const Scratch& scratch,
                                      float* scores, int64_t stride) {
    const Lines& keys = scratch.key_lines;
    for (int a = 0; a < kGroups; a += kPairs)
        for (int b = 0; b < kGroups; b += kPairs) {
            const int first = head * kGroups + a;
            const uint32_t* q = queries.words + first * 2 * queries.half;
            I::Ints acc[kPairs][kPairs];
#pragma GCC unroll 4
            for (int m = 0; m < kPairs; ++m)
#pragma GCC unroll 4
                for (int n = 0; n < kPairs; ++n) acc[m][n] = I::all(0);
            add_words<0>(acc, q, 2 * queries.half, keys.of + b, keys.step, p.dim / 4);
#pragma GCC unroll 4
            for (int m = 0; m < kPairs; ++m)
#pragma GCC unroll 4
                for (int n = 0; n < kPairs; ++n)
                    acc[m][n] = I::add(I::between_halves(acc[m][n]), I::load(queries.sums + (first + m) * kStride));
            add_words<1>(acc, q + queries.half, 2 * queries.half, keys.of + b, keys.step, p.dim / 4);
#pragma GCC unroll 4
            for (int m = 0; m < kPairs; ++m)
#pragma GCC unroll 4
                for (int n = 0; n < kPairs; ++n) {
                    const S::Vec scale = S::mul(S::load(queries.scale + (first + m) * kStride),
                                                S::load(scratch.k_scale + (b + n) * kStride));
                    scores[(a + m) * stride + b + n] = S::sum(S::mul(I::floats(acc[m][n]), scale));
                }
        }
}

// Adds a row's softmax over its first `count` groups of keys to the mass of their tiles; the scores are overwritten.
OPTKIT_TARGET inline void add_mass(float* scores, int64_t count, float* mass) {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = count; i < padded; ++i) scores[i] = -__builtin_inff();
    S::Vec largest = S::load(scores);
    for (int64_t i = kLanes; i < padded; i += kLanes) largest = S::max(largest, S::load(scores + i));
    const S::Vec top = S::all(S::largest(largest));
    S::Vec total = S::all(0.0f);
    for (int64_t i = 0; i < padded; i += kLanes) {
        const S::Vec weight = exp2(S::sub(S::load(scores + i), top));
        total = S::add(total, weight);
        S::store(scores + i, weight);
    }
    const float by = 1.0f / S::sum(total);
    for (int64_t i = 0; i < count; ++i) mass[i / kGroups] += scores[i] * by;
}

// The tiles that the item reads, a byte for each up to its own.
OPTKIT_TARGET inline const uint8_t* select_tiles(const Problem& p, const Item& item, Scratch& scratch) {
    const int64_t tiles = item.position / kTile + 1, length = int64_t(kStride) * p.depth_bytes;
    const Selection s = selection_of_thread(p, tiles);
    const WordQueries words(p, s);
    p.interleaved ? pack_words(p, item, scratch, words) : pack_groups(p, item, s.q);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        locate(p, item, tile * kTile, kTile, scratch);
        if (!p.interleaved) widen_keys(p, scratch, s.k);
        for (int h = 0; h < p.group; ++h) {
            float* scores = s.scores + h * kGroups * s.stride + tile * kGroups;
            if (p.interleaved)
                score_words(p, words, h, scratch, scores, s.stride);
            else
                score_groups(s.q + h * kGroups * length, s.k, length, scores, s.stride);
        }
    }
    std::memset(s.mass, 0, tiles * sizeof(float));
    for (int row = 0; row < p.group * kGroups; ++row)
        add_mass(s.scores + row * s.stride, (tiles - 1) * kGroups + row % kGroups + 1, s.mass);
    choose_tiles(s, tiles, p.sparse_cover * static_cast<float>(p.group * kGroups));
    return s.selected;
}
