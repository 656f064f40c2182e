// The instruction sets of the CPU at hand; see cpu_features.h.
#include "cpu_features.h"

#include "dispatch.h"

#if OPTKIT_X86
#include <cpuid.h>
#endif

namespace optkit::cpu {

bool portable() { return true; }

#if OPTKIT_X86

namespace {

struct Leaf {
    unsigned eax, ebx, ecx, edx;
};

// Zeros where the CPU has no such leaf.
Leaf leaf_7(unsigned subleaf) {
    Leaf leaf{};
    if (!__get_cpuid_count(7, subleaf, &leaf.eax, &leaf.ebx, &leaf.ecx, &leaf.edx)) return {};
    return leaf;
}

}  // namespace

// GCC's functions also ask whether the system saves the registers.
bool avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#ifdef OPTKIT_AVX_VNNI
// AVX2's registers, so nothing more is asked of the system. GCC 12 has no name for the feature.
bool avx_vnni() { return avx2() && leaf_7(1).eax >> 4 & 1; }
#else
bool avx_vnni() { return false; }
#endif

bool avx512_vnni() {
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

#else

bool avx2() { return false; }
bool avx_vnni() { return false; }
bool avx512_vnni() { return false; }

#endif

}  // namespace optkit::cpu
