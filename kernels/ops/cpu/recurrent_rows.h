// Ops with a recurrent state on one item: some channels, or a head, of one sequence. Included once an instruction set.
//
// Tokens are taken in order, and each element of a state is one chain of operations in that order. Sums over the rows of
// a state are one chain too, from the first row to the last. So a sequence has the same bits in any batch and in any
// chunks. A decode takes the same steps on the state where it lies in the pool.

OPTKIT_TARGET OPTKIT_INLINE S::Vec get(const float* p, int64_t lanes) {
    return lanes >= kLanes ? S::load(p) : S::load_some(p, static_cast<int>(lanes));
}
OPTKIT_TARGET OPTKIT_INLINE void put(float* p, S::Vec a, int64_t lanes) {
    lanes >= kLanes ? S::store(p, a) : S::store_some(p, a, static_cast<int>(lanes));
}

// x / (1 + e^-x), from e^-|x|, which can't overflow.
OPTKIT_TARGET OPTKIT_INLINE S::Vec silu(S::Vec x) {
    const S::Vec e = exp(S::sub(S::all(0.0f), S::abs(x)));
    const S::Vec numerator = S::where_less(x, S::all(0.0f), S::mul(x, e), x);
    return S::div(numerator, S::add(S::all(1.0f), e));
}

// -- short convolution -------------------------------------------------------------------------------------

// Channels [from, to) of the rows of one sequence.
OPTKIT_TARGET inline void conv_item(const ShortConv& op, const Rows& rows, int64_t from, int64_t to) {
    const int64_t kept = op.taps - 1, channels = op.channels;
    float* state = op.pool + rows.slot * kept * channels;
    for (int64_t t = 0; t < rows.count; ++t) {
        float* out = op.out + (rows.first + t) * channels;
        for (int64_t c = from; c < to; c += kLanes) {
            S::Vec total = op.bias ? get(op.bias + c, to - c) : S::all(0.0f);
            for (int64_t j = 0; j <= kept; ++j) {
                const int64_t at = t - kept + j;
                if (at < 0 && rows.begins) continue;
                const float* x = at < 0 ? state + (at + kept) * channels : op.x + (rows.first + at) * op.x_stride;
                total = S::fma(get(op.weight + j * channels + c, to - c), get(x + c, to - c), total);
            }
            put(out + c, op.silu ? silu(total) : total, to - c);
        }
    }
    for (int64_t i = 0; i < kept; ++i) {  // ascending: a row moves to a row that was read
        const int64_t at = rows.count - kept + i;
        float* row = state + i * channels;
        if (at >= 0)
            std::memcpy(row + from, op.x + (rows.first + at) * op.x_stride + from, (to - from) * sizeof(float));
        else if (rows.begins)
            std::memset(row + from, 0, (to - from) * sizeof(float));
        else
            std::memmove(row + from, state + (at + kept) * channels + from, (to - from) * sizeof(float));
    }
}

// -- a matrix for each head --------------------------------------------------------------------------------

// Rows of q and k of up to kSegment tokens under one head, and the decays; see Prepared.
OPTKIT_TARGET inline float inverse_norm(const float* x, int64_t n) {
    S::Vec sum = S::all(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) {
        const S::Vec v = get(x + i, n - i);
        sum = S::fma(v, v, sum);
    }
    return 1.0f / sqrtf(S::sum(sum) + 1e-6f);
}

OPTKIT_TARGET inline void scaled_row(const float* x, float by, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += kLanes) put(out + i, S::mul(get(x + i, n - i), S::all(by)), n - i);
}

OPTKIT_TARGET inline float dot(const float* a, const float* b, int64_t n) {
    S::Vec sum = S::all(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) sum = S::fma(get(a + i, n - i), get(b + i, n - i), sum);
    return S::sum(sum);
}

OPTKIT_TARGET inline void prepare(const HeadScan& op, int64_t head, int64_t first, int64_t count, const Prepared& p) {
    const int64_t n = op.dim, key_head = head / (op.heads / op.key_heads);
    for (int64_t t = 0; t < count; ++t) {
        const float *q = op.q + (first + t) * op.q_stride + key_head * n, *k = op.k + (first + t) * op.k_stride + key_head * n;
        const float* g = op.g + (first + t) * op.g_stride;
        scaled_row(q, op.normalize ? inverse_norm(q, n) * op.scale : op.scale, n, p.q + t * n);
        scaled_row(k, op.normalize ? inverse_norm(k, n) : 1.0f, n, p.k + t * n);
        if (op.by_channel) {
            float *decay = p.decay + t * n, *dk = p.decayed_k + t * n, *dq = p.decayed_q + t * n;
            for (int64_t i = 0; i < n; i += kLanes) {
                const S::Vec e = exp(get(g + head * n + i, n - i));
                put(decay + i, e, n - i);
                put(dk + i, S::mul(e, get(p.k + t * n + i, n - i)), n - i);
                put(dq + i, S::mul(e, get(p.q + t * n + i, n - i)), n - i);
            }
        } else {
            p.decay[t] = exp2_of((op.a ? g[head] * op.a[head] : g[head]) * 1.44269504089f);
        }
        p.qk[t] = dot(p.q + t * n, p.k + t * n, n);
    }
}

// One token on `vectors` * 16 columns of a state with rows of `stride` floats: v and out are those columns.
template <int vectors, bool by_channel>
OPTKIT_TARGET OPTKIT_INLINE void head_step(const HeadScan& op, const Prepared& p, int64_t t, int64_t head, int64_t token,
                                           float* state, int64_t stride, const float* v, float* out, int64_t lanes) {
    const int64_t n = op.dim;
    const float *k = p.k + t * n, *q = p.q + t * n;
    const float *read_k = by_channel ? p.decayed_k + t * n : k, *read_q = by_channel ? p.decayed_q + t * n : q;
    S::Vec kept[vectors], result[vectors], delta[vectors];
    for (int i = 0; i < vectors; ++i) kept[i] = result[i] = S::all(0.0f);
    if (op.beta) {
        for (int64_t d = 0; d < n; ++d) {
            const S::Vec by_k = S::all(read_k[d]), by_q = S::all(read_q[d]);
            for (int i = 0; i < vectors; ++i) {
                const S::Vec s = S::load(state + d * stride + i * kLanes);
                kept[i] = S::fma(by_k, s, kept[i]);
                result[i] = S::fma(by_q, s, result[i]);
            }
        }
    } else {
        for (int64_t d = 0; d < n; ++d) {
            const S::Vec by_q = S::all(read_q[d]);
            for (int i = 0; i < vectors; ++i)
                result[i] = S::fma(by_q, S::load(state + d * stride + i * kLanes), result[i]);
        }
    }
    const S::Vec decay = S::all(by_channel ? 1.0f : p.decay[t]), qk = S::all(p.qk[t]);
    const float* g = op.g + token * op.g_stride;
    const S::Vec rate = S::all(op.beta ? op.beta[token * op.beta_stride + head] : g[head]);
    const S::Vec skip = S::all(op.skip ? op.skip[head] : 0.0f);
    for (int i = 0; i < vectors; ++i) {
        const int64_t left = lanes - i * kLanes;
        const S::Vec value = get(v + i * kLanes, left);
        delta[i] = S::mul(rate, op.beta ? S::sub(value, S::mul(decay, kept[i])) : value);
        S::Vec y = S::fma(qk, delta[i], S::mul(decay, result[i]));
        if (op.skip) y = S::fma(skip, value, y);
        put(out + i * kLanes, y, left);
    }
    for (int64_t d = 0; d < n; ++d) {
        const S::Vec by_k = S::all(k[d]), by = by_channel ? S::all(p.decay[t * n + d]) : decay;
        for (int i = 0; i < vectors; ++i) {
            float* s = state + d * stride + i * kLanes;
            S::store(s, S::fma(by_k, delta[i], S::mul(by, S::load(s))));
        }
    }
}

template <int vectors>
OPTKIT_TARGET inline void head_columns(const HeadScan& op, const Prepared& p, const Rows& rows, int64_t done,
                                       int64_t count, int64_t head, int64_t column, float* state, int64_t stride) {
    const int64_t lanes = op.width - column;
    for (int64_t t = 0; t < count; ++t) {
        const int64_t token = rows.first + done + t;
        const float* v = op.v + token * op.v_stride + head * op.width + column;
        float* out = op.out + (token * op.heads + head) * op.width + column;
        if (op.by_channel)
            head_step<vectors, true>(op, p, t, head, token, state, stride, v, out, lanes);
        else
            head_step<vectors, false>(op, p, t, head, token, state, stride, v, out, lanes);
    }
}

// Copies columns between the pool's rows and dense rows of whole vectors, padded with zeros.
OPTKIT_TARGET inline void copy_in(const HeadScan& op, const float* from, bool zeros, int64_t column, int64_t columns, float* to) {
    for (int64_t d = 0; d < op.dim; ++d)
        for (int64_t i = 0; i < columns; i += kLanes) {
            const int64_t left = op.width - column - i;
            const S::Vec v = zeros ? S::all(0.0f) : get(from + d * op.width + column + i, left);
            S::store(to + d * columns + i, v);
        }
}
OPTKIT_TARGET inline void copy_out(const HeadScan& op, const float* from, int64_t column, int64_t columns, float* to) {
    for (int64_t d = 0; d < op.dim; ++d)
        for (int64_t i = 0; i < columns; i += kLanes)
            put(to + d * op.width + column + i, S::load(from + d * columns + i), op.width - column - i);
}

// A head of one sequence. Segments of tokens are prepared once and then run on each block of columns, whose part of the
// state is in the nearest cache; one token of whole blocks runs on the pool itself.
OPTKIT_TARGET inline void head_item(const HeadScan& op, const Rows& rows, int64_t head) {
    const int64_t size = op.dim * op.width;
    float* own = op.pool + (rows.slot * op.heads + head) * size;
    const Prepared p = prepared_of_thread(op);
    const bool in_place = rows.count == 1 && op.width % kLanes == 0;
    if (in_place && rows.begins) std::memset(own, 0, size * sizeof(float));
    for (int64_t done = 0; done < rows.count; done += kSegment) {
        const int64_t count = rows.count - done < kSegment ? rows.count - done : kSegment;
        prepare(op, head, rows.first + done, count, p);
        for (int64_t column = 0; column < op.width; column += kColumns) {
            const bool one = op.width - column <= kLanes;
            const int64_t columns = one ? kLanes : kColumns, stride = in_place ? op.width : columns;
            float* state = in_place ? own + column : p.state;
            if (!in_place) copy_in(op, own, done == 0 && rows.begins, column, columns, state);
            if (one)
                head_columns<1>(op, p, rows, done, count, head, column, state, stride);
            else
                head_columns<2>(op, p, rows, done, count, head, column, state, stride);
            if (!in_place) copy_out(op, state, column, columns, own);
        }
    }
}

// -- a vector for each channel -----------------------------------------------------------------------------

// Channels [from, to) of one sequence, 16 at a time.
OPTKIT_TARGET inline void channel_item(const ChannelScan& op, const Rows& rows, int64_t from, int64_t to) {
    const int64_t n = op.states, channels = op.channels;
    float* pool = op.pool + rows.slot * n * channels;
    float* state = state_of_thread(2 * n * kLanes);
    float* rates = state + n * kLanes;
    for (int64_t c = from; c < to; c += kLanes) {
        const int64_t left = to - c;
        for (int64_t i = 0; i < n; ++i) {
            S::store(state + i * kLanes, rows.begins ? S::all(0.0f) : get(pool + i * channels + c, left));
            S::store(rates + i * kLanes, S::mul(get(op.a + i * channels + c, left), S::all(1.44269504089f)));
        }
        const S::Vec skip = op.skip ? get(op.skip + c, left) : S::all(0.0f);
        for (int64_t t = rows.first; t < rows.first + rows.count; ++t) {
            const S::Vec x = get(op.x + t * op.x_stride + c, left), dt = get(op.dt + t * op.dt_stride + c, left);
            const S::Vec given = S::mul(dt, x);
            const float *b = op.b + t * op.b_stride, *read = op.c + t * op.c_stride;
            S::Vec y = S::mul(skip, x);
            for (int64_t i = 0; i < n; ++i) {
                const S::Vec decay = exp2(S::mul(dt, S::load(rates + i * kLanes)));
                const S::Vec h = S::fma(given, S::all(b[i]), S::mul(decay, S::load(state + i * kLanes)));
                S::store(state + i * kLanes, h);
                y = S::fma(S::all(read[i]), h, y);
            }
            put(op.out + t * channels + c, y, left);
        }
        for (int64_t i = 0; i < n; ++i) put(pool + i * channels + c, S::load(state + i * kLanes), left);
    }
}

OPTKIT_TARGET inline ItemFunctions functions() { return {conv_item, head_item, channel_item}; }
