"""OpenVINO GenAI: the continuous batching pipeline behind ``openvino_server``, a small server of optkit's benchmark.

The PyPI package of OpenVINO GenAI has no server (OpenVINO Model Server is a container around the same pipeline). The
pipeline reads the GGUF, the model's own or a file of ``llama-quantize``, and keeps the model as OpenVINO IR, made
once. A trial chooses between OpenVINO's own settings for the machine and others: tokens a step, number type of
the computation and of the KV cache, dynamic quantization of activations. The settings in use are read back from the
compiled model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from bench.peers.isa import NATIVE
from bench.peers.llama_cpp_peer import LlamaCpp, quantize
from bench.peers.peer import Model, Peer, Progress, Venv, run
from optkit.errors import UserError

STEP_TOKENS = "max_num_batched_tokens"  # the default of 256 splits long prompts
CANDIDATES: tuple[dict[str, str], ...] = (
    {STEP_TOKENS: "256"},
    {STEP_TOKENS: "2048"},
    {STEP_TOKENS: "2048", "INFERENCE_PRECISION_HINT": "f32"},
    {STEP_TOKENS: "2048", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    {STEP_TOKENS: "2048", "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"},
)
AS_IT_IS = "Q4_1"  # read from the model's own GGUF; rounding what is rounded already would make another model
SERVER = Path(__file__).with_name("openvino_server.py")
CONVERT = """
import sys, openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


class OpenVino(Peer):
    """The continuous batching pipeline with a quantization of the model."""

    venv = Venv(
        "openvino",
        (
            "openvino-genai==2026.4.1.0",
            "openvino==2026.4.1",
            "starlette==1.10.0",
            "uvicorn==0.54.0",
            "httptools==0.9.0",
        ),
    )

    def __init__(self, quantization: str, isa: str = NATIVE) -> None:
        self.quantization, self.isa = quantization, isa
        self.name = f"openvino-{quantization.lower()}"

    def install(self, progress: Progress) -> None:
        self.venv.make(progress)
        if self.quantization != AS_IT_IS:
            LlamaCpp(self.quantization, self.isa).install(progress)  # its llama-quantize makes the GGUF

    def installed(self) -> bool:
        return self.venv.made()

    def folder(self, model: Model) -> Path:
        return model.cache / f"openvino-{self.quantization}"

    def prepare(self, model: Model, progress: Progress) -> None:
        folder = self.folder(model)
        if (folder / "openvino_model.xml").exists():
            return
        progress(f"{self.name}: converting the model")
        folder.mkdir(parents=True, exist_ok=True)
        gguf = folder / "model.gguf"
        gguf.unlink(missing_ok=True)
        if self.quantization == AS_IT_IS:
            check_file_type(model.need_gguf(), AS_IT_IS)
            gguf.symlink_to(model.need_gguf().resolve())
        else:
            quantize(
                LlamaCpp(self.quantization, self.isa).binaries, model.need_gguf(), gguf, self.quantization
            )
        run([self.venv.python, "-c", CONVERT, str(gguf)])

    def candidates(self) -> list[dict[str, str]]:
        return [dict(options) for options in CANDIDATES]

    def command(self, model: Model, port: int) -> list[str]:
        properties = dict(self.options)
        words = [self.venv.python, str(SERVER), str(self.folder(model)), "--port", str(port)]
        words += ["--max-num-batched-tokens", properties.pop(STEP_TOKENS)]
        return [
            *words,
            *(word for name, value in properties.items() for word in ("--property", f"{name}={value}")),
        ]

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        answer = httpx.get(f"{url}/settings", timeout=10, trust_env=False).json()
        isa = answer["properties"]["RUNTIME_REQUIREMENTS"].rpartition("isa=")[2]
        return {
            "version": f"OpenVINO GenAI {answer.pop('version')}",
            "isa": isa,
            "weights": f"GGUF {self.quantization}",
            **answer,
        }


def check_file_type(file: Path, name: str) -> None:
    """Check the format of the GGUF.

    Raises:
        UserError: most tensors are not in the format ``name``.
    """
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(str(file)).get_field("general.file_type")
    number = field.contents() if field else None
    known = {kind.value: kind.name.removeprefix("MOSTLY_") for kind in LlamaFileType}
    if known.get(number) != name:
        raise UserError(f"the GGUF is {known.get(number, 'of no known type')}, not {name}", where=str(file))
