// Bounds of keys, and the weights of blocks. Included once an instruction set; see simd.h for OPTKIT_TARGET and S, and
// selection.h for the types.
//
// Products of queries and bounds are of integers, 13 and 8 bits, whose sums are exact for heads of up to 4,096 channels.

constexpr float kSteps = 127.0f, kQuerySteps = 4095.0f;  // either side of zero

// x [dim] in steps, away from zero for upper bounds above it, towards zero below; the other way round for lower bounds.
template <bool upper>
OPTKIT_TARGET OPTKIT_INLINE void round_bounds(const float* x, int dim, float inverse, int8_t* to) {
    for (int d = 0; d < dim; ++d) {
        float steps = x[d] * inverse;
        steps = steps < kSteps ? steps : kSteps;
        steps = steps > -kSteps ? steps : -kSteps;
        int32_t whole = static_cast<int32_t>(steps);  // towards zero
        if (upper) whole += static_cast<float>(whole) < steps;
        if (!upper) whole -= static_cast<float>(whole) > steps;
        to[d] = static_cast<int8_t>(whole);
    }
}

// The row of bounds of `count` keys that lie `stride` bytes apart from `keys` on, float32 or int8 with a scale. `room`
// holds 3 dim floats.
OPTKIT_TARGET inline void write_span(const char* keys, int64_t stride, int count, int dim, bool int8_cache, float* room,
                                     int8_t* row) {
    float *upper = room, *lower = room + dim, *key = room + 2 * dim;
    for (int i = 0; i < count; ++i, keys += stride) {
        if (int8_cache) {
            float scale;
            std::memcpy(&scale, keys + dim, sizeof scale);
            const auto* steps = reinterpret_cast<const int8_t*>(keys);
            for (int d = 0; d < dim; ++d) key[d] = static_cast<float>(steps[d]) * scale;
        } else {
            std::memcpy(key, keys, dim * sizeof(float));
        }
        for (int d = 0; d < dim; ++d) {
            upper[d] = i == 0 || upper[d] < key[d] ? key[d] : upper[d];
            lower[d] = i == 0 || lower[d] > key[d] ? key[d] : lower[d];
        }
    }
    const float most = largest(room, 2 * dim), scale = most / kSteps;
    const float inverse = most > 0 && most <= 3.4e38f ? kSteps / most : 0.0f;
    round_bounds<true>(upper, dim, inverse, row);
    round_bounds<false>(lower, dim, inverse, row + dim);
    std::memcpy(row + 2 * dim, &scale, sizeof scale);
}

// The halves of a query q [dim] whose scores have the factor `scale`.
OPTKIT_TARGET inline void round_query(const float* q, int dim, float scale, Query& to) {
    const float most = largest(q, dim), inverse = most > 0 && most <= 3.4e38f ? kQuerySteps / most : 0.0f;
    for (int d = 0; d < dim; ++d) {
        float steps = q[d] * inverse;
        steps = steps < kQuerySteps ? steps : kQuerySteps;
        steps = steps > -kQuerySteps ? steps : -kQuerySteps;
        const int32_t whole = static_cast<int32_t>(steps + (steps < 0 ? -0.5f : 0.5f));
        to.halves[d] = static_cast<int16_t>(whole > 0 ? whole : 0);
        to.halves[dim + d] = static_cast<int16_t>(whole < 0 ? whole : 0);
    }
    to.step = most / kQuerySteps * scale;
}

// The sum of the products of `count` numbers, which is a constant where Count is given: the compiler multiplies pairs of
// 16 bits.
template <int Count>
OPTKIT_TARGET OPTKIT_INLINE int32_t dot(const int16_t* q, const int8_t* row, int count) {
    const int n = Count ? Count : count;
    int32_t sum = 0;
    for (int d = 0; d < n; ++d) sum += static_cast<int32_t>(q[d]) * static_cast<int32_t>(row[d]);
    return sum;
}

// score_blocks for heads of `Count` / 2 channels, or of any number where Count is 0.
template <int Count>
OPTKIT_TARGET void score_rows(const Bounds& b, const int32_t* table, int64_t count, const Query* q, int group,
                              float* scores, int64_t stride) {
    for (int64_t n = 0; n < count; ++n)
        for (int64_t span = 0; span < b.spans; ++span) {
            const int8_t* row = b.at(table[n], span, 0);
            float* to = scores + n * b.spans + span;
            const Query* query = q;
            for (int head = 0; head < b.kv_heads; ++head, row += b.row()) {
                float scale;
                std::memcpy(&scale, row + 2 * b.dim, sizeof scale);
                for (int g = 0; g < group; ++g, ++query, to += stride)
                    *to = static_cast<float>(dot<Count>(query->halves, row, 2 * b.dim)) * (scale * query->step);
            }
        }
}

// The largest scores that `group` queries of each KV head can have with keys of the spans of `count` blocks:
// scores[head * stride + span].
OPTKIT_TARGET inline void score_blocks(const Bounds& b, const int32_t* table, int64_t count, const Query* q, int group,
                                       float* scores, int64_t stride) {
    const auto run = b.dim == 64 ? score_rows<128> : b.dim == 128 ? score_rows<256> : score_rows<0>;
    run(b, table, count, q, group, scores, stride);
}

// weights[n] += the softmax of a query's scores [blocks * spans], summed over the spans of block n. Scores are used up.
OPTKIT_TARGET inline void add_weights(float* scores, int64_t blocks, int64_t spans, float* weights) {
    const int64_t count = blocks * spans;
    float most = scores[0];
    for (int64_t i = 1; i < count; ++i) most = most < scores[i] ? scores[i] : most;
    S::Vec sums = S::all(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const S::Vec e = exp(S::sub(S::load(scores + i), S::all(most)));
        S::store(scores + i, e);
        sums = S::add(sums, e);
    }
    if (i < count) {
        float rest[kLanes];
        for (int j = 0; j < kLanes; ++j) rest[j] = i + j < count ? scores[i + j] - most : -__builtin_inff();
        const S::Vec e = exp(S::load(rest));
        S::store_some(scores + i, e, static_cast<int>(count - i));
        sums = S::add(sums, e);
    }
    const float share = 1.0f / S::sum(sums);
    for (int64_t n = 0; n < blocks; ++n) {
        float sum = 0.0f;
        for (int64_t span = 0; span < spans; ++span) sum += scores[n * spans + span];
        weights[n] += sum * share;
    }
}

inline SelectionFunctions functions() { return {write_span, round_query, score_blocks, add_weights}; }
