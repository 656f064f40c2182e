// Attention over an int8 cache: the functions of attention_tile.h that depend on the cache. Included by its text.
//
// Products are of integers. A query is rounded to 16 bits of its largest number, a row's weights in a tile to 15 bits of
// their largest (each weight times its value's scale): an error up to half a step, 1/65278 and 1/65534 of the largest,
// against 1/254 for the keys and values themselves. Four numbers are two words (simd_int8.h), so a sum is taken twice, of first and of second halves, and
// is exact; its bits depend neither on the instruction set nor on how rows are put together.
//   Scratch.q       [rows / kRows][2][D / 4][kRows]  halves of four numbers of a query, the first ones first
//   Scratch.q_scale [rows]                           what a query's step is worth, in exponents of 2
//   Scratch.q_sums  [rows]                           what undoes the zero point of keys: times the sum of a query
//   Scratch.k       [D / 4][64]                      words of four bytes of a key, with their zero point: a vector holds 16 keys
//   Scratch.v       [64 / 4][Dv to 16]               words of one byte of four values, with theirs
//   Scratch.weights [kRows][2][64 / 4]               halves of four weights

constexpr float kQuerySteps = 127.0f * 256.0f + 127.0f;  // either side of zero
constexpr float kWeightSteps = 32767.0f;

template <class Word>
OPTKIT_INLINE Word word_at(const void* p) {
    Word word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// acc[r][n] += the half of row r, at a + r * a_row + w * a_word, times column n of b, for all words w.
template <Bytes bytes, int half, int R, int NV>
OPTKIT_TARGET OPTKIT_INLINE void add_dots(I::Ints (&acc)[R][NV], const uint8_t* a, int64_t a_row, int64_t a_word,
                                          const uint32_t* b, int64_t b_word, int words) {
    using Kind = I::Dot<bytes, half>;
    for (int w = 0; w < words; ++w, a += a_word, b += b_word) {
        typename Kind::Column column[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) column[n] = Kind::column(b + n * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Kind::Row row = Kind::row(word_at<uint32_t>(a + r * a_row));
#pragma GCC unroll 8
            for (int n = 0; n < NV; ++n) acc[r][n] = Kind::add(acc[r][n], row, column[n]);
        }
    }
}

// acc[r][n] = row r times column n: the sums of both halves, of which the second starts `halves` bytes after the first.
template <Bytes bytes, int R, int NV>
OPTKIT_TARGET OPTKIT_INLINE void multiply(I::Ints (&acc)[R][NV], const uint8_t* a, int64_t halves, int64_t a_row,
                                          int64_t a_word, const uint32_t* b, int64_t b_word, int words) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = I::all(0);
    add_dots<bytes, 0>(acc, a, a_row, a_word, b, b_word, words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = I::between_halves(acc[r][n]);
    add_dots<bytes, 1>(acc, a + halves, a_row, a_word, b, b_word, words);
}

// scores[r][0..16 NV) = q[.][r] . k[.][0..16 NV), times both scales.
template <int R, int NV>
OPTKIT_TARGET void score_int8_tile(const uint8_t* q, const uint32_t* k, int words, const float* q_scale,
                                   const int32_t* q_sums, const float* k_scale, float* scores) {
    constexpr int word = R * sizeof(uint32_t);
    I::Ints acc[R][NV];
    multiply<Bytes::keys>(acc, q, words * word, sizeof(uint32_t), word, k, kTile, words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) {
            const S::Vec scale = S::mul(S::all(q_scale[r]), S::load(k_scale + n * kLanes));
            S::store(scores + r * kTile + n * kLanes, S::mul(I::floats(I::add(acc[r][n], I::all(q_sums[r]))), scale));
        }
}

template <int R, int NV = S::tile_vecs>
OPTKIT_TARGET void score_int8_block(const uint8_t* q, const uint32_t* k, int words, const float* q_scale,
                                    const int32_t* q_sums, const float* k_scale, int vecs, float* scores) {
    for (; vecs >= NV; vecs -= NV, k += NV * kLanes, k_scale += NV * kLanes, scores += NV * kLanes)
        score_int8_tile<R, NV>(q, k, words, q_scale, q_sums, k_scale, scores);
    if constexpr (NV > 1) score_int8_block<R, NV - 1>(q, k, words, q_scale, q_sums, k_scale, vecs, scores);
}

// out[r][0..16 NV) = out[r] * rescale[r] + step[r] * sum over keys of weight[r][key] * v[key]. `sums` undoes the zero
// point of values.
template <int R, int NV>
OPTKIT_TARGET void weigh_int8_tile(const uint8_t* weights, const float* rescale, const float* step, const int32_t* sums,
                                   const uint32_t* v, int64_t width, int start, int stop, float* out) {
    I::Ints acc[R][NV];
    multiply<Bytes::values>(acc, weights + 4 * start, kTile, 2 * kTile, 4, v + start * width, width, stop - start);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) {
            float* to = out + r * width + n * kLanes;
            const S::Vec earlier = S::mul(S::load(to), S::all(rescale[r]));
            const I::Ints total = I::value_zero ? I::add(acc[r][n], I::all(sums[r])) : acc[r][n];
            S::store(to, S::fma(I::floats(total), S::all(step[r]), earlier));
        }
}

template <int R, int NV = S::tile_vecs>
OPTKIT_TARGET void weigh_int8_block(const uint8_t* weights, const float* rescale, const float* step, const int32_t* sums,
                                    const uint32_t* v, int64_t width, int64_t left, int start, int stop, float* out) {
    for (; left >= NV * kLanes; left -= NV * kLanes, v += NV * kLanes, out += NV * kLanes)
        weigh_int8_tile<R, NV>(weights, rescale, step, sums, v, width, start, stop, out);
    if constexpr (NV > 1)
        weigh_int8_block<R, NV - 1>(weights, rescale, step, sums, v, width, left, start, stop, out);
}

// -`zero` times the sum of all lanes: what undoes the zero point of a column. Of NaN it wraps around.
OPTKIT_TARGET inline int32_t without_zero(I::Ints sums, int32_t zero) {
    int32_t lanes[kLanes];
    I::store(lanes, sums);
    uint32_t total = 0;
    for (const int32_t lane : lanes) total += static_cast<uint32_t>(lane);
    return static_cast<int32_t>(-static_cast<uint32_t>(zero) * total);
}

// Of a row: its largest score, the sum of its weights 2^(score - top), what a step of them, each times its value's scale,
// is worth, and what undoes the zero point of values.
struct RowWeights {
    float top, sum, step;
    int32_t zero_sum;
};

// The scores of R rows become weights in steps. Three passes over the rows: each step of a row waits for the one before,
// and rows don't wait for each other. `scores` holds the scaled weights in between.
template <int R>
OPTKIT_TARGET void weigh_scores(float* scores, int vecs, const float* v_scale, uint8_t* weights, RowWeights (&rows)[R]) {
    for (int r = 0; r < R; ++r) {
        const float* row = scores + r * kTile;
        S::Vec top = S::load(row);
        for (int n = 1; n < vecs; ++n) top = S::max(top, S::load(row + n * kLanes));
        rows[r].top = S::largest(top);
    }
    float largest[R];
    for (int r = 0; r < R; ++r) {
        float* row = scores + r * kTile;
        const S::Vec shift = S::all(rows[r].top == -__builtin_inff() ? 0.0f : rows[r].top);
        S::Vec sum = S::all(0.0f), most = sum;
        for (int n = 0; n < vecs; ++n) {
            const S::Vec weight = exp2(S::sub(S::load(row + n * kLanes), shift));
            const S::Vec scaled = S::mul(weight, S::load(v_scale + n * kLanes));
            sum = S::add(sum, weight);
            most = S::max(most, scaled);
            S::store(row + n * kLanes, scaled);
        }
        rows[r].sum = S::sum(sum);
        largest[r] = S::largest(most);
    }
    for (int r = 0; r < R; ++r) {
        const float inverse = largest[r] > 0 ? kWeightSteps / largest[r] : 0.0f;
        uint8_t* to = weights + 2 * r * kTile;
        I::Ints sum = I::all(0);
        for (int n = 0; n < vecs; ++n) {
            const S::Vec scaled = S::load(scores + r * kTile + n * kLanes);
            const I::Ints steps = I::rounded(S::mul(scaled, S::all(inverse)));
            I::store_halves<false>(to + n * kLanes, to + kTile + n * kLanes, steps);
            if (I::value_zero) sum = I::add(sum, steps);
        }
        rows[r].step = largest[r] / kWeightSteps;
        rows[r].zero_sum = I::value_zero ? without_zero(sum, I::value_zero) : 0;
    }
}

struct OnInt8 {
    OPTKIT_TARGET static void pack_queries(const Problem& p, const Item& item, Scratch& scratch) {
        const int rows = item.count * p.group, words = p.depth / 4;
        uint8_t *first = scratch.halves, *second = first + p.depth_bytes;
        uint32_t* to = reinterpret_cast<uint32_t*>(scratch.q);
        for (int row = 0; row < rows; ++row) {
            const int block = row / kRows * kRows, in_block = rows - block < kRows ? rows - block : kRows;
            const float step = halve(query_of(p, item, row), p, first, second, scratch.q_sums[row]);
            scratch.q_scale[row] = step * p.to_exp2;
            uint32_t* at = to + 2 * words * block + row - block;
            for (int w = 0; w < words; ++w) {
                at[w * in_block] = word_at<uint32_t>(first + 4 * w);
                at[(words + w) * in_block] = word_at<uint32_t>(second + 4 * w);
            }
        }
    }

    OPTKIT_TARGET static void pack_tile(const Problem& p, int, int count, Scratch& scratch) {
        transpose_words(p.depth / 4, count, scratch);
        for (int j = 0; j < count; j += kLanes) {
            for (int w = 0; I::key_zero && w < p.depth / 4; ++w) flip_signs(scratch.k + w * kTile + j);
            // A value that is no number becomes a score that is none: rows that may not see it don't.
            const S::Vec value = S::load(scratch.v_scale + j), size = S::abs(value), limit = S::all(__builtin_inff());
            const S::Vec key = S::load(scratch.k_scale + j);
            S::store(scratch.k_scale + j, S::where_less(size, limit, key, S::all(__builtin_nanf(""))));
            S::store(scratch.v_scale + j, S::where_less(size, limit, value, S::all(0.0f)));
        }
        interleave_values(p, count, scratch);
        const int words = I::value_zero ? (count + 3) / 4 * p.width : 0;
        for (int w = 0; w < words; w += kLanes) flip_signs(scratch.v + w);
    }

    template <int R>
    OPTKIT_TARGET static void attend(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
        const int words = p.depth / 4;
        const auto* q = reinterpret_cast<const uint8_t*>(scratch.q) + 8 * words * block.first_row;
        const auto* k = reinterpret_cast<const uint32_t*>(scratch.k);
        const auto* v = reinterpret_cast<const uint32_t*>(scratch.v);
        score_int8_block<R>(q, k, words, scratch.q_scale + block.first_row,
                            scratch.q_sums + block.first_row, scratch.k_scale, block.vecs, scratch.scores);
        if (p.softcap > 0) soft_cap(scratch.scores, R, block.vecs, p.softcap);
        if (p.slopes) add_distances(p, block, scratch.scores);
        mask_block(p, block, scratch.scores);
        float rescale[kLanes], step[kLanes];
        int32_t zero_sums[R];
        merge_scores<R>(block, scratch, sums.m + block.first_row, sums.l + block.first_row, rescale, step, zero_sums);
        weigh_int8_block<R>(scratch.weights, rescale, step, zero_sums, v, p.width, p.width, block.start / 4,
                            (block.stop + 3) / 4, sums.out + block.first_row * p.width);
    }

  private:
    // Sixteen words of bytes, signed to unsigned or back.
    OPTKIT_TARGET OPTKIT_INLINE static void flip_signs(void* words) { I::store(words, I::flip_signs(I::load(words))); }

    // Halves of x [D] in steps of its largest number, and what undoes the zero point of keys; gives what a step is worth.
    OPTKIT_TARGET static float halve(const float* x, const Problem& p, uint8_t* first, uint8_t* second, int32_t& sum) {
        const float most = largest(x, p.dim), inverse = most > 0 ? kQuerySteps / most : 0.0f;
        I::Ints sums = I::all(0);
        for (int d = 0; d < p.dim; d += kLanes) {
            const S::Vec numbers = d + kLanes <= p.dim ? S::load(x + d) : S::load_some(x + d, p.dim - d);
            const I::Ints steps = I::rounded(S::mul(numbers, S::all(inverse)));
            I::store_halves<true>(first + d, second + d, steps);
            sums = I::add(sums, steps);
        }
        sum = without_zero(sums, I::key_zero);
        return most / kQuerySteps;
    }

    // Scratch.v from `count` values; those of the rest of the last word are zero.
    OPTKIT_TARGET static void interleave_values(const Problem& p, int count, Scratch& scratch) {
        auto* to = reinterpret_cast<uint32_t*>(scratch.v);
        for (int j = 0; j < count; j += 4, to += p.width) {
            const char* rows[4];
            for (int i = 0; i < 4; ++i)
                rows[i] = j + i < count ? scratch.values[j + i] : reinterpret_cast<const char*>(scratch.zeros);
            int d = 0;
            for (; d + 4 * kLanes <= p.v_dim; d += 4 * kLanes) I::interleave_64(rows, d, to + d);
            for (; d + kLanes <= p.v_dim; d += kLanes) I::store(to + d, I::interleave(rows, d));
            if (d < p.v_dim) {
                char tails[4][kLanes] = {};
                for (int i = 0; i < 4; ++i) {
                    std::memcpy(tails[i], rows[i] + d, p.v_dim - d);
                    rows[i] = tails[i];
                }
                I::store(to + d, I::interleave(rows, 0));
            }
        }
    }

    // The online softmax of a block: what its earlier sums, and a step of its weights here, are worth from now on. All
    // its powers of 2 are one vector each.
    template <int R>
    OPTKIT_TARGET static void merge_scores(const Block& block, Scratch& scratch, float* m, float* l, float* rescale,
                                           float* step, int32_t* zero_sums) {
        RowWeights rows[R];
        for (int r = 0; r < kLanes; ++r) rescale[r] = step[r] = 0.0f;
        weigh_scores<R>(scratch.scores, block.vecs, scratch.v_scale, scratch.weights, rows);
        for (int r = 0; r < R; ++r) {
            const float old = m[r];
            m[r] = old < rows[r].top ? rows[r].top : old;
            const float shift = m[r] == -__builtin_inff() ? 0.0f : m[r];
            rescale[r] = old - shift;
            step[r] = rows[r].top - shift;
        }
        S::store(rescale, exp2(S::load(rescale)));
        S::store(step, exp2(S::load(step)));
        for (int r = 0; r < R; ++r) {
            l[r] = l[r] * rescale[r] + rows[r].sum * step[r];
            step[r] *= rows[r].step;
            zero_sums[r] = rows[r].zero_sum;
        }
    }
};
