// Sampling: a token for each row of logits, one thread a row.
//
// A row takes three passes: the largest logit, the weights, the draw. A row with a mask of tokens first becomes a copy in
// which the others are -infinity, so their weights are 0. Filters become a single threshold on the weights,
// found by radix selection: the bits of positive floats are ordered as the floats, and three levels of ten bits decide
// the threshold from the top. Nearly always the tokens of at least LIKELY of the largest weight are enough, and the
// selection reads only those.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "panels.h"
#include "scratch.h"
#include "simd_int8.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t SEARCHED = 1024;  // tokens, of which the largest logit is looked for one by one
constexpr int64_t SUMMED = 256;     // tokens of a partial sum, and of a part in `likeliest`
constexpr float LIKELY = 1.0f / 4096;
constexpr float LEAST = 1e-45f;  // the smallest weight that can be drawn
constexpr int RADIX = 1024;                  // buckets of a level of the selection
constexpr uint32_t LEVELS[] = {20, 10, 0};  // bits below each digit; the weight 1.0 is 1016 << 20

struct RowSampler {
    void (*keep_allowed)(const float* x, const uint32_t* allowed, int64_t n, float* kept);
    bool (*find_top)(const float* x, int64_t n, float* top, int64_t* searched);
    void (*find_tops)(const float* x, int64_t n, float* tops);
    void (*weigh)(const float* x, int64_t n, float top, float temperature, float* weights);
    double (*sum_from)(const float* weights, int64_t n, float cut);
    int64_t (*collect)(const float* weights, int64_t n, float cut, float* found);
    int64_t (*passing)(const float* weights, int64_t n, float cut, double goal);
};

#define OPTKIT_BODY "sampling_rows.h"
#include "each_isa.h"

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The largest weight v of values[0, n) such that the weights of at least v, counted or summed, reach `goal`; the smallest
// weight where all do not. Changes the order of `values`.
template <bool counted>
float threshold(float* values, int64_t n, double goal) {
    double totals[RADIX];
    uint32_t cut = 0;
    for (const uint32_t shift : LEVELS) {
        std::fill(totals, totals + RADIX, 0.0);
        for (int64_t i = 0; i < n; ++i)
            totals[bits_of(values[i]) >> shift & (RADIX - 1)] += counted ? 1.0 : values[i];
        int digit = RADIX - 1, lowest = RADIX - 1;
        for (; digit >= 0; --digit) {
            if (totals[digit] == 0.0) continue;
            lowest = digit;
            if (totals[digit] >= goal) break;
            goal -= totals[digit];
        }
        // Below all: rounding, or fewer weights than asked for. Then the smallest weight is meant, level by level.
        if (digit < 0) goal = INFINITY;
        cut |= static_cast<uint32_t>(lowest) << shift;
        const float* end = std::partition(values, values + n, [&](float x) { return bits_of(x) >> shift == cut >> shift; });
        n = end - values;
    }
    return float_of(cut);
}

// The threshold of reference.keep_likely; weights below are not drawn.
float lowest_kept(const RowSampler& run, const SampledRow& row, const float* weights, int64_t n, float* working) {
    float cut = row.min_p > 0.0f ? row.min_p : 0.0f;
    if (row.top_k > 0 && row.top_k < n) {
        int64_t count = run.collect(weights, n, LIKELY, working);
        if (count < row.top_k) count = run.collect(weights, n, LEAST, working);
        if (count > row.top_k) cut = std::max(cut, threshold<true>(working, count, row.top_k));
    }
    if (row.top_p < 1.0f) {
        const double goal = static_cast<double>(row.top_p) * run.sum_from(weights, n, cut);
        float least = std::max(cut, LIKELY);
        if (run.sum_from(weights, n, least) < goal) least = cut;
        const int64_t count = run.collect(weights, n, least, working);
        cut = std::max(cut, threshold<false>(working, count, goal));
    }
    return cut;
}

int64_t choose(const RowSampler& run, const SampledRow& row, int64_t n) {
    thread_local GrowingMemory masked, memory;
    const float* logits = row.logits;
    if (row.allowed != nullptr) {
        float* kept = masked.at_least<float>(n);
        run.keep_allowed(row.logits, row.allowed, n, kept);
        logits = kept;
    }
    float top = 0.0f;
    int64_t token = 0;
    if (!run.find_top(logits, n, &top, &token)) return BAD_LOGITS;
    if (row.temperature < GREEDY_BELOW) return std::find(logits + token, logits + n, top) - logits;
    float* weights = memory.at_least<float>(2 * n);
    run.weigh(logits, n, top, row.temperature, weights);
    const float cut = lowest_kept(run, row, weights, n, weights + n);
    const double mass = run.sum_from(weights, n, cut);
    if (!(mass > 0.0 && mass < INFINITY)) return BAD_PARAMETERS;
    return run.passing(weights, n, cut, row.uniform * mass);
}

// Writes the `most` largest of x[0, n) to `tokens`, the largest first, ties by number, and -1 where fewer are above
// -infinity. At least `most` parts of the row have a top of at least the `most`-th largest top, so no smaller number is
// among the largest.
void likeliest(const RowSampler& run, const float* x, int64_t n, int64_t most, int64_t* tokens) {
    thread_local GrowingMemory memory;
    const int64_t parts = divide_up(n, SUMMED);
    float* tops = memory.at_least<float>(2 * parts);
    run.find_tops(x, n, tops);
    float least = -INFINITY;
    if (parts > most) {
        float* sorted = tops + parts;
        std::copy(tops, tops + parts, sorted);
        std::nth_element(sorted, sorted + most - 1, sorted + parts, std::greater<float>());
        least = sorted[most - 1];
    }
    std::fill(tokens, tokens + most, -1);
    int64_t found = 0;
    for (int64_t part = 0; part < parts; ++part) {
        if (!(tops[part] >= least)) continue;
        for (int64_t i = part * SUMMED; i < std::min((part + 1) * SUMMED, n); ++i) {
            const bool is_full = found == most;
            if (!(x[i] >= least && x[i] > -INFINITY) || (is_full && !(x[i] > x[tokens[most - 1]]))) continue;
            int64_t place = is_full ? most - 1 : found++;
            for (; place > 0 && x[tokens[place - 1]] < x[i]; --place) tokens[place] = tokens[place - 1];
            tokens[place] = i;
        }
    }
}

}  // namespace

void sample(const SampledRow* rows, int64_t count, int64_t width, int64_t* tokens, int threads) {
    const RowSampler run = functions_in_use();
    parallel_for(count, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) tokens[i] = choose(run, rows[i], width);
    });
}

}  // namespace optkit

// `rows` are `count` of optkit::SampledRow.
OPTKIT_API void optkit_sample(const void* rows, int64_t count, int64_t width, int64_t* tokens, int threads) {
    optkit::sample(static_cast<const optkit::SampledRow*>(rows), count, width, tokens, threads);
}

// The `most` likeliest tokens of each of the rows `rows` [count] of `logits` [, width], the likeliest first: `tokens`
// [count, most]. -1 fills the rest of a row with fewer logits above -infinity.
OPTKIT_API void optkit_likeliest(const float* logits, const int64_t* rows, int64_t count, int64_t width, int64_t most,
                                 int64_t* tokens, int threads) {
    using namespace optkit;
    const RowSampler run = functions_in_use();
    parallel_for(count, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) likeliest(run, logits + rows[i] * width, width, most, tokens + i * most);
    });
}
