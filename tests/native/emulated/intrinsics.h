// AVX-512, AVX-VNNI and AMX in plain C++, for tests on a CPU with AVX2: included before every kernel source
// (g++ -include; tests/support/emulated.py). The kernels' own intrinsics are replaced by functions of the same name, and
// the attributes of dispatch.h ask for no more than AVX2. A kernel with an intrinsic that is missing here does not compile.
//
// Each function is the pseudo-code of Intel's "Intrinsics Guide" for its name, lane by lane.
#pragma once

#ifndef __OPTIMIZE__
#error "without optimization GCC's own intrinsics are macros: compile with -O1"
#endif

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define OPTKIT_AVX2 __attribute__((target("avx2,fma,f16c")))
#define OPTKIT_AVX_VNNI OPTKIT_AVX2
#define OPTKIT_AVX512 OPTKIT_AVX2
#define OPTKIT_AMX OPTKIT_AVX2

// Calls rather than inlined code, which g++ would take minutes for.
#define EMULATED static __attribute__((noinline, unused, target("avx2,fma,f16c")))

#include "amx.h"
#include "avx512.h"
#include "avx512_permute.h"
#include "avx_vnni.h"

#undef EMULATED
