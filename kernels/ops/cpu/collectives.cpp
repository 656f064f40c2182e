// all_reduce and all_gather between processes; collectives.h has the algorithm.
//
// A waiting rank spins for a while and then sleeps on the flag of the rank that is late: ranks may outnumber the cores.
#include "collectives.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#endif

#include "dispatch.h"

namespace optkit {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds NAP{50};  // a sleeper looks at the clock this often
constexpr int LOOKS = 32;                     // between two looks at the clock

inline void relax() {
#if OPTKIT_X86
    _mm_pause();
#elif OPTKIT_ARM
    __asm__ __volatile__("yield");
#endif
}

Flag& flag_of(const Communicator& c, int64_t rank) { return reinterpret_cast<Flag*>(c.region)[rank]; }

uint8_t* buffer_of(const Communicator& c, int64_t rank) {
    return c.region + c.size * int64_t{sizeof(Flag)} + (2 * rank + c.round % 2) * BUFFER;
}

// Phases count modulo 2^32: `phase` is reached where the difference is not negative.
bool reached(const Flag& flag, uint32_t phase) {
    return static_cast<int32_t>(flag.phase.load(std::memory_order_acquire) - phase) >= 0;
}

void sleep_on(Flag& flag, uint32_t phase) {
    flag.sleepers.fetch_add(1);
    const uint32_t seen = flag.phase.load();
    if (static_cast<int32_t>(seen - phase) < 0) {
#if defined(__linux__)
        timespec nap{0, std::chrono::nanoseconds(NAP).count()};
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&flag.phase), FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
    }
    flag.sleepers.fetch_sub(1);
}

// Announces the next phase of this rank.
void announce(Communicator& c) {
    Flag& own = flag_of(c, c.rank);
    own.phase.store(++c.phase);
#if defined(__linux__)
    if (own.sleepers.load())
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own.phase), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Waits until `rank` has announced this phase; false after the timeout.
bool wait_for(const Communicator& c, int64_t rank) {
    Flag& flag = flag_of(c, rank);
    if (reached(flag, c.phase)) return true;
    const auto start = Clock::now();
    do {
        for (int i = 0; i < LOOKS; ++i) {
            if (reached(flag, c.phase)) return true;
            relax();
        }
    } while (Clock::now() - start < std::chrono::nanoseconds(c.spin));
    while (!reached(flag, c.phase)) {
        if (c.failed.load() || Clock::now() - start > std::chrono::nanoseconds(c.timeout)) return false;
        sleep_on(flag, c.phase);
    }
    return true;
}

// Announces a phase and waits until all ranks have; 1 where one did not.
int meet(Communicator& c) {
    announce(c);
    for (int64_t rank = 0; rank < c.size; ++rank)
        if (!wait_for(c, rank)) {
            c.failed.store(1);
            return 1;
        }
    return 0;
}

enum class Reduction : int { sum, max };

// NaN is the largest number, as in reference.all_reduce.
template <class T>
OPTKIT_INLINE T larger(T a, T b) {
    return a > b || a != a ? a : b;
}

// out[i] = the reduction of all ranks' element i, in the order of the ranks.
template <class T>
OPTKIT_INLINE void combine(const Communicator& c, Reduction how, int64_t first, int64_t count, T* out) {
    const T* a = reinterpret_cast<const T*>(buffer_of(c, 0)) + first;
    const T* b = c.size > 1 ? reinterpret_cast<const T*>(buffer_of(c, 1)) + first : nullptr;
    if (!b) {
        std::memcpy(out, a, count * sizeof(T));
    } else if (how == Reduction::sum) {
        for (int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
    } else {
        for (int64_t i = 0; i < count; ++i) out[i] = larger(a[i], b[i]);
    }
    for (int64_t rank = 2; rank < c.size; ++rank) {
        b = reinterpret_cast<const T*>(buffer_of(c, rank)) + first;
        if (how == Reduction::sum)
            for (int64_t i = 0; i < count; ++i) out[i] = out[i] + b[i];
        else
            for (int64_t i = 0; i < count; ++i) out[i] = larger(out[i], b[i]);
    }
}

template <class T>
using Combine = void (*)(const Communicator&, Reduction, int64_t, int64_t, T*);

template <class T>
void combine_portable(const Communicator& c, Reduction how, int64_t first, int64_t count, T* out) {
    combine(c, how, first, count, out);
}
#if OPTKIT_X86
template <class T>
OPTKIT_AVX2 void combine_avx2(const Communicator& c, Reduction how, int64_t first, int64_t count, T* out) {
    combine(c, how, first, count, out);
}
template <class T>
OPTKIT_AVX512 void combine_avx512(const Communicator& c, Reduction how, int64_t first, int64_t count, T* out) {
    combine(c, how, first, count, out);
}
#endif

template <class T>
Combine<T> variant() {
#if OPTKIT_X86
    if (base_isa() == Isa::avx512_vnni) return combine_avx512<T>;
    if (base_isa() == Isa::avx2) return combine_avx2<T>;
#endif
    return combine_portable<T>;
}

// The slice of `count` elements that `rank` reduces; slices begin on cache lines.
template <class T>
int64_t slice_start(int64_t count, int64_t rank, int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return std::min(count, (count + LINE - 1) / LINE * rank / size * LINE);
}

// One round: at most BUFFER bytes.
template <class T>
int reduce_round(Communicator& c, Reduction how, const T* x, T* out, int64_t count) {
    const auto add = variant<T>();
    ++c.round;
    auto* own = reinterpret_cast<T*>(buffer_of(c, c.rank));
    std::memcpy(own, x, count * sizeof(T));
    if (meet(c)) return 1;
    if (count * static_cast<int64_t>(sizeof(T)) <= SYMMETRIC || c.size == 1) {
        add(c, how, 0, count, out);
        return 0;
    }
    const int64_t start = slice_start<T>(count, c.rank, c.size), stop = slice_start<T>(count, c.rank + 1, c.size);
    add(c, how, start, stop - start, out + start);
    std::memcpy(own + start, out + start, (stop - start) * sizeof(T));
    if (meet(c)) return 1;
    for (int64_t rank = 0; rank < c.size; ++rank) {
        if (rank == c.rank) continue;
        const int64_t from = slice_start<T>(count, rank, c.size), to = slice_start<T>(count, rank + 1, c.size);
        std::memcpy(out + from, reinterpret_cast<const T*>(buffer_of(c, rank)) + from, (to - from) * sizeof(T));
    }
    return 0;
}

template <class T>
int all_reduce(int64_t communicator, Reduction how, const T* x, T* out, int64_t count) {
    auto& c = *reinterpret_cast<Communicator*>(communicator);
    constexpr int64_t MOST = BUFFER / sizeof(T);
    if (c.failed.load()) return 1;
    for (int64_t first = 0; first < count; first += MOST)
        if (reduce_round(c, how, x + first, out + first, std::min(MOST, count - first))) return 1;
    return 0;
}

// Rank r gives the first sizes[r] elements of each of its rows, in pieces that fit a buffer.
template <class T>
int all_gather(int64_t communicator, const T* x, int64_t x_stride, const int64_t* sizes, T* out, int64_t rows,
               int64_t width) {
    auto& c = *reinterpret_cast<Communicator*>(communicator);
    if (c.failed.load()) return 1;
    constexpr int64_t MOST = BUFFER / sizeof(T);
    const int64_t widest = *std::max_element(sizes, sizes + c.size), piece = std::min(widest, MOST);
    const int64_t most = MOST / piece;
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        for (int64_t start = 0; start < widest; start += piece) {
            ++c.round;
            const auto given = [&](int64_t rank) { return std::clamp<int64_t>(sizes[rank] - start, 0, piece); };
            auto* own = reinterpret_cast<T*>(buffer_of(c, c.rank));
            const int64_t mine = given(c.rank);
            for (int64_t i = 0; i < count; ++i)
                std::memcpy(own + i * mine, x + (first + i) * x_stride + start, mine * sizeof(T));
            if (meet(c)) return 1;
            int64_t column = start;
            for (int64_t rank = 0; rank < c.size; column += sizes[rank++]) {
                const T* from = reinterpret_cast<const T*>(buffer_of(c, rank));
                const int64_t size = given(rank);
                for (int64_t i = 0; i < count; ++i)
                    std::memcpy(out + (first + i) * width + column, from + i * size, size * sizeof(T));
            }
        }
    }
    return 0;
}

// Codes and scales of a row lie side by side in a buffer: first all rows of codes, then, on a multiple of 4, all scales.
int gather_quantized(Communicator& c, const uint8_t* q, int64_t q_stride, const float* scale, const int64_t* sizes,
                     const int64_t* groups, uint8_t* q_out, float* scale_out, int64_t rows, int64_t width,
                     int64_t all_groups) {
    constexpr int64_t FLOAT = sizeof(float);
    const int64_t widest = *std::max_element(sizes, sizes + c.size);
    const int64_t most_groups = *std::max_element(groups, groups + c.size);
    const int64_t most = (BUFFER - FLOAT) / (widest + most_groups * FLOAT);
    if (c.failed.load() || most < 1) return 1;
    const auto scales_of = [](uint8_t* codes, int64_t bytes) {
        return reinterpret_cast<float*>(codes + (bytes + FLOAT - 1) / FLOAT * FLOAT);
    };
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first), mine = sizes[c.rank], own_groups = groups[c.rank];
        ++c.round;
        uint8_t* own = buffer_of(c, c.rank);
        for (int64_t i = 0; i < count; ++i) std::memcpy(own + i * mine, q + (first + i) * q_stride, mine);
        std::memcpy(scales_of(own, count * mine), scale + first * own_groups, count * own_groups * FLOAT);
        if (meet(c)) return 1;
        int64_t column = 0, group = 0;
        for (int64_t rank = 0; rank < c.size; column += sizes[rank], group += groups[rank++]) {
            uint8_t* codes = buffer_of(c, rank);
            const float* scales = scales_of(codes, count * sizes[rank]);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t row = first + i;
                std::memcpy(q_out + row * width + column, codes + i * sizes[rank], sizes[rank]);
                std::memcpy(scale_out + row * all_groups + group, scales + i * groups[rank], groups[rank] * FLOAT);
            }
        }
    }
    return 0;
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// Bytes of the shared region of `ranks` ranks; zeroed before the first use.
OPTKIT_API int64_t optkit_region_bytes(int64_t ranks) { return ranks * (int64_t{sizeof(Flag)} + 2 * BUFFER); }

// The communicator of `rank` over `region`, freed by optkit_leave. `spin` and `timeout` are in nanoseconds.
OPTKIT_API int64_t optkit_join(uint8_t* region, int rank, int size, int64_t spin, int64_t timeout) {
    return reinterpret_cast<int64_t>(new Communicator{region, rank, size, spin, timeout, 0, 0, {0}});
}

OPTKIT_API void optkit_leave(int64_t communicator) { delete reinterpret_cast<Communicator*>(communicator); }

// 1 where a rank did not answer in time: later calls fail at once.
OPTKIT_API int optkit_has_failed(int64_t communicator) {
    return static_cast<int>(reinterpret_cast<const Communicator*>(communicator)->failed.load());
}

// Lets waits of this rank fail, now and later: another rank is known to be gone. From any thread.
OPTKIT_API void optkit_fail(int64_t communicator) { reinterpret_cast<Communicator*>(communicator)->failed.store(1); }

// The sums over all ranks of x [rows][width], or with `max` the largest; in the order of the ranks. Gives 1 where a rank
// did not answer.
OPTKIT_API int optkit_all_reduce(int64_t communicator, const float* x, float* out, int64_t rows, int64_t width, int max,
                                 int) {
    return all_reduce(communicator, static_cast<Reduction>(max), x, out, rows * width);
}

OPTKIT_API int optkit_all_reduce_int(int64_t communicator, const int32_t* x, int32_t* out, int64_t rows, int64_t width,
                                     int max, int) {
    return all_reduce(communicator, static_cast<Reduction>(max), x, out, rows * width);
}

// The first sizes[r] columns of each rank's x, side by side: out [rows][width].
OPTKIT_API int optkit_all_gather(int64_t communicator, const float* x, int64_t x_stride, const int64_t* sizes, float* out,
                                 int64_t rows, int64_t width, int) {
    return all_gather(communicator, x, x_stride, sizes, out, rows, width);
}

OPTKIT_API int optkit_all_gather_codes(int64_t communicator, const uint8_t* x, int64_t x_stride, const int64_t* sizes,
                                       uint8_t* out, int64_t rows, int64_t width, int) {
    return all_gather(communicator, x, x_stride, sizes, out, rows, width);
}

// Both of a quantized activation: q_out [rows][width] and scale_out [rows][all_groups]. Gives 1 also for rows that fit no
// buffer.
OPTKIT_API int optkit_all_gather_quantized(int64_t communicator, const uint8_t* q, int64_t q_stride, const float* scale,
                                           const int64_t* sizes, const int64_t* groups, uint8_t* q_out, float* scale_out,
                                           int64_t rows, int64_t width, int64_t all_groups, int) {
    return gather_quantized(*reinterpret_cast<Communicator*>(communicator), q, q_stride, scale, sizes, groups, q_out,
                            scale_out, rows, width, all_groups);
}
