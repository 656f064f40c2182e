// The clock and the writer of recorder.h.
#include "recorder.h"

#include <atomic>
#include <chrono>

#include "dispatch.h"

#if OPTKIT_X86
#include <cpuid.h>
#endif

namespace optkit {
namespace {

#if OPTKIT_X86
// True where the time stamp counter neither stops nor changes its rate: CPUID 80000007h, EDX bit 8.
bool is_invariant() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0x80000007u, &a, &b, &c, &d) && (d >> 8 & 1);
}
const bool has_counter = is_invariant();
#endif

std::atomic<int32_t> threads_seen{0};
thread_local int32_t thread_number = -1;

int32_t this_thread() {
    if (thread_number < 0) thread_number = threads_seen.fetch_add(1, std::memory_order_relaxed);
    return thread_number;
}

}  // namespace

int64_t ticks() {
#if OPTKIT_X86
    if (has_counter) return static_cast<int64_t>(__rdtsc());
#endif
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void Recorder::add(int64_t start, int64_t op, int64_t first, int64_t count) const {
    const int64_t end = ticks();
    const int64_t place = __atomic_fetch_add(used_, 1, __ATOMIC_RELAXED);
    if (place < 0 || place >= capacity_) return;
    records_[place] = {start,         end,
                       static_cast<int32_t>(first_op_ + op), this_thread(),
                       static_cast<int32_t>(first),          static_cast<int32_t>(count)};
}

}  // namespace optkit

// The time in ticks of records.
OPTKIT_API int64_t optkit_ticks() { return optkit::ticks(); }
