// Sampling of tokens from logits on a CPU: greedy, temperature, top-k, top-p and min-p. See reference.sample.
#pragma once

#include <cstdint>

namespace optkit {

// A row of logits and its parameters. A temperature below GREEDY_BELOW takes the first largest logit. With `allowed`,
// bit i % 32 of word i / 32 says whether token i may be chosen. The layout is kernels/ops/cpu/sampling.py's too.
struct SampledRow {
    float temperature;
    int32_t top_k;   // 0 or less: off
    float top_p;     // 1: off
    float min_p;     // 0: off
    double uniform;  // in [0, 1)
    const float* logits;
    const uint32_t* allowed;  // or null: every token
};
static_assert(sizeof(SampledRow) == 40);

constexpr float GREEDY_BELOW = 1e-5f;
constexpr int64_t BAD_LOGITS = -1;      // a NaN, or no finite largest logit, of the allowed tokens
constexpr int64_t BAD_PARAMETERS = -2;  // parameters that leave no distribution, such as a temperature of NaN

// The token of each of `count` rows of `width` logits, or one of the above.
void sample(const SampledRow* rows, int64_t count, int64_t width, int64_t* tokens, int threads);

}  // namespace optkit
