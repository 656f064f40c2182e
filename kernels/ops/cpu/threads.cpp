// The pool of threads.h.
//
// A loop is open from the first range to the last. An open loop is announced by an odd `epoch`; a worker joins by
// counting itself in `inside` and reading `epoch` again. The calling thread closes the loop when no range is left, by
// the next even epoch, and waits until `inside` is zero. Both orders are sequentially consistent: a worker that saw an
// open loop is seen by the calling thread, and a worker that came too late touches nothing.
//
// A waiting thread spins for SPIN, since the next loop of a step follows within microseconds. Then it sleeps, and the
// core is free for other processes, or for the thread that is waited for.
#include "threads.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "dispatch.h"

namespace optkit {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds SPIN{100};
constexpr int LOOKS = 32;  // between two looks at the clock
constexpr int MOST_WORKERS = 1023;

inline void relax() {
#if OPTKIT_X86
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// The core that the calling thread is on; -1 where the system doesn't tell.
int core_of_thread() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// The system's number of the calling thread, 0 where nothing needs it.
thread_local int number_of_thread = 0;

int thread_number() {
#if defined(__linux__)
    if (number_of_thread == 0) number_of_thread = static_cast<int>(syscall(SYS_gettid));
#endif
    return number_of_thread;
}

// Keeps the calling thread off core `core` of thread `caller`: on the other cores of that thread, if there are `wanted`.
void leave_core(int core, int caller, int wanted) {
#if defined(__linux__)
    cpu_set_t others;
    if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(caller, sizeof others, &others) != 0) return;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) >= wanted) sched_setaffinity(0, sizeof others, &others);
#endif
}

// True in a worker, and in a thread with a loop under way.
thread_local bool inside_a_loop = false;

// Waits for `ready`: spinning at first, then asleep until `wake`, and spinning again. A thread takes up to milliseconds to
// wake up, and the loop that it was woken for may be over; the next one follows within microseconds.
class Waiting {
public:
    template <class Ready>
    void until(const Ready& ready) {
        while (!spin(ready)) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1);
            if (!ready()) changed_.wait(lock);
            sleepers_.fetch_sub(1);
        }
    }

    // After a change that `ready` reads.
    void wake() {
        if (sleepers_.load() == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }
        changed_.notify_all();
    }

private:
    // True as soon as `ready`, false after SPIN.
    template <class Ready>
    static bool spin(const Ready& ready) {
        const auto end = Clock::now() + SPIN;
        do {
            for (int i = 0; i < LOOKS; ++i) {
                if (ready()) return true;
                relax();
            }
        } while (Clock::now() < end);
        return false;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int> sleepers_{0};
};

class Pool {
public:
    // False where another thread has the pool. An exception of a body ends the process, in the calling thread as in a
    // worker: another frame must not leave the body while workers are in it.
    bool run(Range range, const void* body, int64_t count, int64_t chunk, int threads) noexcept {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner.owns_lock()) return false;
        grow(std::min(threads - 1, MOST_WORKERS));
        range_ = range, body_ = body, count_ = count, chunk_ = chunk;
        threads_.store(threads, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        caller_.store(thread_number(), std::memory_order_relaxed);
        caller_core_.store(core_of_thread(), std::memory_order_relaxed);
        epoch_.fetch_add(1);
        opened_.wake();
        take_ranges();
        epoch_.fetch_add(1);
        left_.until([this] { return inside_.load() == 0; });
        return true;
    }

private:
    // Starts workers up to `workers`; fewer where the system gives no more threads.
    void grow(int workers) {
        try {
            for (; workers_ < workers; ++workers_)
                std::thread([this, number = workers_ + 1] { work(number); }).detach();
        } catch (const std::system_error&) {
        }
    }

    // A worker: takes part in each loop for at least `number` + 1 threads.
    void work(int number) {
        inside_a_loop = true;
        for (uint64_t last = 0;;) {
            opened_.until([&] { return epoch_.load() != last && epoch_.load() % 2; });
            last = epoch_.load();
            if (last % 2 == 0) continue;
            // Linux may wake a worker on the caller's core, and leave both there for tens of milliseconds while another core
            // is idle: they would take turns. A worker that came back before it sleeps would be woken there again.
            const int core = caller_core_.load(std::memory_order_relaxed);
            const int threads = threads_.load(std::memory_order_relaxed);
            if (core == core_of_thread() && number < threads)
                leave_core(core, caller_.load(std::memory_order_relaxed), threads - 1);
            inside_.fetch_add(1);
            if (epoch_.load() == last && number < threads_.load(std::memory_order_relaxed)) take_ranges();
            if (inside_.fetch_sub(1) == 1) left_.wake();
        }
    }

    void take_ranges() {
        // Relaxed: one range is not ordered after another, which would also hide races from ThreadSanitizer.
        for (int64_t first; (first = next_.fetch_add(chunk_, std::memory_order_relaxed)) < count_;)
            range_(body_, first, std::min(first + chunk_, count_));
    }

    std::mutex owner_;
    int workers_ = 0;
    Waiting opened_, left_;
    // Written by the calling thread while the loop is closed and nobody is inside.
    Range range_ = nullptr;
    const void* body_ = nullptr;
    int64_t count_ = 0, chunk_ = 1;
    // Of the loop, read by workers before they join, too: a worker that reads the next loop's joins that one, or none.
    std::atomic<int> threads_{1}, caller_{0}, caller_core_{-1};
    alignas(64) std::atomic<uint64_t> epoch_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> inside_{0};
};

// Never freed: the workers use it until the process ends.
std::atomic<Pool*> pool{nullptr};

// The child of a fork has no workers: it starts a pool of its own.
void forget_pool() {
    pool.store(nullptr);
    number_of_thread = 0;
}

Pool& the_pool() {
    if (Pool* made = pool.load()) return *made;
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
    auto* fresh = new Pool;
    Pool* expected = nullptr;
    if (pool.compare_exchange_strong(expected, fresh)) return *fresh;
    delete fresh;
    return *expected;
}

}  // namespace

void run_ranges(Range range, const void* body, int64_t count, int64_t chunk, int threads) {
    bool shared = false;
    if (!inside_a_loop) {
        inside_a_loop = true;
        shared = the_pool().run(range, body, count, chunk, threads);
        inside_a_loop = false;
    }
    if (!shared) range(body, 0, count);
}

}  // namespace optkit
