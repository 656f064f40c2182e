// The interleaved layout of an int8 cache: codes in the order in which attention multiplies them, so that a tile of keys is
// read as it lies. Included by the text of attention.cpp; `is_interleaved` of reference_attention.py has the same rule and
// the same layout.
//
// A block of a pool is [Hkv][codes of block_size tokens, their scales]. A head of a block:
//   keys    [D / 4][block_size][4]   codes with zero point 128, then the scales [block_size] float32
//   values  [block_size / 4][Dv][4]  signed codes, one byte of each of four tokens, then the scales [block_size] float32
// Sixteen tokens are a whole line of each word of keys, and lie in one block.

constexpr int64_t kLine = 64;

// Latent KV reads values out of keys, which suits rows; other sizes have parts of lines.
inline bool interleaves(const AttentionArgs& args) {
    return args.int8_cache && args.v_cache && args.block_size % kLanes == 0 && args.dim % 4 == 0 && args.v_dim % kLanes == 0;
}

// The codes of a head of a block.
OPTKIT_INLINE char* key_codes(const Problem& p, int64_t block, int kv_head) {
    return static_cast<char*>(p.k_cache) + (block * p.kv_heads + kv_head) * p.block_size * p.k_row;
}
OPTKIT_INLINE char* value_codes(const Problem& p, int64_t block, int kv_head) {
    return static_cast<char*>(p.v_cache) + (block * p.kv_heads + kv_head) * p.block_size * p.v_row;
}

// The first word of the token `at` of a block in its codes; the next of a key is `block_size` words further on, the next
// of four values one.
OPTKIT_INLINE char* key_word(char* codes, int64_t at) { return codes + at * 4; }
OPTKIT_INLINE char* value_word(const Problem& p, char* codes, int64_t at) { return codes + at / 4 * 4 * p.v_dim; }

// The scale of the token `at` of a block behind its codes.
OPTKIT_INLINE char* scale_of(const Problem& p, char* codes, int dim, int64_t at) {
    return codes + p.block_size * dim + at * static_cast<int64_t>(sizeof(float));
}

// Calls visit(j, keys, values, at) for every 16 of `count` tokens from position `begin`, a multiple of 16: the codes of
// their block, and where in it they begin.
template <class Visit>
OPTKIT_INLINE void each_line(const Problem& p, const Item& item, int64_t begin, int count, Visit visit) {
    const int32_t* table = p.tables + item.sequence * p.table_width;
    int64_t block = begin / p.block_size, at = begin % p.block_size;
    for (int j = 0; j < count; j += kLanes) {
        visit(j, key_codes(p, table[block], item.kv_head), value_codes(p, table[block], item.kv_head), at);
        at += kLanes;
        if (at == p.block_size) at = 0, ++block;
    }
}

OPTKIT_INLINE const uint32_t* words_at(const char* first) { return reinterpret_cast<const uint32_t*>(first); }

// Fours of values of a tile that lie together, in one block.
OPTKIT_INLINE int fours_together(const Problem& p) {
    if (p.block_size % kTile == 0) return kTile / 4;
    return (kTile % p.block_size == 0 ? static_cast<int>(p.block_size) : kLanes) / 4;
}

// The lines of `count` tokens from position `begin`, a multiple of 16, and their scales. Of a branch of a tree, whose
// tokens don't follow one another: the first words of each token.
inline void locate_lines(const Problem& p, const Item& item, int64_t begin, int count, Scratch& scratch) {
    scratch.key_lines.step = p.block_size;
    scratch.value_lines.step = p.v_dim;
    scratch.value_lines.together = fours_together(p);
    scratch.scattered = item.path && begin + count > item.prefix;
    if (!scratch.scattered)
        return each_line(p, item, begin, count, [&](int j, char* keys, char* values, int64_t at) {
            scratch.key_lines.of[j / kLanes] = words_at(key_word(keys, at));
            scratch.value_lines.of[j / kLanes] = words_at(value_word(p, values, at));
            std::memcpy(scratch.k_scale + j, scale_of(p, keys, p.dim, at), kLine);
            std::memcpy(scratch.v_scale + j, scale_of(p, values, p.v_dim, at), kLine);
        });
    each_key(p, item, begin, count, [&](int j, int64_t row) {
        const int64_t slot = row / p.kv_heads, block = slot / p.block_size, at = slot % p.block_size;
        char *keys = key_codes(p, block, item.kv_head), *values = value_codes(p, block, item.kv_head);
        scratch.keys[j] = key_word(keys, at);
        scratch.values[j] = value_word(p, values, at);
        scratch.lanes[j] = static_cast<uint8_t>(at % 4);
        std::memcpy(scratch.k_scale + j, scale_of(p, keys, p.dim, at), sizeof(float));
        std::memcpy(scratch.v_scale + j, scale_of(p, values, p.v_dim, at), sizeof(float));
    });
}

// Makes `tile` the one that the products of the tile at hand ask memory for, a line with each column that they read; starts
// loading its scales. All of it is inlined, as `fetch`.
OPTKIT_INLINE void look_ahead_of_lines(const Problem& p, const Tile& tile, Scratch& scratch) {
    const int64_t left = tile.item->position + tile.item->count - tile.begin;
    scratch.next_keys.step = p.block_size;
    scratch.next_values.step = p.v_dim;
    int last = 0;
    each_line(p, *tile.item, tile.begin, static_cast<int>(left < kTile ? left : kTile),
              [&](int j, char* keys, char* values, int64_t at) {
                  last = j / kLanes;
                  scratch.next_keys.of[last] = words_at(key_word(keys, at));
                  scratch.next_values.of[last] = words_at(value_word(p, values, at));
                  __builtin_prefetch(scale_of(p, keys, p.dim, at), 0, 2);
                  __builtin_prefetch(scale_of(p, values, p.v_dim, at), 0, 2);
              });
    for (int n = last + 1; n < kTile / kLanes; ++n) {
        scratch.next_keys.of[n] = scratch.next_keys.of[last];
        scratch.next_values.of[n] = scratch.next_values.of[last];
    }
}
