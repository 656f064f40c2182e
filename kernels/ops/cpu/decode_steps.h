// Decode steps one after another in a single call: the program, a token for each sequence, the inputs of the next step.
//
// A step of a small model takes a few milliseconds, and Python between two steps a tenth of that: its code is no longer
// in the caches, through which all weights have gone. As long as nothing but new tokens changes from step to step, the
// steps need no Python. The caller learns of an arrival by descriptors that can be read.
#pragma once

#include <cstdint>

#include "sampling.h"

namespace optkit {

// The layout is kernels/ops/cpu/decode_steps.py's too.
struct DecodeSteps {
    int64_t count, vocabulary;  // sequences, and logits of each
    int64_t most;               // steps, at least 1
    SampledRow* rows;           // [count], of the logits that the program writes
    const double* uniforms;     // [most, count]
    const int64_t* stops;       // tokens after which nothing follows, of one sequence after another
    const int64_t* stop_ends;   // [count], the end of each sequence's tokens in `stops`
    const uint8_t* const* pairs;  // sets of pairs of tokens (pair_bit), of one sequence after another; the steps end
                                  // where a sequence's last two tokens are in one
    const int64_t* pair_ends;     // [count], the end of each sequence's sets in `pairs`
    // Inputs of the program, which change from step to step.
    int64_t* input_ids;               // [count]
    int64_t* positions;               // [count]
    int32_t* seq_lens;                // [count]
    int64_t* const* slots;            // [num_groups][count]
    const int32_t* const* tables;     // [num_groups][count, width]: blocks for all tokens of all steps
    int64_t num_groups, width, block_size;
    int64_t* tokens;  // [most, count], the result
    // What each step but the last sends: a frame with four bytes for each sequence's token, the highest first.
    uint8_t* frame;
    int64_t frame_bytes;
    const int64_t* places;   // [count]
    const int32_t* watched;  // descriptors; the steps end when one can be read
    int32_t num_watched;
    int32_t sink;            // descriptor, or -1: nothing is sent
};
static_assert(sizeof(DecodeSteps) == 23 * 8, "the fields of Steps in decode_steps.py");

// The bit of a pair of tokens in a set of 2^PAIR_BITS bits. The same in kernels/ops/cpu/decode_steps.py.
constexpr int PAIR_BITS = 18;
inline uint64_t pair_bit(int64_t first, int64_t second) {
    return (static_cast<uint64_t>(first) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(second) * 0xC2B2AE3D27D4EB4Fu) >>
           (64 - PAIR_BITS);
}

}  // namespace optkit
