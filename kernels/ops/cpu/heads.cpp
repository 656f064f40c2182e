// Linear layers of heads, in float32: reference.head_linear on packed matrices.
//
// A head's matrix is packed as [k][n], so that a number of an activation multiplies a row of the matrix. An output is one chain of
// multiply-adds over k, in order: a row has the same bits in any batch, and by any number of threads.
#include "dispatch.h"
#include "simd_int8.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t kTokens = 48;            // of a task: whole register tiles of every instruction set
constexpr int64_t kWorkAThread = 400'000;  // multiply-adds for which another thread pays: 10 us or so

struct Heads {
    const float* x;         // [tokens][heads][k], tokens `x_token` floats apart
    int64_t x_token;
    const float* weight;    // [heads][k][n]
    float* out;             // [tokens][heads][n]
    int64_t heads, k, n;
};

struct HeadFunctions {
    void (*tokens)(const Heads&, int64_t head, int64_t first, int64_t last);
};

#define OPTKIT_BODY "heads_rows.h"
#include "each_isa.h"

}  // namespace
}  // namespace optkit

// See reference.head_linear. x [tokens, heads, k] with tokens `x_token` floats apart; weight [heads, k, n]; out [tokens,
// heads, n].
OPTKIT_API void optkit_head_linear(const float* x, int64_t x_token, const float* weight, float* out, int64_t tokens,
                                   int64_t heads, int64_t k, int64_t n, int threads) {
    using namespace optkit;
    const Heads p{x, x_token, weight, out, heads, k, n};
    const auto run = functions_in_use().tokens;
    const int64_t useful = 1 + tokens * heads * k * n / kWorkAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    const int64_t parts = (tokens + kTokens - 1) / kTokens, count = parts * heads;
    parallel_for(count, even_chunk(count, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; ++task) {
            const int64_t from = task % parts * kTokens, to = from + kTokens;
            run(p, task / parts, from, to < tokens ? to : tokens);
        }
    });
}
