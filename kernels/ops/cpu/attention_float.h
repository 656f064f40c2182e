// Attention over a float32 cache: the functions of attention_tile.h that depend on the cache. Included by its text.
//
//   Scratch.q      [rows / kRows][D][kRows]  scaled queries, so that one step of the product reads kRows neighbours
//   Scratch.k      [D][64]                   the tile's keys, transposed: a vector holds 16 keys
//   Scratch.v      [64][Dv to 16]            the tile's values, or pointers into the cache where a copy doesn't pay

// scores[r][0..16 NV) = q[.][r] . k[.][0..16 NV), each a chain over D in order.
template <int R, int NV>
OPTKIT_TARGET void score_tile(const float* q, const float* k, int depth, float* scores) {
    S::Vec acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) acc[r][n] = S::all(0.0f);
    for (int d = 0; d < depth; ++d, q += R, k += kTile) {
        S::Vec key[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) key[n] = S::load(k + n * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const S::Vec query = S::all(q[r]);
#pragma GCC unroll 8
            for (int n = 0; n < NV; ++n) acc[r][n] = S::fma(query, key[n], acc[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n) S::store(scores + r * kTile + n * kLanes, acc[r][n]);
}

template <int R, int NV = S::tile_vecs>
OPTKIT_TARGET void score_block(const float* q, const float* k, int depth, int vecs, float* scores) {
    for (; vecs >= NV; vecs -= NV, k += NV * kLanes, scores += NV * kLanes) score_tile<R, NV>(q, k, depth, scores);
    if constexpr (NV > 1) score_block<R, NV - 1>(q, k, depth, vecs, scores);
}

// out[r][0..16 NV) = out[r] * rescale[r] + sum over keys of weight[r][key] * v[key], keys in order.
template <int R, int NV>
OPTKIT_TARGET void weigh_tile(const float* weights, const float* rescale, const char* const* v, int64_t column,
                              int start, int stop, float* out, int64_t out_stride) {
    S::Vec acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < NV; ++n)
            acc[r][n] = S::mul(S::load(out + r * out_stride + n * kLanes), S::all(rescale[r]));
    for (int j = start; j < stop; ++j) {
        const float* row = reinterpret_cast<const float*>(v[j]) + column;
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

template <int R, int NV = S::tile_vecs>
OPTKIT_TARGET void weigh_block(const float* weights, const float* rescale, const char* const* v, int64_t column,
                               int start, int stop, float* out, int64_t width) {
    for (; width - column >= NV * kLanes; column += NV * kLanes)
        weigh_tile<R, NV>(weights, rescale, v, column, start, stop, out + column, width);
    if constexpr (NV > 1) weigh_block<R, NV - 1>(weights, rescale, v, column, start, stop, out, width);
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

struct OnFloat {
    // Scratch.q from the item's queries.
    OPTKIT_TARGET static void pack_queries(const Problem& p, const Item& item, Scratch& scratch) {
        const int rows = item.count * p.group;
        for (int row = 0; row < rows; ++row) {
            const int block = row / kRows * kRows, in_block = rows - block < kRows ? rows - block : kRows;
            const float* from = query_of(p, item, row);
            float* to = scratch.q + block * p.depth + row - block;
            for (int d = 0; d < p.dim; ++d) to[d * in_block] = from[d] * p.to_exp2;
        }
    }

    // The tile's keys and values, for as many rows.
    OPTKIT_TARGET static void pack_tile(const Problem& p, int rows, int count, Scratch& scratch) {
        transpose_words(p, p.dim, count, false, scratch);
        if (rows > kRows || p.v_dim % kLanes) copy_values(p, count, scratch);
    }

    template <int R>
    OPTKIT_TARGET static void attend(const Problem& p, const Block& block, Scratch& scratch, const Sums& sums) {
        float rescale[kRows];
        score_block<R>(scratch.q + block.first_row * p.depth, scratch.k, p.depth, block.vecs, scratch.scores);
        if (p.softcap > 0) soft_cap(scratch.scores, R, block.vecs, p.softcap, scratch.zeros);
        if (p.slopes) add_distances(p, block, scratch.scores);
        mask_block(p, block, scratch.scores);
        for (int r = 0; r < R; ++r) {
            const int row = block.first_row + r;
            rescale[r] = softmax_row(scratch.scores + r * kTile, block.vecs, sums.m[row], sums.l[row]);
        }
        float* out = sums.out + block.first_row * p.width;
        weigh_block<R>(scratch.scores, rescale, scratch.values, 0, block.start, block.stop, out, p.width);
    }

  private:
    // Scratch.v from `count` values, each padded with zeros to whole vectors.
    OPTKIT_TARGET static void copy_values(const Problem& p, int count, Scratch& scratch) {
        for (int j = 0; j < count; ++j) {
            const float* from = reinterpret_cast<const float*>(scratch.values[j]);
            float* to = scratch.v + j * p.width;
            int d = 0;
            for (; d + kLanes <= p.v_dim; d += kLanes) S::store(to + d, S::load(from + d));
            if (d < p.v_dim) S::store(to + d, S::load_some(from + d, p.v_dim - d));
            scratch.values[j] = reinterpret_cast<const char*>(to);
        }
    }
};
