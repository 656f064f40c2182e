// Elementary functions of 16 floats. Included once an instruction set; see simd.h for OPTKIT_TARGET and S.
//
// The same polynomials everywhere. Errors against float64, of the largest over the useful range: exp2 and exp 1 ulp near
// 0 (exp grows with |x| by the rounding of x * log2 e), tanh and erf 2 ulp, softplus 2 ulp.

// 2^x for x <= 127, 0 below -125.5 (also for -inf), NaN for NaN. f = x - round(x) is exact; the polynomial is 2^f
// on [-1/2, 1/2] with relative error 2e-9, and exactly 1 at 0, so that rescaling by 2^0 changes no bits.
OPTKIT_TARGET OPTKIT_INLINE S::Vec exp2(S::Vec x) {
    const S::Vec n = S::round(x), f = S::sub(x, n);
    S::Vec p = S::all(1.535336188e-4f);
    p = S::fma(p, f, S::all(1.339887440e-3f));
    p = S::fma(p, f, S::all(9.618437357e-3f));
    p = S::fma(p, f, S::all(5.550332471e-2f));
    p = S::fma(p, f, S::all(2.402264791e-1f));
    p = S::fma(p, f, S::all(6.931472028e-1f));
    p = S::fma(p, f, S::all(1.0f));
    return S::times_two_to_or_0(p, n);
}

// The same for one float.
OPTKIT_TARGET inline float exp2_of(float x) {
    float lanes[kLanes];
    S::store(lanes, exp2(S::all(x)));
    return lanes[0];
}

// e^x for x <= 0 or a little above.
OPTKIT_TARGET OPTKIT_INLINE S::Vec exp(S::Vec x) { return exp2(S::mul(x, S::all(1.44269504089f))); }

// `magnitude` with the sign of x.
OPTKIT_TARGET OPTKIT_INLINE S::Vec with_sign(S::Vec magnitude, S::Vec x) {
    return S::where_less(x, S::all(0.0f), S::sub(S::all(0.0f), magnitude), magnitude);
}

// tanh: the odd polynomial of Cephes' tanhf for small |x|, (1 - e) / (1 + e) with e = exp(-2|x|) elsewhere.
OPTKIT_TARGET OPTKIT_INLINE S::Vec tanh(S::Vec x) {
    const S::Vec size = S::abs(x), z = S::mul(x, x);
    S::Vec p = S::all(-5.70498872745e-3f);
    p = S::fma(p, z, S::all(2.06390887954e-2f));
    p = S::fma(p, z, S::all(-5.37397155531e-2f));
    p = S::fma(p, z, S::all(1.33314422036e-1f));
    p = S::fma(p, z, S::all(-3.33332819422e-1f));
    const S::Vec small = S::fma(S::mul(p, z), x, x);
    const S::Vec e = exp(S::mul(size, S::all(-2.0f)));
    const S::Vec large = S::div(S::sub(S::all(1.0f), e), S::add(S::all(1.0f), e));
    return S::where_less(size, S::all(0.625f), small, with_sign(large, x));
}

// log(1 + e^x) = max(x, 0) + log1p(e) with e = e^-|x| in [0, 1], and log1p(e) = 2 atanh(e / (2 + e)), by the series of
// atanh up to 3^-17.
OPTKIT_TARGET OPTKIT_INLINE S::Vec softplus(S::Vec x) {
    const S::Vec e = exp(S::sub(S::all(0.0f), S::abs(x)));
    const S::Vec s = S::div(e, S::add(S::all(2.0f), e)), z = S::mul(s, s);
    S::Vec p = S::all(2.0f / 15.0f);
    p = S::fma(p, z, S::all(2.0f / 13.0f));
    p = S::fma(p, z, S::all(2.0f / 11.0f));
    p = S::fma(p, z, S::all(2.0f / 9.0f));
    p = S::fma(p, z, S::all(2.0f / 7.0f));
    p = S::fma(p, z, S::all(2.0f / 5.0f));
    p = S::fma(p, z, S::all(2.0f / 3.0f));
    p = S::fma(p, z, S::all(2.0f));
    return S::fma(p, s, S::where_less(x, S::all(0.0f), S::all(0.0f), x));
}

// erf: an odd polynomial below 475/512, else 1 - exp(polynomial of |x|).
OPTKIT_TARGET OPTKIT_INLINE S::Vec erf(S::Vec x) {
    const S::Vec t = S::abs(x), s = S::mul(x, x);
    S::Vec p = S::all(-5.96761703e-4f);
    p = S::fma(p, s, S::all(4.99119423e-3f));
    p = S::fma(p, s, S::all(-2.67681349e-2f));
    p = S::fma(p, s, S::all(1.12819925e-1f));
    p = S::fma(p, s, S::all(-3.76125336e-1f));
    p = S::fma(p, s, S::all(1.28379166e-1f));
    const S::Vec small = S::fma(p, x, x);
    S::Vec r = S::fma(S::all(-1.72853470e-5f), t, S::all(3.83197126e-4f));
    const S::Vec u = S::fma(S::all(-3.88396438e-3f), t, S::all(2.42546219e-2f));
    r = S::fma(r, s, u);
    r = S::fma(r, t, S::all(-1.06777877e-1f));
    r = S::fma(r, t, S::all(-6.34846687e-1f));
    r = S::fma(r, t, S::all(-1.28717512e-1f));
    r = S::fma(r, t, S::sub(S::all(0.0f), t));
    // The exponent grows like -t^2 only where erf is not yet 1; beyond 4 it is 1 in float.
    const S::Vec large = S::sub(S::all(1.0f), exp(r));
    const S::Vec tail = S::where_less(S::all(4.0f), t, S::all(1.0f), large);
    return S::where_less(t, S::all(0.927734375f), small, with_sign(tail, x));
}

// Lane r is the largest lane of rows[r], or the sum of its lanes, for up to 16 rows.
template <bool largest, int R, class Vectors = S>
OPTKIT_TARGET OPTKIT_INLINE S::Vec fold_rows(const S::Vec (&rows)[R]) {
    if constexpr (Vectors::folds_rows) {
        if constexpr (largest)
            return Vectors::largest_each(rows);
        else
            return Vectors::sum_each(rows);
    } else {
        float lanes[kLanes] = {};
        for (int r = 0; r < R; ++r) lanes[r] = largest ? S::largest(rows[r]) : S::sum(rows[r]);
        return S::load(lanes);
    }
}
