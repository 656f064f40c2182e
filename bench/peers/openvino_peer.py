"""OpenVINO GenAI: its continuous batching pipeline behind ``openvino_server``, a small server of ours.

OpenVINO GenAI has no server of its own in the PyPI package (OpenVINO Model Server is a container around the same
pipeline). It reads the GGUF and keeps it as OpenVINO IR, made once. Everything else is OpenVINO's choice for the
machine (inference precision, KV cache precision, dynamic quantization of activations) and is read back from the
compiled model, except the token budget of a step: the default of 256 chops long prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from bench.peers.llama_cpp_peer import LlamaCpp, quantize
from bench.peers.peer import Model, Peer, Progress, Venv, run

MAX_NUM_BATCHED_TOKENS = 2048
SERVER = Path(__file__).with_name("openvino_server.py")
CONVERT = """
import sys, openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


class OpenVino(Peer):
    """The continuous batching pipeline with one quantization of the model."""

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

    def __init__(self, quantization: str) -> None:
        self.quantization = quantization
        self.name = f"openvino-{quantization.lower()}"

    def install(self, progress: Progress) -> None:
        self.venv.make(progress)
        if self.quantization != "Q4_1":
            LlamaCpp.venv.make(progress)  # its llama-quantize makes the GGUF

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
        quantize(
            LlamaCpp(self.quantization).binaries, model.need_gguf(), folder / "model.gguf", self.quantization
        )
        run([self.venv.python, "-c", CONVERT, str(folder / "model.gguf")])

    def command(self, model: Model, port: int) -> list[str]:
        words = [self.venv.python, str(SERVER), str(self.folder(model)), "--port", str(port)]
        return [*words, "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        answer = httpx.get(f"{url}/settings", timeout=10, trust_env=False).json()
        return {
            "version": f"OpenVINO GenAI {answer.pop('version')}",
            "weights": f"GGUF {self.quantization}",
            **answer,
        }
