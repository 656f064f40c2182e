// The loop over decode steps; see decode_steps.h.
#include "decode_steps.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "dispatch.h"

namespace optkit {
namespace {

constexpr int MOST_WATCHED = 8;

void sample_step(const DecodeSteps& d, int64_t step, int64_t* tokens, int threads) {
    for (int64_t i = 0; i < d.count; ++i) d.rows[i].uniform = d.uniforms[step * d.count + i];
    sample(d.rows, d.count, d.vocabulary, tokens, threads);
}

bool is_stop(const DecodeSteps& d, int64_t sequence, int64_t token) {
    const int64_t* first = d.stops + (sequence ? d.stop_ends[sequence - 1] : 0);
    const int64_t* last = d.stops + d.stop_ends[sequence];
    return std::find(first, last, token) != last;
}

bool any_stops(const DecodeSteps& d, const int64_t* tokens) {
    for (int64_t i = 0; i < d.count; ++i)
        if (is_stop(d, i, tokens[i])) return true;
    return false;
}

// True where the last two tokens of a sequence are in one of its sets.
bool any_pairs(const DecodeSteps& d, const int64_t* tokens) {
    for (int64_t i = 0; i < d.count; ++i) {
        const uint64_t bit = pair_bit(d.input_ids[i], tokens[i]);
        for (int64_t set = i ? d.pair_ends[i - 1] : 0; set < d.pair_ends[i]; ++set)
            if (d.pairs[set][bit / 8] >> bit % 8 & 1) return true;
    }
    return false;
}

// True when a watched descriptor has something to read, or is closed.
bool is_called(const DecodeSteps& d) {
    pollfd descriptors[MOST_WATCHED];
    const int count = std::min<int>(d.num_watched, MOST_WATCHED);
    for (int i = 0; i < count; ++i) descriptors[i] = {d.watched[i], POLLIN, 0};
    return count && poll(descriptors, static_cast<nfds_t>(count), 0) != 0;
}

// Sends the tokens of a step; false where the other end is gone.
bool send_tokens(const DecodeSteps& d, const int64_t* tokens) {
    if (d.sink < 0) return true;
    for (int64_t i = 0; i < d.count; ++i)
        for (int byte = 0; byte < 4; ++byte)
            d.frame[d.places[i] + byte] = static_cast<uint8_t>(tokens[i] >> (24 - 8 * byte));
    for (int64_t sent = 0; sent < d.frame_bytes;) {
        const ssize_t count = send(d.sink, d.frame + sent, static_cast<size_t>(d.frame_bytes - sent), 0);
        if (count < 0 && errno != EINTR) return false;
        sent += std::max<ssize_t>(count, 0);
    }
    return true;
}

// The inputs of the step after `tokens`.
void advance(const DecodeSteps& d, const int64_t* tokens) {
    for (int64_t i = 0; i < d.count; ++i) {
        const int64_t at = d.seq_lens[i];  // the place of the token
        const int64_t block = at / d.block_size, within = at % d.block_size;
        for (int64_t group = 0; group < d.num_groups; ++group)
            d.slots[group][i] = d.tables[group][i * d.width + block] * d.block_size + within;
        d.input_ids[i] = tokens[i];
        d.positions[i] += 1;
        d.seq_lens[i] += 1;
    }
}

}  // namespace
}  // namespace optkit

// Runs up to `decode->most` steps of the program of `count` calls (optkit_run_program) and gives the number of steps with
// tokens. The steps end after the last, after a step with a token of `stops` or a pair of `pairs`, and when a watched
// descriptor calls. All but the last of the steps are sent. A step that fails, in the program or for one of the
// sequences, is not counted; the caller runs it again and learns the reason.
OPTKIT_API int64_t optkit_decode_steps(const void* calls, int64_t count, const void* arguments, const int64_t* sizes,
                                       const int64_t* inputs, const int64_t* arenas, void* block_memory,
                                       int64_t block_tokens, int64_t token_bytes, int threads, const void* decode) {
    using namespace optkit;
    const auto& d = *static_cast<const DecodeSteps*>(decode);
    for (int64_t step = 0;; ++step) {
        int64_t* tokens = d.tokens + step * d.count;
        if (optkit_run_program(calls, count, arguments, sizes, inputs, arenas, block_memory, block_tokens, token_bytes,
                               threads))
            return step;
        sample_step(d, step, tokens, threads);
        if (*std::min_element(tokens, tokens + d.count) < 0) return step;
        const bool is_last = step + 1 == d.most || any_stops(d, tokens) || any_pairs(d, tokens) || is_called(d);
        if (is_last || !send_tokens(d, tokens)) return step + 1;
        advance(d, tokens);
    }
}
