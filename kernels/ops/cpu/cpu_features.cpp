// The instruction sets of the CPU at hand; see cpu_features.h.
#include "cpu_features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace optkit::cpu {

bool portable() { return true; }

#if defined(__x86_64__)

// GCC's functions also ask whether the system saves the registers.
bool avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool avx512_vnni() {
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

#else

bool avx2() { return false; }
bool avx512_vnni() { return false; }

#endif

#if defined(__aarch64__) && defined(__linux__)

// Bits of the auxiliary vector (Linux, Documentation/arch/arm64/elf_hwcaps.rst), which older headers lack.
bool neon_dotprod() { return getauxval(AT_HWCAP) & 1ul << 20; }                    // HWCAP_ASIMDDP
bool neon_i8mm() { return neon_dotprod() && getauxval(AT_HWCAP2) & 1ul << 13; }    // HWCAP2_I8MM

#elif defined(__aarch64__) && defined(__APPLE__)

static bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

bool neon_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool neon_i8mm() { return neon_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }

#else

bool neon_dotprod() { return false; }
bool neon_i8mm() { return false; }

#endif

}  // namespace optkit::cpu
