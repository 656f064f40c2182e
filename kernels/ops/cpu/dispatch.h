// The instruction set used by the kernels of this process; isas.h has the list.
//
// A kernel has one entry point with a C ABI. It switches on `isa()` and calls the variant of that name, or on
// `base_isa()` where few have a variant: functions compiled for more than the baseline carry OPTKIT_AVX2,
// OPTKIT_AVX_VNNI, OPTKIT_AVX512, OPTKIT_AMX, OPTKIT_NEON or OPTKIT_I8MM. All but the portable variants of a kernel give
// the same bits, and where sums are of integers all do. The float kernels (simd.h) use fused multiply-add, which the
// baseline lacks: their portable variant differs from the others by rounding. Layers of bfloat16 precision have bits of their
// own on AMX (w8a16_amx.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#define OPTKIT_X86 1
#include <immintrin.h>
#ifndef OPTKIT_AVX2  // a build for tests defines its own, with emulated instructions
#define OPTKIT_AVX2 __attribute__((target("avx2,fma,f16c")))
#define OPTKIT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11  // older compilers leave these variants out
#define OPTKIT_AVX_VNNI __attribute__((target("avxvnni,avx2,fma,f16c")))
#define OPTKIT_AMX \
    __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi," \
                          "avx512bf16,avx2,fma,f16c")))
#endif
#endif
#else
#define OPTKIT_X86 0
#endif

#if defined(__aarch64__)
#define OPTKIT_ARM 1
#include <arm_neon.h>
#define OPTKIT_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#define OPTKIT_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#else
#define OPTKIT_ARM 0
#endif

// C ABI: what ctypes finds. Everything else in the library is hidden.
#define OPTKIT_API extern "C" __attribute__((visibility("default")))

// Inlined into the caller, whose instruction set it is then compiled for.
#define OPTKIT_INLINE inline __attribute__((always_inline))

namespace optkit {

enum class Isa : int {
#define ISA(name, base, measured) name,
#include "isas.h"
#undef ISA
};

// Before an access that AddressSanitizer does not see, a masked load or store of `bytes` at p: it sees this one.
OPTKIT_INLINE void touch(const void* p, std::ptrdiff_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    const auto* at = static_cast<const volatile char*>(p);
    if (bytes > 0) static_cast<void>(at[0]), static_cast<void>(at[bytes - 1]);
#else
    static_cast<void>(p), static_cast<void>(bytes);
#endif
}

// The best this CPU has, unless optkit_set_isa chose another.
Isa isa();

// The row whose variant runs where a kernel has none for isa(): its base in isas.h.
Isa base_isa();

}  // namespace optkit

// The functions of signatures.h.
#define FUNCTION(result, name, ...) OPTKIT_API result optkit_##name(__VA_ARGS__);
#define KERNEL(result, name, ...) OPTKIT_API result optkit_##name(__VA_ARGS__, int threads);
#include "signatures.h"
#undef FUNCTION
#undef KERNEL
