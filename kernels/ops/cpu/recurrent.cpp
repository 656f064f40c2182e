// Ops with a recurrent state: short convolutions, the gated delta rule, and the scans of Mamba and Mamba-2.
//
// All are sequential over the tokens of a sequence and independent over sequences, heads and channels, which threads
// share. A chunked form, whose products are matrix products, would add in another order for each cut of a prompt; the
// scan has the same bits in any batch, in any chunks and by any number of threads (recurrent_rows.h has the orders), and
// on a CPU it is a small part of a layer: with 32 heads of 128 by 128 and 2048 channels about a sixteenth of the
// multiply-adds of the projections.
#include "recurrent.h"

#include <cmath>
#include <cstring>

#include "scratch.h"
#include "simd_int8.h"
#include "threads.h"

namespace optkit {
namespace {

constexpr int64_t kSegment = 32;    // tokens prepared at once: their rows of q and k stay in the second-level cache
constexpr int64_t kColumns = 32;    // of a state at once: 128 rows of them are half of a first-level cache
constexpr int64_t kChannels = 128;  // of an item
constexpr int64_t kWorkAThread = 65'536;  // multiply-adds for which waking another thread pays: 10 us or so

// The rows of one sequence, none for padding.
struct Rows {
    int64_t first, count, slot;
    bool begins;
};

Rows rows_of(const Sequences& s, int64_t sequence) {
    const int64_t first = s.query_start[sequence], count = s.query_start[sequence + 1] - first;
    return {first, count, s.state_slots[sequence], s.seq_lens[sequence] == count};
}

// q and k [kSegment, dim] scaled, and times the decays of their channels; decays [kSegment] or [kSegment, dim]; products
// q k; the columns of a state at work.
struct Prepared {
    float *q, *k, *decayed_q, *decayed_k, *decay, *qk, *state;
};

Prepared prepared_of_thread(const HeadScan& op) {
    thread_local GrowingMemory memory;
    const int64_t rows = kSegment * op.dim, decayed = op.by_channel ? rows : 0, decays = kSegment + decayed;
    float* at = memory.at_least<float>(2 * rows + 2 * decayed + decays + kSegment + op.dim * kColumns);
    float* qk = at + 2 * rows + 2 * decayed + decays;
    return {at, at + rows, at + 2 * rows, at + 2 * rows + decayed, at + 2 * rows + 2 * decayed, qk, qk + kSegment};
}

float* state_of_thread(int64_t size) {
    thread_local GrowingMemory memory;
    return memory.at_least<float>(size);
}

struct ItemFunctions {
    void (*conv)(const ShortConv&, const Rows&, int64_t, int64_t);
    void (*head)(const HeadScan&, const Rows&, int64_t);
    void (*channel)(const ChannelScan&, const Rows&, int64_t, int64_t);
};

#define OPTKIT_BODY "recurrent_rows.h"
#include "each_isa.h"

// Calls item(rows, part) for each part of each sequence; padding gives zeros in `out`, rows of `width`.
template <class Item>
void each_item(const Sequences& sequences, int64_t parts, int64_t work, float* out, int64_t width, int threads,
               const Item& item) {
    const int64_t useful = 1 + work / kWorkAThread;
    if (useful < threads) threads = static_cast<int>(useful);
    for (int64_t s = 0; s < sequences.count; ++s) {
        const Rows rows = rows_of(sequences, s);
        if (sequences.seq_lens[s] == 0) std::memset(out + rows.first * width, 0, rows.count * width * sizeof(float));
    }
    parallel_for(sequences.count * parts, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
            if (sequences.seq_lens[i / parts] > 0) item(rows_of(sequences, i / parts), i % parts);
    });
}

int64_t tokens_of(const Sequences& s) { return s.count > 0 ? s.query_start[s.count] : 0; }

template <class Op, class Function>
void each_block(const Op& op, int64_t work_a_channel, Function function, int threads) {
    const int64_t blocks = (op.channels + kChannels - 1) / kChannels;
    const int64_t work = tokens_of(op.sequences) * op.channels * work_a_channel;
    each_item(op.sequences, blocks, work, op.out, op.channels, threads, [&](const Rows& rows, int64_t block) {
        const int64_t from = block * kChannels, to = from + kChannels;
        function(op, rows, from, to < op.channels ? to : op.channels);
    });
}

}  // namespace

void short_conv(const ShortConv& op, int threads) { each_block(op, op.taps, functions_in_use().conv, threads); }

void channel_scan(const ChannelScan& op, int threads) {
    constexpr int64_t EXP = 8;  // an exp costs about so many multiply-adds
    each_block(op, (EXP + 3) * op.states, functions_in_use().channel, threads);
}

void head_scan(const HeadScan& op, int threads) {
    const auto function = functions_in_use().head;
    const int64_t work = 4 * tokens_of(op.sequences) * op.heads * op.dim * op.width;
    each_item(op.sequences, op.heads, work, op.out, op.heads * op.width, threads,
              [&](const Rows& rows, int64_t head) { function(op, rows, head); });
}

}  // namespace optkit

// See reference.short_conv. x [T, channels] with a stride; weight [taps, channels]; silu 1 or 0.
OPTKIT_API void optkit_short_conv(const float* x, int64_t x_stride, const float* weight, const float* bias, float* pool,
                                  const int32_t* query_start, const int32_t* seq_lens, const int32_t* state_slots,
                                  float* out, int64_t sequences, int64_t channels, int64_t taps, int silu, int threads) {
    optkit::short_conv({x, weight, bias, pool, out, {query_start, seq_lens, state_slots, sequences}, x_stride, channels,
                        taps, silu != 0},
                       threads);
}

// See reference.gated_delta_rule. q and k [T, key_heads, dim], v [T, heads, width], beta [T, heads], g [T, heads] or, with
// by_channel, [T, heads, dim]; strides are from token to token.
OPTKIT_API void optkit_gated_delta_rule(const float* q, int64_t q_stride, const float* k, int64_t k_stride,
                                        const float* v, int64_t v_stride, const float* g, int64_t g_stride,
                                        const float* beta, int64_t beta_stride, float* pool, const int32_t* query_start,
                                        const int32_t* seq_lens, const int32_t* state_slots, float* out,
                                        int64_t sequences, int64_t heads, int64_t key_heads, int64_t dim, int64_t width,
                                        float scale, int normalize, int by_channel, int threads) {
    optkit::head_scan({q, k, v, g, beta, nullptr, nullptr, pool, out, {query_start, seq_lens, state_slots, sequences},
                       q_stride, k_stride, v_stride, g_stride, beta_stride, heads, key_heads, dim, width, scale,
                       normalize != 0, by_channel != 0},
                      threads);
}

// See reference.ssd_scan. x [T, heads, width], dt [T, heads], a and d [heads] (d may be null), b and c [T, key_heads, dim].
OPTKIT_API void optkit_ssd_scan(const float* x, int64_t x_stride, const float* dt, int64_t dt_stride, const float* a,
                                const float* b, int64_t b_stride, const float* c, int64_t c_stride, const float* d,
                                float* pool, const int32_t* query_start, const int32_t* seq_lens,
                                const int32_t* state_slots, float* out, int64_t sequences, int64_t heads,
                                int64_t key_heads, int64_t dim, int64_t width, int threads) {
    optkit::head_scan({c, b, x, dt, nullptr, a, d, pool, out, {query_start, seq_lens, state_slots, sequences}, c_stride,
                       b_stride, x_stride, dt_stride, 0, heads, key_heads, dim, width, 1.0f, false, false},
                      threads);
}

// See reference.selective_scan. x and dt [T, channels], a [states, channels], b and c [T, states], d [channels] or null.
OPTKIT_API void optkit_selective_scan(const float* x, int64_t x_stride, const float* dt, int64_t dt_stride,
                                      const float* a, const float* b, int64_t b_stride, const float* c, int64_t c_stride,
                                      const float* d, float* pool, const int32_t* query_start, const int32_t* seq_lens,
                                      const int32_t* state_slots, float* out, int64_t sequences, int64_t channels,
                                      int64_t states, int threads) {
    optkit::channel_scan({x, dt, a, b, c, d, pool, out, {query_start, seq_lens, state_slots, sequences}, x_stride,
                          dt_stride, b_stride, c_stride, channels, states},
                         threads);
}
