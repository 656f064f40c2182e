// AVX-VNNI; see intrinsics.h.
#pragma once

namespace emulated {

// One 32-bit lane of vpdpbusd: four products of a u8 and an s8, added modulo 2^32.
EMULATED int32_t dot_of_4(int32_t sum, const uint8_t* u8, const int8_t* s8) {
    auto total = static_cast<uint32_t>(sum);
    for (int i = 0; i < 4; ++i) total += static_cast<uint32_t>(u8[i] * s8[i]);
    return static_cast<int32_t>(total);
}

EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i u8, __m256i s8) {
    int32_t sums[8];
    uint8_t a[32];
    int8_t b[32];
    std::memcpy(sums, &sum, sizeof sums), std::memcpy(a, &u8, sizeof a), std::memcpy(b, &s8, sizeof b);
    for (int i = 0; i < 8; ++i) sums[i] = dot_of_4(sums[i], a + 4 * i, b + 4 * i);
    std::memcpy(&sum, sums, sizeof sums);
    return sum;
}

}  // namespace emulated

#define _mm256_dpbusd_avx_epi32 emulated::_mm256_dpbusd_avx_epi32
