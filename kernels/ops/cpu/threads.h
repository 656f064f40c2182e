// The threads of the kernels: loops over ranges, shared by the calling thread and a pool.
//
// Each thread takes the next range when the last one is done. So a thread that the system does not run, on a machine
// with other work, takes no range, and nobody waits for a thread without a range.
#pragma once

#include <cstdint>

namespace optkit {

using Range = void (*)(const void* body, int64_t first, int64_t last);

// parallel_for without types; count > chunk, threads > 1.
void run_ranges(Range range, const void* body, int64_t count, int64_t chunk, int threads);

// Calls body(first, last) on the calling thread and up to `threads` - 1 others, for ranges that cover [0, count): of
// `chunk` items, the last may be shorter. In no order. All of the calling thread in a parallel_for, or while another
// thread has the pool.
template <class Body>
void parallel_for(int64_t count, int64_t chunk, int threads, const Body& body) {
    if (count <= 0) return;
    if (threads <= 1 || count <= chunk) return body(int64_t{0}, count);
    run_ranges([](const void* b, int64_t first, int64_t last) { (*static_cast<const Body*>(b))(first, last); }, &body,
               count, chunk, threads);
}

// The chunk for items of equal cost: few ranges a thread, and enough that a late thread finds some left.
inline int64_t even_chunk(int64_t count, int threads) {
    constexpr int64_t RANGES_A_THREAD = 4;
    return count / (RANGES_A_THREAD * (threads > 0 ? threads : 1)) + 1;
}

}  // namespace optkit
