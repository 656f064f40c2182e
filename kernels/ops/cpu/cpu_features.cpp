// The instruction sets of the CPU at hand; see cpu_features.h.
#include "cpu_features.h"

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

}  // namespace optkit::cpu
