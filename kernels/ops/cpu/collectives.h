// Collective operations of ranks that are processes of one machine, through a region of shared memory.
//
// The region is zeroed, of region_bytes(ranks) bytes, and mapped by every rank:
//
//   [ranks] Flag       the number of the rank's last announced phase, on a cache line of its own
//   [ranks][2] buffer  what a rank gives in an even and in an odd round, BUFFER bytes each
//
// A round of a reduction has one phase or two. Small messages are reduced by every rank for itself (symmetric): copy in,
// announce, wait for all, add all buffers in the order of the ranks. Large ones are reduced in slices (distributed): after
// the first phase each rank adds one slice of all buffers and writes it over that slice of its own, which nobody else
// reads; after a second phase all ranks copy the slices of the others. Messages above BUFFER take several rounds.
//
// Two buffers suffice: who starts round k + 2 has seen all ranks announce round k + 1, and they do so after reading what
// they need of round k.
#pragma once

#include <atomic>
#include <cstdint>

namespace optkit {

struct Flag {
    alignas(64) std::atomic<uint32_t> phase;
    std::atomic<uint32_t> sleepers;
};

// A rank's view of the region. Not shared: each rank has one, and one thread at a time uses it.
struct Communicator {
    uint8_t* region;
    int32_t rank, size;
    int64_t spin;       // nanoseconds of spinning before a wait sleeps
    int64_t timeout;    // nanoseconds after which a wait fails
    uint32_t phase;     // the last one announced by this rank
    uint32_t round;
    std::atomic<uint32_t> failed;  // 1 after a wait that failed or optkit_fail: the ranks are out of step for good
};

constexpr int64_t BUFFER = 1 << 19;      // bytes
constexpr int64_t SYMMETRIC = 1 << 15;   // bytes up to which every rank adds all

}  // namespace optkit
