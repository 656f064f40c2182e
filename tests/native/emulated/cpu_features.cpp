// In place of the kernels' cpu_features.cpp: what intrinsics.h emulates is there on every CPU with AVX2.
#include "cpu_features.h"

#include <cstring>
#include <initializer_list>

#include "dispatch.h"

namespace optkit::cpu {
namespace {

bool usable(const char* name) {
    if (!std::strcmp(name, "portable")) return true;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return false;
    for (const char* emulated : {"avx2", "avx_vnni", "avx512_vnni", "amx"})
        if (!std::strcmp(name, emulated)) return true;
    return false;
}

}  // namespace

#define ISA(name, base, measured) \
    bool name() { return usable(#name); }
#include "isas.h"
#undef ISA

}  // namespace optkit::cpu
