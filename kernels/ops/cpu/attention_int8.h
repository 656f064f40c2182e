// Attention over an int8 cache: the functions of attention_tile.h that depend on the cache. Included by its text.
//
// Products are of integers. A query is rounded to 16 bits of its largest number, a row's weights in a tile (each weight
// times its value's scale) in 255 steps of their largest: errors up to 1/65278 and 1/510 of the largest, beside 1/254 for
// the keys and values themselves. Sums are exact; their bits depend neither on the instruction set nor on how rows are put
// together.
//
// The scale of a value is part of the score, as its logarithm: the exponential gives the weight times the scale, whose
// largest is known before any exponential is computed. The sum of the weights divides by the scale again.
//   Scratch.q         [rows][2][D to 16]             halves of the numbers of a query (simd_int8.h)
//   Scratch.q_scale   [rows]                         what a query's step is worth, in exponents of 2
//   Scratch.q_sums    [rows]                         what undoes the zero point of keys: times the sum of a query
//   Scratch.k         [D / 4][64]                    words of four bytes of a key, with their zero point: a vector holds 16 keys
//   Scratch.v         [64 / 4][Dv to 16]             words of one byte of four values, with theirs
//   Scratch.key_lines, value_lines                   where these words lie: there, or in a cache of interleaved codes
//   Scratch.v_log     [64]                           logarithms of the values' scales, to base 2, of a tile
//   Scratch.v_inverse [64]                           of a tile: what a weight times its value's scale is multiplied by to give the weight
//   Scratch.weights   [kRows][words][64 / 4]         words of four weights

constexpr float kQuerySteps = 127.0f * 256.0f + 127.0f;  // either side of zero
constexpr float kWeightSteps = 255.0f;
constexpr float kLogWeightSteps = 7.99435344f;

// A value with a smaller scale counts as zeros, an error below 1e-17. Zeros have any scale; kScaleOfZeros is small beside
// that of other values, whose weights take the steps, and far from underflow.
constexpr float kSmallestScale = 0x1p-64f, kBelowSmallest = 0x1.fffffep-65f, kScaleOfZeros = 0x1p-24f;

// The logarithm of x > 0 to base 2, within 2e-6. Without fused multiply-adds, the same bits everywhere.
OPTKIT_INLINE float log2_of(float x) {
    const int32_t root = 0x3f3504f3;  // of 1/2: the mantissa goes from there to the root of 2
    const int32_t bits = to_bits(x), exponent = (bits - root) >> 23;
    const float m = from_bits(bits - exponent * (1 << 23)) - 1.0f;
    float p = 1.761759785e-1f;
    p = p * m - 2.709801878e-1f;
    p = p * m + 2.950987552e-1f;
    p = p * m - 3.591845575e-1f;
    p = p * m + 4.806487336e-1f;
    p = p * m - 7.213676975e-1f;
    p = p * m + 1.442696307f;
    return p * m + static_cast<float>(exponent);
}

// 2^x within 8e-5, for x up to 127; 0 below -126 (also for -inf), NaN for NaN: weights, of which eight bits are kept.
OPTKIT_TARGET OPTKIT_INLINE S::Vec weight_of(S::Vec x) {
    const S::Vec n = S::round(x), f = S::sub(x, n);
    S::Vec p = S::fma(S::all(5.517163639e-2f), f, S::all(2.426111197e-1f));
    p = S::fma(p, f, S::all(6.932609915e-1f));
    p = S::fma(p, f, S::all(9.999280738e-1f));
    return S::times_two_to_or_0(p, n);
}

template <class Word>
OPTKIT_INLINE Word word_at(const void* p) {
    Word word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// acc[r][n] += the word of row r, at a + r * a_row + w * a_word, times column b[n] + w * b_word, for all words w. With
// AHEAD it starts loading the same columns of `next`.
template <Bytes bytes, int half, bool AHEAD, int R, int NV>
OPTKIT_TARGET OPTKIT_INLINE void add_dots(I::Ints (&acc)[R][NV], const uint8_t* a, int64_t a_row, int64_t a_word,
                                          const uint32_t* const (&b)[NV], const uint32_t* const (&next)[NV],
                                          int64_t b_word, int words) {
    using Kind = I::Dot<bytes, half>;
    constexpr int kThrees = (R + 2) / 3;  // rows are addressed in threes: x86 has a + 2 * stride
    const uint8_t* three[kThrees];
#pragma GCC unroll 8
    for (int i = 0; i < kThrees; ++i) three[i] = a + 3 * i * a_row;
    int64_t at = 0;
    for (int w = 0; w < words; ++w, at += b_word) {
        typename Kind::Column column[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) column[n] = Kind::column(b[n] + at);
#pragma GCC unroll 8
        for (int n = 0; AHEAD && n < NV; ++n) __builtin_prefetch(next[n] + at, 0, 3);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const typename Kind::Row row = Kind::row(word_at<uint32_t>(three[r / 3] + r % 3 * a_row));
#pragma GCC unroll 8
            for (int n = 0; n < NV; ++n) acc[r][n] = Kind::add(acc[r][n], row, column[n]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kThrees; ++i) three[i] += a_word;
    }
}

// acc[r][n] = start[r], to which products of second halves are added; first halves come before (`between_halves`).
template <int R, int NV>
OPTKIT_TARGET OPTKIT_INLINE void begin_sums(I::Ints (&acc)[R][NV], const int32_t* start) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = I::all(start ? start[r] : 0);
}

// scores[r][0..16 NV) = q[r] . k[n][.][0..16), times both scales, plus `v_log`. The second halves of a query lie `half` bytes
// behind the first ones.
template <bool AHEAD, int R, int NV>
OPTKIT_TARGET void score_int8_tile(const uint8_t* q, int64_t half, const uint32_t* const* k, const uint32_t* const* next,
                                   int64_t k_step, int words, const float* q_scale, const int32_t* q_sums,
                                   const float* k_scale, const float* v_log, float* scores) {
    const uint32_t *lines[NV], *after[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) lines[n] = k[n], after[n] = next[n];
    I::Ints acc[R][NV];
    begin_sums(acc, nullptr);
    add_dots<Bytes::keys, 0, AHEAD>(acc, q, 2 * half, sizeof(uint32_t), lines, after, k_step, words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = I::add(I::between_halves(acc[r][n]), I::all(q_sums[r]));
    add_dots<Bytes::keys, 1, false>(acc, q + half, 2 * half, sizeof(uint32_t), lines, lines, k_step, words);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) {
            const S::Vec scale = S::mul(S::all(q_scale[r]), S::load(k_scale + n * kLanes));
            S::store(scores + r * kTile + n * kLanes, S::fma(I::floats(acc[r][n]), scale, S::load(v_log + n * kLanes)));
        }
}

template <bool AHEAD, int R, int NV = S::tile_vecs>
OPTKIT_TARGET void score_int8_block(const uint8_t* q, int64_t half, const uint32_t* const* k, const uint32_t* const* next,
                                    int64_t k_step, int words, const float* q_scale, const int32_t* q_sums,
                                    const float* k_scale, const float* v_log, int vecs, float* scores) {
    constexpr int N = NV * kLanes;
    for (; vecs >= NV; vecs -= NV, k += NV, next += NV, k_scale += N, v_log += N, scores += N)
        score_int8_tile<AHEAD, R, NV>(q, half, k, next, k_step, words, q_scale, q_sums, k_scale, v_log, scores);
    if constexpr (NV > 1)
        score_int8_block<AHEAD, R, NV - 1>(q, half, k, next, k_step, words, q_scale, q_sums, k_scale, v_log, vecs, scores);
}

// acc[r][n] += the sum over fours of keys from `start` to `stop` of weights of row r times 16 values from `column` + 16 n on.
template <int half, bool AHEAD, int R, int NV>
OPTKIT_TARGET OPTKIT_INLINE void add_values(I::Ints (&acc)[R][NV], const uint8_t* weights, const Lines& v, const Lines& next,
                                            int64_t column, int start, int stop) {
    constexpr int fours = kLanes / 4;  // of a pointer
    for (int four = start, count; four < stop; four += count) {
        count = std::min(stop - four, v.together - four % v.together);
        const int64_t at = four % fours * v.step + column;
        const uint32_t *lines[NV], *after[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) {
            lines[n] = v.of[four / fours] + at + n * kLanes;
            after[n] = next.of[four / fours] + at + n * kLanes;
        }
        const uint8_t* row = weights + (half * kTile + 4 * four);
        add_dots<Bytes::values, half, AHEAD>(acc, row, I::weight_words * kTile, 4, lines, after, v.step, count);
    }
}

// out[r][0..16 NV) = out[r] * rescale[r] + step[r] * sum over keys of weight[r][key] * v[key][column..]. `sums` undoes the
// zero point of values.
template <bool AHEAD, int R, int NV>
OPTKIT_TARGET void weigh_int8_tile(const uint8_t* weights, const float* rescale, const float* step, const int32_t* sums,
                                   const Lines& v, const Lines& next, int64_t width, int64_t column, int start, int stop,
                                   float* out) {
    I::Ints acc[R][NV];
    begin_sums(acc, sums);
    add_values<0, AHEAD>(acc, weights, v, next, column, start, stop);
    if constexpr (I::weight_words == 2) add_values<1, false>(acc, weights, v, v, column, start, stop);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) {
            float* to = out + r * width + column + n * kLanes;
            const S::Vec earlier = S::mul(S::load(to), S::all(rescale[r]));
            S::store(to, S::fma(I::floats(acc[r][n]), S::all(step[r]), earlier));
        }
}

template <bool AHEAD, int R, int NV = S::tile_vecs>
OPTKIT_TARGET void weigh_int8_block(const uint8_t* weights, const float* rescale, const float* step, const int32_t* sums,
                                    const Lines& v, const Lines& next, int64_t width, int64_t column, int start, int stop,
                                    float* out) {
    for (; width - column >= NV * kLanes; column += NV * kLanes)
        weigh_int8_tile<AHEAD, R, NV>(weights, rescale, step, sums, v, next, width, column, start, stop, out);
    if constexpr (NV > 1)
        weigh_int8_block<AHEAD, R, NV - 1>(weights, rescale, step, sums, v, next, width, column, start, stop, out);
}

// -`zero` times the sum of all lanes: what undoes the zero point of a column. Of NaN it wraps around.
OPTKIT_TARGET inline int32_t without_zero(I::Ints sums, int32_t zero) {
    int32_t lanes[kLanes];
    I::store(lanes, sums);
    uint32_t total = 0;
    for (const int32_t lane : lanes) total += static_cast<uint32_t>(lane);
    return static_cast<int32_t>(-static_cast<uint32_t>(zero) * total);
}

// Of each row: what undoes the zero point of its values. Lane r of `top` and `sum` is of row r: its largest score, and the
// sum of its weights in steps of 2^top / kWeightSteps.
template <int R>
struct RowWeights {
    S::Vec top, sum;
    int32_t zero_sums[R];
};

// `scores`, or 0 for a row that sees no key.
OPTKIT_TARGET OPTKIT_INLINE S::Vec or_zero(S::Vec scores) {
    return S::where_less(scores, S::all(-__FLT_MAX__), S::all(0.0f), scores);
}

// The online softmax of `count` rows: their largest scores m and sums of weights l get those of a tile, whose weights are in
// steps of 2^top / kWeightSteps. What the earlier sums, and a step here, are worth from now on go to `rescale` and `step` [16].
OPTKIT_TARGET OPTKIT_INLINE void add_weights(S::Vec tops, S::Vec sums, int count, float* m, float* l, float* rescale, float* step) {
    const S::Vec old = S::load_some(m, count), most = S::where_less(old, tops, tops, old), shift = or_zero(most);
    const S::Vec keeps = exp2(S::sub(old, shift));
    const S::Vec takes = S::mul(exp2(S::sub(tops, shift)), S::all(1.0f / kWeightSteps));
    S::store_some(m, most, count);
    S::store_some(l, S::add(S::mul(S::load_some(l, count), keeps), S::mul(sums, takes)), count);
    S::store(rescale, keeps);
    S::store(step, takes);
}

// The scores of R rows become weights in steps. Two passes over the rows: each step of a row waits for the one before,
// and rows don't wait for each other.
template <int R>
OPTKIT_TARGET OPTKIT_INLINE RowWeights<R> weigh_scores(const float* scores, int vecs, const float* v_inverse, uint8_t* weights) {
    RowWeights<R> found;
    S::Vec folds[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        folds[r] = S::load(scores + r * kTile);
        for (int n = 1; n < vecs; ++n) folds[r] = S::max(folds[r], S::load(scores + r * kTile + n * kLanes));
    }
    found.top = fold_rows<true>(folds);
    float shifts[kLanes];
    S::store(shifts, S::sub(or_zero(found.top), S::all(kLogWeightSteps)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const float* row = scores + r * kTile;
        const S::Vec shift = S::all(shifts[r]);
        uint8_t* to = weights + I::weight_words * r * kTile;
        S::Vec sum = S::all(0.0f);
        I::Ints total = I::all(0);
        for (int n = 0; n < vecs; ++n) {
            const S::Vec weight = weight_of(S::sub(S::load(row + n * kLanes), shift));
            sum = S::fma(weight, S::load(v_inverse + n * kLanes), sum);
            const I::Ints steps = I::rounded(weight);
            I::store_weights(to + n * kLanes, to + kTile + n * kLanes, steps);
            if (I::value_zero) total = I::add(total, steps);
        }
        folds[r] = sum;
        found.zero_sums[r] = I::value_zero ? without_zero(total, I::value_zero) : 0;
    }
    found.sum = fold_rows<false>(folds);
    return found;
}

// Word d of the result: byte d of four rows of `dim` bytes.
OPTKIT_TARGET OPTKIT_INLINE void interleave_rows(const char* const* rows, int dim, uint32_t* to) {
    int d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) I::interleave_64(rows, d, to + d);
    for (; d + kLanes <= dim; d += kLanes) I::store(to + d, I::interleave(rows, d));
    if (d == dim) return;
    char tails[4][kLanes] = {};
    const char* tail_of[4];
    for (int i = 0; i < 4; ++i) {
        std::memcpy(tails[i], rows[i] + d, dim - d);
        tail_of[i] = tails[i];
    }
    I::store(to + d, I::interleave(tail_of, 0));
}

// Sixteen numbers of x [D] from `d` on, zeros past the last.
OPTKIT_TARGET OPTKIT_INLINE S::Vec numbers_at(const float* x, int dim, int d) {
    return d + kLanes <= dim ? S::load(x + d) : S::load_some(x + d, dim - d);
}

// The largest |x| (`largest`) of each of up to 16 rows x[r] [D], in lane r. Rows that are folded side by side don't wait for
// each other.
template <class Vectors>
OPTKIT_TARGET OPTKIT_INLINE S::Vec largest_of_rows(const float* const* x, int count, int dim) {
    if constexpr (Vectors::folds_rows) {
        S::Vec rows[kLanes];
        for (int r = 0; r < kLanes; ++r) {
            rows[r] = S::all(0.0f);
            for (int d = 0; r < count && d < dim; d += kLanes)
                rows[r] = Vectors::larger_bits(rows[r], S::abs(numbers_at(x[r], dim, d)));
        }
        return Vectors::largest_bits_each(rows);
    } else {
        float most[kLanes] = {};
        for (int r = 0; r < count; ++r) most[r] = largest(x[r], dim);
        return S::load(most);
    }
}

struct OnInt8 {
    OPTKIT_TARGET static void pack_queries(const Problem& p, const Item& item, Scratch& scratch) {
        const int rows = item.count * p.group;
        uint8_t* to = reinterpret_cast<uint8_t*>(scratch.q);
        const float *x[kLanes], *later[kLanes];
        for (int r = 0; r < std::min(rows, kLanes); ++r) later[r] = query_of(p, item, r);
        for (int row = 0; row < rows; row += kLanes, to += kLanes * query_bytes(p)) {
            const int count = std::min(rows - row, kLanes), next = std::min(rows - row - count, kLanes);
            std::copy_n(later, count, x);
            for (int r = 0; r < next; ++r) {  // rows of a long prompt lie in a far cache
                later[r] = query_of(p, item, row + kLanes + r);
                for (int d = 0; d < p.dim; d += kLanes) __builtin_prefetch(later[r] + d);
            }
            round_queries<S>(x, count, p, to, scratch.q_scale + row, scratch.q_sums + row);
        }
    }

    OPTKIT_TARGET static void pack_tile(const Problem& p, int, int count, Scratch& scratch) {
        constexpr bool as_they_lie = I::key_zero && !I::value_zero;  // the zero points of interleaved codes
        if (!p.interleaved) return pack_rows(p, count, scratch, I::key_zero);
        if (read_all_scales(count, scratch) || scratch.scattered || !as_they_lie)
            pack_lines(p, count, scratch, I::key_zero);
    }

    // The same into Scratch.k and Scratch.v, with signed keys.
    OPTKIT_TARGET static void pack_signed(const Problem& p, int count, Scratch& scratch) {
        if (!p.interleaved) return pack_rows(p, count, scratch, false);
        read_all_scales(count, scratch);
        pack_lines(p, count, scratch, false);
    }

    template <int R>
    OPTKIT_TARGET static void attend(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
        scratch.lines_ahead ? attend<R, true>(p, block, scratch, sums) : attend<R, false>(p, block, scratch, sums);
    }

    template <int R, bool AHEAD>
    OPTKIT_TARGET static void attend(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
        const int words = p.depth / 4;
        const auto* q = reinterpret_cast<const uint8_t*>(scratch.q) + query_bytes(p) * block.first_row;
        score_int8_block<AHEAD, R>(q, p.depth_bytes, scratch.key_lines.of, scratch.next_keys.of, scratch.key_lines.step, words,
                                   scratch.q_scale + block.first_row, scratch.q_sums + block.first_row, scratch.k_scale,
                                   p.softcap > 0 ? scratch.zeros : scratch.v_log, block.vecs, scratch.scores);
        if (p.softcap > 0) soft_cap(scratch.scores, R, block.vecs, p.softcap, scratch.v_log);
        if (p.slopes) add_distances(p, block, scratch.scores);
        mask_block(p, block, scratch.scores);
        float rescale[kLanes], step[kLanes];
        int32_t zero_sums[R];
        merge_scores<R>(block, scratch, sums.m + block.first_row, sums.l + block.first_row, rescale, step, zero_sums);
        weigh_int8_block<AHEAD, R>(scratch.weights, rescale, step, zero_sums, scratch.value_lines, scratch.next_values,
                                   p.width, 0, block.start / 4, (block.stop + 3) / 4, sums.out + block.first_row * p.width);
    }

    // Halves of x [D] in steps of its largest number, and what undoes the zero point of keys; gives what a step is worth.
    OPTKIT_TARGET static float round_query(const float* x, const Problem& p, uint8_t* first, uint8_t* second,
                                           int32_t& sum) {
        const float most = largest(x, p.dim), inverse = most > 0 ? kQuerySteps / most : 0.0f;
        sum = without_zero(round_numbers(x, p, inverse, first, second), I::key_zero);
        return most / kQuerySteps;
    }

    // The scores of a block become weights, which are added to its sums (`add_weights`); and what undoes the zero point of values.
    template <int R>
    OPTKIT_TARGET OPTKIT_INLINE static void merge_scores(const Block& block, Scratch& scratch, float* m, float* l, float* rescale,
                                                         float* step, int32_t* zero_sums) {
        const RowWeights<R> rows = weigh_scores<R>(scratch.scores, block.vecs, scratch.v_inverse, scratch.weights);
        add_weights(rows.top, rows.sum, R, m, l, rescale, step);
        for (int r = 0; r < R; ++r) zero_sums[r] = rows.zero_sums[r];
    }

  private:
    // Bytes of a row of Scratch.q.
    OPTKIT_INLINE static int64_t query_bytes(const Problem& p) { return int64_t{2} * p.depth_bytes; }

    // Halves of x [D] times `inverse`, rounded; gives the sums of the numbers of each lane.
    OPTKIT_TARGET OPTKIT_INLINE static I::Ints round_numbers(const float* x, const Problem& p, float inverse, uint8_t* first,
                                                             uint8_t* second) {
        I::Ints sums = I::all(0);
        for (int d = 0; d < p.dim; d += kLanes) {
            const I::Ints steps = I::rounded(S::mul(numbers_at(x, p.dim, d), S::all(inverse)));
            I::store_query(first + d, second + d, steps);
            sums = I::add(sums, steps);
        }
        return sums;
    }

    // round_query of up to 16 rows, into rows of Scratch.q.
    template <class Vectors>
    OPTKIT_TARGET OPTKIT_INLINE static void round_queries(const float* const* x, int count, const Problem& p, uint8_t* to,
                                                          float* q_scale, int32_t* q_sums) {
        if constexpr (Vectors::folds_rows) {
            const S::Vec most = largest_of_rows<S>(x, count, p.dim), steps = S::all(kQuerySteps), none = S::all(0.0f);
            float inverse[kLanes];
            S::store(inverse, S::where_less(none, most, S::div(steps, most), none));
            S::store_some(q_scale, S::mul(S::div(most, steps), S::all(p.to_exp2)), count);
            S::Vec rows[kLanes];
            for (int r = 0; r < count; ++r, to += query_bytes(p))
                rows[r] = (S::Vec)round_numbers(x[r], p, inverse[r], to, to + p.depth_bytes);
            for (int r = count; r < kLanes; ++r) rows[r] = none;
            int32_t sums[kLanes];
            I::store(sums, (I::Ints)Vectors::sum_bits_each(rows));
            for (int r = 0; r < count; ++r)
                q_sums[r] = static_cast<int32_t>(-uint32_t{I::key_zero} * static_cast<uint32_t>(sums[r]));
        } else {
            for (int r = 0; r < count; ++r, to += query_bytes(p))
                q_scale[r] = round_query(x[r], p, to, to + p.depth_bytes, q_sums[r]) * p.to_exp2;
        }
    }

    // Rows of keys, with their zero point or signed, and of values.
    OPTKIT_TARGET static void pack_rows(const Problem& p, int count, Scratch& scratch, bool zero_point) {
        transpose_words(p, p.depth / 4, count, zero_point, scratch);
        for (int j = 0; j < count; j += kLanes)
            if (read_scales(j, scratch))
                for (int i = j; i < j + kLanes; ++i)
                    if (!(scratch.v_scale[i] >= kSmallestScale)) scratch.values[i] = reinterpret_cast<const char*>(scratch.zeros);
        interleave_values(p, count, scratch);
        read_scratch(p, count, scratch);
    }

    // Interleaved codes copied, keys with their zero point or signed.
    OPTKIT_TARGET static void pack_lines(const Problem& p, int count, Scratch& scratch, bool zero_point) {
        auto *k = reinterpret_cast<uint32_t*>(scratch.k), *v = reinterpret_cast<uint32_t*>(scratch.v);
        if (scratch.scattered)
            gather(p, count, scratch, k, v);
        else
            for (int j = 0; j < count; j += kLanes) copy_line(p, j, scratch, k + j, v + j / 4 * p.width);
        for (int j = 0; j < count; ++j)
            if (scratch.v_scale[j] > 0.0f && scratch.v_scale[j] < kSmallestScale) {
                const uint32_t others = ~(255u << j % 4 * 8);
                for (int d = 0; d < p.width; ++d) v[j / 4 * p.width + d] &= others;
            }
        for (int w = 0; !zero_point && w < p.depth / 4; ++w)
            for (int j = 0; j < count; j += kLanes) flip_signs(k + w * kTile + j);
        read_scratch(p, count, scratch);
    }

    // Sixteen tokens of the tile from `j` on.
    OPTKIT_TARGET static void copy_line(const Problem& p, int j, const Scratch& scratch, uint32_t* k, uint32_t* v) {
        const uint32_t *keys = scratch.key_lines.of[j / kLanes], *values = scratch.value_lines.of[j / kLanes];
        for (int w = 0; w < p.depth / 4; ++w) I::store(k + w * kTile, I::load(keys + w * scratch.key_lines.step));
        for (int four = 0; four < kLanes / 4; ++four, v += p.width, values += scratch.value_lines.step)
            for (int d = 0; d < p.width; d += kLanes) I::store(v + d, I::load(values + d));
    }

    // `count` tokens that lie anywhere; those of the rest of the last vector are zero.
    OPTKIT_TARGET static void gather(const Problem& p, int count, const Scratch& scratch, uint32_t* k, uint32_t* v) {
        for (int j = count / kLanes * kLanes; j < count; j += kLanes)
            for (int w = 0; w < p.depth / 4; ++w) I::store(k + w * kTile + j, I::all(0));
        std::memset(v, 0, (count + 3) / 4 * p.width * sizeof *v);
        for (int j = 0; j < count; ++j) {
            for (int w = 0; w < p.depth / 4; ++w)
                k[w * kTile + j] = word_at<uint32_t>(scratch.keys[j] + w * p.block_size * 4);
            const int from = scratch.lanes[j] * 8, to = j % 4 * 8;
            uint32_t* four = v + j / 4 * p.width;
            for (int d = 0; d < p.v_dim; ++d) four[d] |= (word_at<uint32_t>(scratch.values[j] + 4 * d) >> from & 255u) << to;
        }
    }

    // What is multiplied lies in Scratch.k and Scratch.v, whose signed values get their zero point.
    OPTKIT_TARGET OPTKIT_INLINE static void read_scratch(const Problem& p, int count, Scratch& scratch) {
        const int words = I::value_zero ? (count + 3) / 4 * p.width : 0;
        for (int w = 0; w < words; w += kLanes) flip_signs(scratch.v + w);
        for (int n = 0; n < kTileVecs; ++n) {
            scratch.key_lines.of[n] = reinterpret_cast<const uint32_t*>(scratch.k) + n * kLanes;
            scratch.value_lines.of[n] = reinterpret_cast<const uint32_t*>(scratch.v) + n * kLanes / 4 * p.width;
        }
        scratch.key_lines.step = kTile;
        scratch.value_lines.step = p.width;
        scratch.value_lines.together = kTile / 4;
    }

    // True where a value of interleaved codes counts as zeros and isn't.
    OPTKIT_TARGET static bool read_all_scales(int count, Scratch& scratch) {
        bool found = false;
        for (int j = 0; j < count; j += kLanes)
            if (read_scales(j, scratch))
                for (int i = j; i < j + kLanes; ++i)
                    found |= scratch.v_scale[i] > 0.0f && scratch.v_scale[i] < kSmallestScale;
        return found;
    }

    // The scales of keys, and the logarithms and inverses of those of values, of 16 tokens from `j` on. True where a value
    // counts as zeros.
    OPTKIT_TARGET OPTKIT_INLINE static bool read_scales(int j, Scratch& scratch) {
        // A value that is no number becomes a score that is none: rows that may not see it don't.
        const S::Vec key = S::load(scratch.k_scale + j), scale = S::load(scratch.v_scale + j), least = S::all(kBelowSmallest);
        S::store(scratch.k_scale + j, S::where_less(S::abs(scale), S::all(__builtin_inff()), key, S::all(__builtin_nanf(""))));
        const S::Vec sizes = S::where_less(least, scale, scale, S::all(kScaleOfZeros));
        S::store(scratch.v_inverse + j, S::div(S::all(1.0f), sizes));
        float size[kLanes];
        S::store(size, sizes);
        for (int i = 0; i < kLanes; ++i) scratch.v_log[j + i] = log2_of(size[i]);  // GCC makes vectors of this loop
        return S::largest(S::where_less(least, scale, S::all(0.0f), S::all(1.0f))) != 0.0f;
    }

    // Scratch.v from `count` values; those of the rest of the last word are zero.
    OPTKIT_TARGET static void interleave_values(const Problem& p, int count, Scratch& scratch) {
        auto* to = reinterpret_cast<uint32_t*>(scratch.v);
        for (int j = 0; j < count; j += 4, to += p.width) {
            const char* rows[4];
            for (int i = 0; i < 4; ++i)
                rows[i] = j + i < count ? scratch.values[j + i] : reinterpret_cast<const char*>(scratch.zeros);
            interleave_rows(rows, p.v_dim, to);
        }
    }
};
