// The instruction sets of the CPU at hand; see cpu_features.h.
#include "cpu_features.h"

#include "dispatch.h"

#if OPTKIT_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif OPTKIT_ARM && defined(__linux__)
#include <sys/auxv.h>
#elif OPTKIT_ARM && defined(__APPLE__)
#include <sys/sysctl.h>
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

// The registers that the system saves, XCR0.
uint64_t saved_registers() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}

// Linux gives tiles to processes that ask for them, once, and to the threads and children of those.
bool tiles_permitted() {
#ifdef SYS_arch_prctl
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return permitted;
#else
    return false;
#endif
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

#ifdef OPTKIT_AMX
// AMX-TILE, AMX-INT8 and AMX-BF16, and both parts of the tiles' registers saved. With AVX-512 XGETBV can be asked. All CPUs
// with AMX also have VBMI and AVX512-BF16, which a hypervisor may hide.
bool amx() {
    constexpr unsigned TILE_BF16_INT8 = 1u << 24 | 1u << 22 | 1u << 25;
    return avx512_vnni() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
           (leaf_7(0).edx & TILE_BF16_INT8) == TILE_BF16_INT8 && (saved_registers() >> 17 & 3) == 3 && tiles_permitted();
}
#else
bool amx() { return false; }
#endif

#else

bool avx2() { return false; }
bool avx_vnni() { return false; }
bool avx512_vnni() { return false; }
bool amx() { return false; }

#endif

#if OPTKIT_ARM && defined(__linux__)

// Bits of the auxiliary vector (Linux, Documentation/arch/arm64/elf_hwcaps.rst): HWCAP_ASIMDDP, HWCAP2_I8MM.
bool neon_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool neon_i8mm() { return neon_dotprod() && getauxval(AT_HWCAP2) >> 13 & 1; }

#elif OPTKIT_ARM && defined(__APPLE__)

namespace {

// A name of Apple's "Determining instruction set characteristics".
bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace

bool neon_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool neon_i8mm() { return neon_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }

#else

bool neon_dotprod() { return false; }
bool neon_i8mm() { return false; }

#endif

}  // namespace optkit::cpu
