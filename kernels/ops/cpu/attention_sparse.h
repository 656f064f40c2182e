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
        const float scale = scratch.k_scale[j];
        if (p.interleaved) {
            const auto* codes = reinterpret_cast<const uint8_t*>(scratch.key_lines.of[j / kLanes] + j % kLanes);
            const int words = p.dim / 4;  // whole: see interleaves
            for (int word = 0; word < words; ++word)
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    to[4 * word + i] = static_cast<float>(codes[4 * word * p.block_size + i] - 128) * scale;
        } else if (p.int8_cache) {
            const auto* codes = reinterpret_cast<const int8_t*>(scratch.keys[j]);
            for (int d = 0; d < p.dim; ++d) to[d] = static_cast<float>(codes[d]) * scale;
        } else {
            std::memcpy(to, scratch.keys[j], p.dim * sizeof(float));
        }
        for (int d = p.dim; d < p.depth_bytes; ++d) to[d] = 0.0f;
    }
}

// Scores of one head's groups of queries against the tile's groups of keys.
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
    pack_groups(p, item, s.q);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        locate(p, item, tile * kTile, kTile, scratch);
        widen_keys(p, scratch, s.k);
        for (int h = 0; h < p.group; ++h)
            score_groups(s.q + h * kGroups * length, s.k, length, s.scores + h * kGroups * s.stride + tile * kGroups,
                         s.stride);
    }
    std::memset(s.mass, 0, tiles * sizeof(float));
    for (int row = 0; row < p.group * kGroups; ++row)
        add_mass(s.scores + row * s.stride, (tiles - 1) * kGroups + row % kGroups + 1, s.mass);
    choose_tiles(s, tiles, p.sparse_cover * static_cast<float>(p.group * kGroups));
    return s.selected;
}
