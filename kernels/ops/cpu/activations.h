// The activations of gated layers. Included once an instruction set, after vector_math.h; see simd.h for OPTKIT_TARGET and S.

// x / (1 + e^-x), from e^-|x|, which can't overflow.
OPTKIT_TARGET OPTKIT_INLINE S::Vec silu(S::Vec x) {
    const S::Vec e = exp(S::sub(S::all(0.0f), S::abs(x)));
    const S::Vec numerator = S::where_less(x, S::all(0.0f), S::mul(x, e), x);
    return S::div(numerator, S::add(S::all(1.0f), e));
}

OPTKIT_TARGET OPTKIT_INLINE S::Vec gelu(S::Vec x) {
    const S::Vec phi = S::add(S::all(1.0f), erf(S::mul(x, S::all(0.70710678118654752f))));
    return S::mul(S::mul(x, S::all(0.5f)), phi);
}

OPTKIT_TARGET OPTKIT_INLINE S::Vec gelu_tanh(S::Vec x) {
    const S::Vec cube = S::mul(S::mul(x, x), x);
    const S::Vec inner = S::mul(S::fma(cube, S::all(0.044715f), x), S::all(0.79788456080286536f));
    return S::mul(S::mul(x, S::all(0.5f)), S::add(S::all(1.0f), tanh(inner)));
}

template <Activation kind>
OPTKIT_TARGET OPTKIT_INLINE S::Vec activated(S::Vec x) {
    return kind == Activation::silu ? silu(x) : kind == Activation::gelu ? gelu(x) : gelu_tanh(x);
}
