// Sampling of one row. Included once an instruction set; see simd.h for OPTKIT_TARGET and S.
//
// Weights are exp((logit - largest) / temperature), so the largest is 1 and no sum of probabilities is needed. Sums over
// a row have one order for a given width: vectors within SUMMED tokens, then float64.

// kept[i] = x[i] where bit i of `allowed` is set, else -infinity.
OPTKIT_TARGET inline void keep_allowed(const float* x, const uint32_t* allowed, int64_t n, float* kept) {
    int64_t first = 0;
    for (; first + 32 <= n; first += 32) {
        const uint32_t bits = allowed[first / 32];
        for (int j = 0; j < 32; ++j) kept[first + j] = bits >> j & 1 ? x[first + j] : -INFINITY;
    }
    for (; first < n; ++first) kept[first] = allowed[first / 32] >> first % 32 & 1 ? x[first] : -INFINITY;
}

// The largest of x[0, n), and where the SEARCHED tokens with the first of it begin. False where a logit is NaN, or the
// largest is no finite number.
OPTKIT_TARGET inline bool find_top(const float* x, int64_t n, float* top, int64_t* searched) {
    const S::Vec zero = S::all(0.0f), one = S::all(1.0f), infinity = S::all(INFINITY);
    S::Vec bad = zero;  // 1 in a lane with NaN or infinity
    *top = -INFINITY;
    for (int64_t first = 0; first < n; first += SEARCHED) {
        const int64_t last = std::min(first + SEARCHED, n);
        S::Vec most = S::all(-INFINITY);
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) {
            const S::Vec v = S::load(x + i);
            most = S::max(most, v);
            bad = S::where_less(v, infinity, bad, one);
        }
        float most_here = S::largest(most);
        for (; i < last; ++i) {
            if (!(x[i] < INFINITY)) return false;
            most_here = std::max(most_here, x[i]);
        }
        if (most_here > *top) *top = most_here, *searched = first;
    }
    return S::largest(bad) == 0.0f && *top > -INFINITY;
}

// tops[i] = the largest of x[i SUMMED, (i + 1) SUMMED), or less where NaN is among them.
OPTKIT_TARGET inline void find_tops(const float* x, int64_t n, float* tops) {
    for (int64_t first = 0; first < n; first += SUMMED) {
        const int64_t last = std::min(first + SUMMED, n);
        S::Vec most = S::all(-INFINITY);
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) most = S::max(most, S::load(x + i));
        float top = S::largest(most);
        for (; i < last; ++i) top = std::max(top, x[i]);
        *tops++ = top > -INFINITY ? top : -INFINITY;  // also for NaN, which sorting must not meet
    }
}

// weights[i] = exp((x[i] - top) / temperature).
OPTKIT_TARGET inline void weigh(const float* x, int64_t n, float top, float temperature, float* weights) {
    const S::Vec by = S::all(1.44269504089f / temperature), highest = S::all(top);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        S::store(weights + i, exp2(S::mul(S::sub(S::load(x + i), highest), by)));
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        S::store_some(weights + i, exp2(S::mul(S::sub(S::load_some(x + i, rest), highest), by)), rest);
    }
}

// The sum of weights[0, n) of at least `cut`; n <= SUMMED.
OPTKIT_TARGET inline double partial_sum(const float* weights, int64_t n, float cut) {
    const S::Vec lowest = S::all(cut), zero = S::all(0.0f);
    S::Vec total = zero;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const S::Vec v = S::load(weights + i);
        total = S::add(total, S::where_less(v, lowest, zero, v));
    }
    double sum = S::sum(total);
    for (; i < n; ++i) sum += weights[i] < cut ? 0.0f : weights[i];
    return sum;
}

OPTKIT_TARGET inline double sum_from(const float* weights, int64_t n, float cut) {
    double total = 0.0;
    for (int64_t i = 0; i < n; i += SUMMED) total += partial_sum(weights + i, std::min(SUMMED, n - i), cut);
    return total;
}

// Copies the weights of at least `cut` to `found` and gives their number.
OPTKIT_TARGET inline int64_t collect(const float* weights, int64_t n, float cut, float* found) {
    int64_t count = 0;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        if (S::largest(S::load(weights + i)) < cut) continue;
        for (int64_t j = i; j < i + kLanes; ++j)
            if (weights[j] >= cut) found[count++] = weights[j];
    }
    for (; i < n; ++i)
        if (weights[i] >= cut) found[count++] = weights[i];
    return count;
}

// The token at which the sum of the weights of at least `cut` passes `goal`; the last of them where rounding keeps the
// sum below.
OPTKIT_TARGET inline int64_t passing(const float* weights, int64_t n, float cut, double goal) {
    double before = 0.0, start = 0.0;
    int64_t part = 0;  // with the token, and `start` the sum before it
    for (int64_t first = 0; first < n; first += SUMMED) {
        const double sum = partial_sum(weights + first, std::min(SUMMED, n - first), cut);
        if (sum > 0.0) part = first, start = before;
        before += sum;
        if (before > goal) break;
    }
    int64_t token = part;
    for (int64_t i = part; i < std::min(part + SUMMED, n); ++i) {
        if (weights[i] < cut || weights[i] == 0.0f) continue;
        token = i;
        start += weights[i];
        if (start > goal) break;
    }
    return token;
}

OPTKIT_TARGET inline RowSampler functions() {
    return {keep_allowed, find_top, find_tops, weigh, sum_from, collect, passing};
}
