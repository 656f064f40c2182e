// Attention over an int8 cache on tiles of AMX, 16 rows at a time: for items of many rows. Included by the text of
// attention_tile.h, for the instruction set `amx` alone.
//
// The numbers are those of attention_int8.h. Sums of integers are exact, and each float operation is the same, so the
// bits are those of all other variants. Keys and values are packed as there, which is what tiles want of a second operand:
// 4 keys or numbers of a column side by side. Keys stay signed.
//   Scratch.q         [rows / 16, rounded up][2][16][depth to 64]  halves of numbers of a query, zeros past the last
//   Scratch.weights   [16][64]                                     bytes

struct OnTiles {
    static constexpr int block_rows = TILE_ROWS;

    // True for items that pay for tiles: whole blocks but the last. Shorter keys leave too much of a tile empty.
    static bool takes(const Problem& p, const Item& item) {
        constexpr int shortest = 32;
        return p.int8_cache && !item.is_tree && item.count * p.group >= block_rows && p.dim >= shortest;
    }

    OPTKIT_TARGET static void pack_queries(const Problem& p, const Item& item, Scratch& scratch) {
        constexpr int ahead = 8;
        configure_tiles(TILES_ROWS);
        const int rows = item.count * p.group, bytes = row_bytes(p);
        std::memset(scratch.q, 0, int64_t{2} * bytes * round_up(rows, block_rows));
        for (int row = 0; row < rows; ++row) {
            // A head's part of a token is too short for the hardware to see the pattern.
            if (row + ahead < rows) prefetch_row(reinterpret_cast<const char*>(query_of(p, item, row + ahead)), p.dim * sizeof(float));
            uint8_t *first = queries(p, scratch, row), *second = first + block_rows * bytes;
            const float step = OnInt8::round_query(query_of(p, item, row), p, scratch.halves, scratch.halves + p.depth_bytes,
                                                   scratch.q_sums[row]);
            scratch.q_scale[row] = step * p.to_exp2;
            std::memcpy(first, scratch.halves, p.dim);
            std::memcpy(second, scratch.halves + p.depth_bytes, p.dim);
        }
    }

    // All rows of the item against the tiles of keys from `begin` on, up to `stop` or the end of the split. The tiles are
    // packed first, and stay in the cache as the sums of a block of rows do. Gives the position after the last tile.
    OPTKIT_TARGET static int64_t attend_tiles(const Problem& p, const Item& item, int64_t begin, int64_t stop,
                                              Scratch& scratch, const Sums& sums) {
        Scratch tiles[kSplit / kTile];
        int64_t first[kSplit / kTile];
        int count = 0;
        for (; begin < stop; begin += kTile) {
            if (scratch.selected && !scratch.selected[begin / kTile]) continue;
            tiles[count] = scratch_of_tile(p, scratch, count);
            locate(p, item, begin, keys_of(item, begin), tiles[count]);
            OnInt8::pack_signed(p, keys_of(item, begin), tiles[count]);
            first[count++] = begin;
        }
        for (int row = 0; row < item.count * p.group; row += block_rows)
            for (int t = 0; t < count; ++t) {
                const Block block = block_of(p, item, first[t], keys_of(item, first[t]), row, block_rows);
                if (block.start < block.stop) attend(p, block, tiles[t], sums);
            }
        return begin;
    }

  private:
    // The t-th tile's part of what holds keys and values. An int8 needs a quarter of a float's.
    static Scratch scratch_of_tile(const Problem& p, const Scratch& scratch, int t) {
        Scratch tile = scratch;
        tile.k += t * p.depth / 4 * kTile;
        tile.v += t * p.width * kTile / 4;
        for (float** each : {&tile.k_scale, &tile.v_scale, &tile.v_log, &tile.v_inverse}) *each += t * kTile;
        return tile;
    }

    OPTKIT_TARGET static void attend(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
        score(p, block, scratch);
        if (p.softcap > 0) soft_cap(scratch.scores, block.rows, block.vecs, p.softcap, scratch.v_log);
        if (p.slopes) add_distances(p, block, scratch.scores);
        mask_block(p, block, scratch.scores);
        alignas(64) float rescale[kLanes], step[kLanes];
        merge_scores(block, scratch, sums.m + block.first_row, sums.l + block.first_row, rescale, step);
        weigh(p, block, scratch, rescale, step, sums.out + block.first_row * p.width);
    }

    static int round_up(int n, int to) { return (n + to - 1) / to * to; }
    static int row_bytes(const Problem& p) { return round_up(p.dim, TILE_BYTES); }

    // The first half of a row of Scratch.q; the second half is `block_rows` rows further on.
    static uint8_t* queries(const Problem& p, Scratch& scratch, int row) {
        const int64_t block = int64_t{2} * block_rows * row_bytes(p);
        return reinterpret_cast<uint8_t*>(scratch.q) + row / block_rows * block + row % block_rows * row_bytes(p);
    }

    // high[r][..] and low[r][..]: both halves of row r times 16 or 32 keys. What k holds past the last word is multiplied
    // by zeros.
    template <bool TWO>
    OPTKIT_TARGET OPTKIT_INLINE static void multiply(const uint8_t* q, int64_t bytes, const float* k, int32_t* high,
                                                     int32_t* low) {
        constexpr int64_t row = kTile * sizeof(float);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (TWO) _tile_zero(2);
        if constexpr (TWO) _tile_zero(3);
        for (int64_t at = 0; at < bytes; at += TILE_BYTES, k += TILE_BYTES / 4 * kTile) {
            _tile_loadd(6, k, row);
            _tile_loadd(4, q + at, bytes);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(5, q + block_rows * bytes + at, bytes);
            _tile_dpbssd(1, 5, 6);
            if constexpr (TWO) {
                _tile_loadd(7, k + kLanes, row);
                _tile_dpbssd(2, 4, 7);
                _tile_dpbssd(3, 5, 7);
            }
        }
        _tile_stored(0, high, row);
        _tile_stored(1, low, row);
        if constexpr (TWO) _tile_stored(2, high + kLanes, row);
        if constexpr (TWO) _tile_stored(3, low + kLanes, row);
    }

    OPTKIT_TARGET static void score(const Problem& p, const Block& block, Scratch& scratch) {
        alignas(64) int32_t high[block_rows][kTile], low[block_rows][kTile];
        const uint8_t* q = queries(p, scratch, block.first_row);
        tiles_and_memory_agree();
        for (int n = 0; n < block.vecs; n += 2) {
            const auto both = n + 1 < block.vecs ? multiply<true> : multiply<false>;
            both(q, row_bytes(p), scratch.k + n * kLanes, high[0] + n * kLanes, low[0] + n * kLanes);
        }
        tiles_and_memory_agree();
        const float* more = p.softcap > 0 ? scratch.zeros : scratch.v_log;
        for (int r = 0; r < block_rows; ++r) {
            const S::Vec query = S::all(r < block.rows ? scratch.q_scale[block.first_row + r] : 0.0f);
            for (int n = 0; n < block.vecs; ++n) {
                const int at = n * kLanes;
                const I::Ints sum = I::add(I::between_halves(I::load(high[r] + at)), I::load(low[r] + at));
                const S::Vec scale = S::mul(query, S::load(scratch.k_scale + at));
                S::store(scratch.scores + r * kTile + at, S::fma(I::floats(sum), scale, S::load(more + at)));
            }
        }
    }

    // The online softmax of a block, as OnInt8::merge_scores; weights of keys that no row sees are zeros.
    OPTKIT_TARGET static void merge_scores(const Block& block, Scratch& scratch, float* m, float* l, float* rescale,
                                           float* step) {
        const __m512 zero = S::all(0.0f);
        alignas(64) float shifts[block_rows];
        __m512 rows[block_rows];
        for (int r = 0; r < block_rows; ++r) {
            const float* row = scratch.scores + r * kTile;
            rows[r] = S::load(row);
            for (int n = 1; n < block.vecs; ++n) rows[r] = S::max(rows[r], S::load(row + n * kLanes));
        }
        const S::Vec tops = fold_rows<true>(rows);
        S::store(shifts, S::sub(or_zero(tops), S::all(kLogWeightSteps)));
        for (int r = 0; r < block_rows; ++r) {
            const float* row = scratch.scores + r * kTile;
            const S::Vec shift = S::all(shifts[r]);
            uint8_t* to = scratch.weights + r * kTile;
            rows[r] = zero;
            for (int n = 0; n < block.vecs; ++n) {
                const S::Vec weight = weight_of(S::sub(S::load(row + n * kLanes), shift));
                rows[r] = S::fma(weight, S::load(scratch.v_inverse + n * kLanes), rows[r]);
                I::store_weights(to + n * kLanes, nullptr, I::rounded(weight));
            }
            for (int n = block.vecs; n < kTileVecs; ++n) std::memset(to + n * kLanes, 0, kLanes);
        }
        add_weights(tops, fold_rows<false>(rows), block.rows, m, l, rescale, step);
    }

    // out[r] = out[r] * rescale[r] + step[r] * sum over keys of weight[r][key] * v[key].
    OPTKIT_TARGET static void weigh(const Problem& p, const Block& block, Scratch& scratch, const float* rescale,
                                    const float* step, float* out) {
        constexpr int at_once = 4;  // tiles of columns
        alignas(64) int32_t products[at_once][block_rows][kLanes];
        constexpr int64_t bytes = sizeof products[0][0];
        const int64_t row = p.width * sizeof(float);
        tiles_and_memory_agree();
        _tile_loadd(4, scratch.weights, kTile);
        for (int d = 0; d < p.width; d += at_once * kLanes) {
            const int tiles = std::min(at_once, (p.width - d) / kLanes);
            const float* v = scratch.v + d;
            _tile_zero(0);
            _tile_loadd(6, v, row);
            _tile_dpbusd(0, 4, 6);
            if (tiles > 1) {
                _tile_zero(1);
                _tile_loadd(7, v + kLanes, row);
                _tile_dpbusd(1, 4, 7);
            }
            if (tiles > 2) {
                _tile_zero(2);
                _tile_loadd(6, v + 2 * kLanes, row);
                _tile_dpbusd(2, 4, 6);
            }
            if (tiles > 3) {
                _tile_zero(3);
                _tile_loadd(7, v + 3 * kLanes, row);
                _tile_dpbusd(3, 4, 7);
            }
            _tile_stored(0, products[0][0], bytes);
            if (tiles > 1) _tile_stored(1, products[1][0], bytes);
            if (tiles > 2) _tile_stored(2, products[2][0], bytes);
            if (tiles > 3) _tile_stored(3, products[3][0], bytes);
            tiles_and_memory_agree();
            for (int r = 0; r < block.rows; ++r)
                for (int n = 0; n < tiles; ++n) {
                    float* to = out + r * p.width + d + n * kLanes;
                    const S::Vec earlier = S::mul(S::load(to), S::all(rescale[r]));
                    S::store(to, S::fma(I::floats(I::load(products[n][r])), S::all(step[r]), earlier));
                }
        }
    }
};
