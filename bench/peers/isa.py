"""The instruction sets of a run, and the environment variables that hold every engine to AVX2 or AVX-512 without AMX.

An engine that cannot be held by a variable needs a build of its own (llama.cpp). The result of a run has two proofs
for each server: the engine's own word (``settings["isa"]``), and the kernel's record of AVX-512 registers in use
(``process_group.used_avx512``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NATIVE, AVX2, AVX512 = "native", "avx2", "avx512"
ISAS = (NATIVE, AVX2, AVX512)
VARIABLES: Mapping[str, Mapping[str, str]] = {
    NATIVE: {},
    AVX2: {
        "OPTKIT_CPU_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",  # PyTorch
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # PyTorch and OpenVINO
        "OV_CPU_MAX_ISA": "AVX2",  # OpenVINO's own kernels; fails unless ONEDNN_MAX_CPU_ISA has the same value
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # NumPy's names; unknown names are ignored
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",  # memcpy and others
    },
    AVX512: {
        "OPTKIT_CPU_ISA": "avx512_vnni",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # VNNI and bfloat16 products, as on Zen 4 and later
        "OV_CPU_MAX_ISA": "AVX512_CORE_BF16",
    },
}


def with_variables(command: Sequence[str], isa: str) -> list[str]:
    """``command`` with the variables of ``isa`` in the environment; the process stays the same."""
    assignments = [f"{name}={value}" for name, value in VARIABLES[isa].items()]
    return ["env", *assignments, *command] if assignments else list(command)
