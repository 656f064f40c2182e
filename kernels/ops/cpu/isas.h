// The instruction sets of the kernels, one row each, slowest first within a family of CPUs: the only list of them.
//
//     ISA(name, base, measured)
//
// `name` is the value of OPTKIT_CPU_ISA, the enumerator of `Isa` (dispatch.h) and the CPU's test in cpu_features.cpp.
// `base` is the row whose variant runs where a kernel has none for `name`: float kernels, say. It names itself where all
// kernels have a variant. `measured` is 0 where no CPU with the instructions was at hand: results are shown equal by
// emulation, and speed was not measured.
ISA(portable, portable, 1)
ISA(avx2, avx2, 1)
ISA(avx_vnni, avx2, 1)
ISA(avx512_vnni, avx512_vnni, 1)
ISA(amx, avx512_vnni, 1)
ISA(neon_dotprod, neon_dotprod, 0)
ISA(neon_i8mm, neon_dotprod, 0)
