// The intrinsics of AVX-512 that the kernels use; see intrinsics.h.
#pragma once

namespace emulated {

union Lanes {
    __m512 ps;
    __m512i si;
    float f[16];
    int32_t i[16];
    uint32_t u[16];
    uint16_t u16[32];
    uint8_t u8[64];
    int8_t s8[64];
};

EMULATED Lanes of(__m512 a) {
    Lanes x;
    x.ps = a;
    return x;
}

EMULATED Lanes of(__m512i a) {
    Lanes x;
    x.si = a;
    return x;
}

EMULATED void need(bool is_emulated, const char* what) {
    if (is_emulated) return;
    std::fprintf(stderr, "only %s is emulated\n", what);
    std::abort();
}

// -- loads and stores ------------------------------------------------------------------------------------

EMULATED __m512 _mm512_loadu_ps(const void* p) {
    __m512 a;
    std::memcpy(&a, p, sizeof a);
    return a;
}

EMULATED __m512i _mm512_loadu_si512(const void* p) {
    __m512i a;
    std::memcpy(&a, p, sizeof a);
    return a;
}

EMULATED void _mm512_storeu_ps(void* p, __m512 a) {
    std::memcpy(p, &a, sizeof a);
}

EMULATED void _mm512_storeu_si512(void* p, __m512i a) {
    std::memcpy(p, &a, sizeof a);
}

EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* p) {
    Lanes z{};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) z.f[i] = p[i];
    return z.ps;
}

EMULATED void _mm512_mask_storeu_ps(float* p, __mmask16 mask, __m512 a) {
    const Lanes x = of(a);
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) p[i] = x.f[i];
}

// -- constants and casts ---------------------------------------------------------------------------------

EMULATED __m512 _mm512_set1_ps(float x) {
    Lanes z;
    for (float& lane : z.f) lane = x;
    return z.ps;
}

EMULATED __m512 _mm512_setzero_ps() {
    return Lanes{}.ps;
}

EMULATED __m512i _mm512_set1_epi32(int32_t x) {
    Lanes z;
    for (int32_t& lane : z.i) lane = x;
    return z.si;
}

EMULATED __m512i _mm512_set1_epi8(char x) {
    Lanes z;
    for (int8_t& lane : z.s8) lane = x;
    return z.si;
}

EMULATED __m512 _mm512_castps128_ps512(__m128 a) {
    Lanes z{};
    std::memcpy(z.f, &a, sizeof a);
    return z.ps;
}

EMULATED __m256 _mm512_castps512_ps256(__m512 a) {
    __m256 z;
    std::memcpy(&z, &a, sizeof z);
    return z;
}

EMULATED __m512i _mm512_castsi256_si512(__m256i a) {
    Lanes z{};
    std::memcpy(z.i, &a, sizeof a);
    return z.si;
}

// -- float arithmetic ------------------------------------------------------------------------------------

#define OF_TWO(name, value)                        \
    EMULATED __m512 name(__m512 a, __m512 b) {     \
        const Lanes x = of(a), y = of(b);          \
        Lanes z;                                   \
        for (int i = 0; i < 16; ++i) z.f[i] = value; \
        return z.ps;                               \
    }
OF_TWO(_mm512_add_ps, x.f[i] + y.f[i])
OF_TWO(_mm512_sub_ps, x.f[i] - y.f[i])
OF_TWO(_mm512_mul_ps, x.f[i] * y.f[i])
OF_TWO(_mm512_div_ps, x.f[i] / y.f[i])
OF_TWO(_mm512_max_ps, x.f[i] > y.f[i] ? x.f[i] : y.f[i])
#undef OF_TWO

EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const Lanes x = of(a), y = of(b), w = of(c);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.f[i] = std::fma(x.f[i], y.f[i], w.f[i]);
    return z.ps;
}

EMULATED __m512 _mm512_abs_ps(__m512 a) {
    Lanes z = of(a);
    for (int32_t& lane : z.i) lane &= 0x7fffffff;
    return z.ps;
}

EMULATED __m512 _mm512_roundscale_ps(__m512 a, int imm) {
    need(imm == 8, "roundscale to the nearest integer");
    Lanes z = of(a);
    for (float& lane : z.f) lane = std::nearbyint(lane);
    return z.ps;
}

EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
    need(predicate == _CMP_LT_OQ || predicate == _CMP_NLT_UQ, "the predicates less than, and not less than");
    const Lanes x = of(a), y = of(b);
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x.f[i] < y.f[i]) << i;
    return static_cast<__mmask16>(predicate == _CMP_LT_OQ ? mask : ~mask);
}

// a * 2^floor(b).
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.f[i] = mask >> i & 1 ? x.f[i] * std::exp2(std::floor(y.f[i])) : 0.0f;
    return z.ps;
}

EMULATED __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.f[i] = mask >> i & 1 ? y.f[i] : x.f[i];
    return z.ps;
}

// -- integer arithmetic ----------------------------------------------------------------------------------

EMULATED __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
    Lanes z = of(a);
    const Lanes y = of(b);
    for (int i = 0; i < 64; ++i) z.u8[i] = static_cast<uint8_t>(z.u8[i] - y.u8[i]);
    return z.si;
}

EMULATED __m512i _mm512_max_epi32(__m512i a, __m512i b) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.i[i] = x.i[i] > y.i[i] ? x.i[i] : y.i[i];
    return z.si;
}

EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) {
    Lanes z = of(a);
    const Lanes y = of(b);
    for (int i = 0; i < 16; ++i) z.u[i] &= y.u[i];
    return z.si;
}

EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
    Lanes z = of(a);
    for (uint16_t& lane : z.u16) lane = static_cast<uint16_t>(count < 16 ? lane >> count : 0);
    return z.si;
}

EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    Lanes z = of(sum);
    const Lanes x = of(a), y = of(b);
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 4; ++k) z.u[i] += static_cast<uint32_t>(x.u8[4 * i + k] * y.s8[4 * i + k]);
    return z.si;
}

// -- conversions -----------------------------------------------------------------------------------------

EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
    const Lanes x = of(a);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.f[i] = static_cast<float>(x.i[i]);
    return z.ps;
}

EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
    const Lanes x = of(a);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.i[i] = _mm_cvtss_si32(_mm_set_ss(x.f[i]));
    return z.si;
}

EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {
    const Lanes x = of(a);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.u8[i] = static_cast<uint8_t>(x.u[i]);
    __m128i low;
    std::memcpy(&low, &z, sizeof low);
    return low;
}

EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
    uint8_t bytes[16];
    std::memcpy(bytes, &a, sizeof bytes);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.i[i] = bytes[i];
    return z.si;
}

EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
    uint16_t halves[16];
    std::memcpy(halves, &a, sizeof halves);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.f[i] = _cvtsh_ss(halves[i]);
    return z.ps;
}

EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.u[i] = x.u[i] ^ y.u[i];
    return z.si;
}

EMULATED __m512 _mm512_castsi512_ps(__m512i a) {
    return of(a).ps;
}

EMULATED __m512d _mm512_castps_pd(__m512 a) {
    __m512d z;
    std::memcpy(&z, &a, sizeof z);
    return z;
}

EMULATED __m512 _mm512_castpd_ps(__m512d a) {
    __m512 z;
    std::memcpy(&z, &a, sizeof z);
    return z;
}

// VCVTNE2PS2BF16: to the nearest, ties to even; denormals become zeros, and NaN quiet.
EMULATED uint16_t to_bf16(uint32_t bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    if ((bits & 0x7f800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

EMULATED __m512i _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
    const Lanes x = of(a), y = of(b);
    Lanes z;
    for (int i = 0; i < 16; ++i) z.u16[i] = to_bf16(y.u[i]), z.u16[i + 16] = to_bf16(x.u[i]);
    return z.si;
}

}  // namespace emulated

#define _mm512_loadu_ps emulated::_mm512_loadu_ps
#define _mm512_loadu_si512 emulated::_mm512_loadu_si512
#define _mm512_storeu_ps emulated::_mm512_storeu_ps
#define _mm512_storeu_si512 emulated::_mm512_storeu_si512
#define _mm512_maskz_loadu_ps emulated::_mm512_maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated::_mm512_mask_storeu_ps
#define _mm512_set1_ps emulated::_mm512_set1_ps
#define _mm512_setzero_ps emulated::_mm512_setzero_ps
#define _mm512_set1_epi32 emulated::_mm512_set1_epi32
#define _mm512_set1_epi8 emulated::_mm512_set1_epi8
#define _mm512_castps128_ps512 emulated::_mm512_castps128_ps512
#define _mm512_castps512_ps256 emulated::_mm512_castps512_ps256
#define _mm512_castsi256_si512 emulated::_mm512_castsi256_si512
#define _mm512_add_ps emulated::_mm512_add_ps
#define _mm512_sub_ps emulated::_mm512_sub_ps
#define _mm512_mul_ps emulated::_mm512_mul_ps
#define _mm512_div_ps emulated::_mm512_div_ps
#define _mm512_max_ps emulated::_mm512_max_ps
#define _mm512_fmadd_ps emulated::_mm512_fmadd_ps
#define _mm512_abs_ps emulated::_mm512_abs_ps
#define _mm512_roundscale_ps emulated::_mm512_roundscale_ps
#define _mm512_maskz_scalef_ps emulated::_mm512_maskz_scalef_ps
#define _mm512_cmp_ps_mask emulated::_mm512_cmp_ps_mask
#define _mm512_mask_blend_ps emulated::_mm512_mask_blend_ps
#define _mm512_sub_epi8 emulated::_mm512_sub_epi8
#define _mm512_max_epi32 emulated::_mm512_max_epi32
#define _mm512_and_si512 emulated::_mm512_and_si512
#define _mm512_srli_epi16 emulated::_mm512_srli_epi16
#define _mm512_dpbusd_epi32 emulated::_mm512_dpbusd_epi32
#define _mm512_cvtepi32_ps emulated::_mm512_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::_mm512_cvtps_epi32
#define _mm512_cvtepi32_epi8 emulated::_mm512_cvtepi32_epi8
#define _mm512_cvtepu8_epi32 emulated::_mm512_cvtepu8_epi32
#define _mm512_cvtph_ps emulated::_mm512_cvtph_ps
#define _mm512_xor_si512 emulated::_mm512_xor_si512
#define _mm512_castsi512_ps emulated::_mm512_castsi512_ps
#define _mm512_castps_pd emulated::_mm512_castps_pd
#define _mm512_castpd_ps emulated::_mm512_castpd_ps
#define _mm512_cvtne2ps_pbh emulated::_mm512_cvtne2ps_pbh
