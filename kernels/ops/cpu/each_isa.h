// Compiles a kernel body once for each instruction set:
//
//     #define OPTKIT_BODY "attention_tile.h"
//     #include "each_isa.h"
//
// The body finds OPTKIT_TARGET, S (simd.h), I (simd_int8.h) and the functions of vector_math.h, and ends with a function
// `functions()` that gives its entry points; `functions_in_use()` gives those for the instruction set in use. Included
// inside namespace optkit, once a source file; no include guard, since it is text and declares nothing by itself.
//
// A body that uses I has OPTKIT_INTEGERS defined, and a variant too for each instruction set whose I is not its base's. One
// with OPTKIT_TILED has a variant for AMX, which finds OPTKIT_TILES defined.

#if OPTKIT_X86
namespace avx512 {
#define OPTKIT_TARGET OPTKIT_AVX512
using S = Avx512;
using I = Int8Avx512;
#include "vector_math.h"
#include OPTKIT_BODY
#undef OPTKIT_TARGET
}  // namespace avx512
#if defined(OPTKIT_TILED) && defined(OPTKIT_AMX)
namespace amx {
#define OPTKIT_TARGET OPTKIT_AMX
#define OPTKIT_TILES
using S = Avx512;
using I = Int8Avx512;
#include "vector_math.h"
#include OPTKIT_BODY
#undef OPTKIT_TILES
#undef OPTKIT_TARGET
}  // namespace amx
#endif
namespace avx2 {
#define OPTKIT_TARGET OPTKIT_AVX2
using S = Avx2;
using I = Int8Avx2;
#include "vector_math.h"
#include OPTKIT_BODY
#undef OPTKIT_TARGET
}  // namespace avx2
#if defined(OPTKIT_INTEGERS) && defined(OPTKIT_AVX_VNNI)
namespace avx_vnni {
#define OPTKIT_TARGET OPTKIT_AVX_VNNI
using S = Avx2;
using I = Int8AvxVnni;
#include "vector_math.h"
#include OPTKIT_BODY
#undef OPTKIT_TARGET
}  // namespace avx_vnni
#endif
#endif
#if OPTKIT_ARM
namespace neon {
#define OPTKIT_TARGET OPTKIT_NEON
using S = Neon;
using I = Int8Neon;
#include "vector_math.h"
#include OPTKIT_BODY
#undef OPTKIT_TARGET
}  // namespace neon
#endif
namespace portable {
#define OPTKIT_TARGET
using S = Portable;
using I = Int8Portable;
#include "vector_math.h"
#include OPTKIT_BODY
#undef OPTKIT_TARGET
}  // namespace portable

inline auto functions_in_use() {
#if defined(OPTKIT_TILED) && defined(OPTKIT_AMX)
    if (isa() == Isa::amx) return amx::functions();
#endif
#if defined(OPTKIT_INTEGERS) && defined(OPTKIT_AVX_VNNI)
    if (isa() == Isa::avx_vnni) return avx_vnni::functions();
#endif
    switch (base_isa()) {
#if OPTKIT_X86
        case Isa::avx512_vnni: return avx512::functions();
        case Isa::avx2: return avx2::functions();
#endif
#if OPTKIT_ARM
        case Isa::neon_dotprod: return neon::functions();
#endif
        default: return portable::functions();
    }
}
#undef OPTKIT_BODY
#undef OPTKIT_INTEGERS
#undef OPTKIT_TILED
