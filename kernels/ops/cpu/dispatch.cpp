// The choice of the instruction set for the kernels; see dispatch.h.
#include "dispatch.h"

#include <atomic>

namespace optkit {
namespace {

bool supported(Isa isa) {
#if OPTKIT_X86
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512_vnni)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return isa == Isa::portable;
}

Isa best() {
    if (supported(Isa::avx512_vnni)) return Isa::avx512_vnni;
    return supported(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

std::atomic<Isa> current{best()};

}  // namespace

Isa isa() { return current.load(std::memory_order_relaxed); }

}  // namespace optkit

// The instruction set in use, as a number of `Isa`.
OPTKIT_API int optkit_isa() { return static_cast<int>(optkit::isa()); }

// Use `wanted` from now on, or the best for -1. Gives 0, or 1 where this CPU does not have it.
OPTKIT_API int optkit_set_isa(int wanted) {
    const auto isa = wanted < 0 ? optkit::best() : static_cast<optkit::Isa>(wanted);
    if (!optkit::supported(isa)) return 1;
    optkit::current.store(isa, std::memory_order_relaxed);
    return 0;
}
