// Ops with a recurrent state, for callers in C++; recurrent.cpp has them. See reference_recurrent.py.
#pragma once

#include <cstdint>

namespace optkit {

// The rows of each sequence: [query_start[s], query_start[s + 1]) of the batch, the first of the sequence where they are
// all of its seq_lens[s] tokens. A sequence of length 0 is padding. Its state is in slot state_slots[s] of the pool.
struct Sequences {
    const int32_t *query_start, *seq_lens, *state_slots;
    int64_t count;
};

// x [T, channels], weight [taps, channels], bias [channels] or null, pool [slots, taps - 1, channels].
struct ShortConv {
    const float *x, *weight, *bias;
    float *pool, *out;
    Sequences sequences;
    int64_t x_stride, channels, taps;
    bool silu;
};

// S = decay S + k delta, with a state S [dim, width] for each head; out = q S + skip v.
// The gated delta rule: decay = exp(g), delta = beta (v - k decay S). Mamba-2: decay = exp(g a), delta = g v.
struct HeadScan {
    const float *q, *k, *v, *g;
    const float* beta;        // null for Mamba-2
    const float *a, *skip;    // [heads], for Mamba-2; skip may be null
    float *pool, *out;        // [slots, heads, dim, width], [T, heads, width]
    Sequences sequences;
    int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;  // from token to token
    int64_t heads, key_heads, dim, width;
    float scale;
    bool normalize, by_channel;  // by_channel: g is [T, heads, dim]
};

// h = exp(dt a) h + dt x b, with a state h [states] for each channel; out = c h + skip x. x and dt [T, channels],
// a [states, channels], b and c [T, states], skip [channels] or null, pool [slots, states, channels].
struct ChannelScan {
    const float *x, *dt, *a, *b, *c, *skip;
    float *pool, *out;
    Sequences sequences;
    int64_t x_stride, dt_stride, b_stride, c_stride, channels, states;
};

void short_conv(const ShortConv& op, int threads);
void head_scan(const HeadScan& op, int threads);
void channel_scan(const ChannelScan& op, int threads);

}  // namespace optkit
