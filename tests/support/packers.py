"""Tiny quantized checkpoints, packed number by number from the formats' descriptions: an oracle for the readers.

No code of optkit's packing is used. ``Quantized`` is a layer in plain numbers. ``gptq`` and ``awq`` write the layout
of the formats' libraries; ``compressed`` calls the compressed-tensors library. ``checkpoint`` writes a whole tiny
model, ``one_layer`` a checkpoint of one layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from optkit.checkpoint.quantized_linear import QuantizedLinear
from optkit.checkpoint.source import open_source
from tests.support.architectures import tiny_model

HEAD = "lm_head"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}

# Options of ``one_layer``.
BITS_AND_GROUPS = [
    {"symmetric": True},
    {"symmetric": False},
    {"symmetric": False, "act_order": True},
    {"group": 0},
    {"group": 64},  # a short last group
    {"bits": 2, "symmetric": False},
    {"bits": 3, "act_order": True},
    {"bits": 8, "symmetric": False, "dtype": torch.float32},
    {"dtype": torch.bfloat16},
]


@dataclass
class Quantized:
    """codes [N, K], zero and scale [N, G], the group of each channel [K]."""

    codes: np.ndarray
    zero: np.ndarray
    scale: Tensor
    g_idx: np.ndarray
    bits: int
    group: int

    def weight(self) -> Tensor:
        steps = torch.from_numpy((self.codes - self.zero[:, self.g_idx]).astype(np.float32))
        return steps * self.scale.float()[:, self.g_idx]


def quantized(
    n: int, k: int, bits: int, group: int, *, symmetric: bool, act_order: bool, dtype: torch.dtype, seed: int
) -> Quantized:
    """A random layer; ``group`` 0 is per channel."""
    rng = np.random.default_rng(seed)
    size = group or k
    groups = -(-k // size)
    codes = rng.integers(0, 1 << bits, (n, k))
    zero = np.full((n, groups), 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, (n, groups))
    g_idx = np.arange(k) // size
    scale = torch.from_numpy(rng.uniform(0.02, 0.05, (n, groups))).to(dtype) / 2 ** (bits - 4)
    return Quantized(
        codes, zero, scale.to(dtype), rng.permutation(g_idx) if act_order else g_idx, bits, group
    )


def words(bits_of: list[tuple[int, int]]) -> list[int]:
    """Pack numbers of the given bits from the low end, without gaps, into signed 32-bit words."""
    total, at = 0, 0
    for value, bits in bits_of:
        total |= int(value) << at
        at += bits
    count = -(-at // 32)
    unsigned = [(total >> 32 * i) & 0xFFFFFFFF for i in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in unsigned]


def gptq(layer: Quantized, version: str = "gptq") -> dict[str, Tensor]:
    """The layer's tensors in GPTQ's layout."""
    n = len(layer.codes)
    columns = [words([(code, layer.bits) for code in layer.codes[i]]) for i in range(n)]
    stored = layer.zero - (1 if version == "gptq" else 0)
    rows = [words([(z, layer.bits) for z in stored[:, g]]) for g in range(stored.shape[1])]
    return {
        "qweight": torch.tensor(columns, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor(rows, dtype=torch.int32),
        "scales": layer.scale.T.contiguous(),
        "g_idx": torch.from_numpy(layer.g_idx).to(torch.int32),
    }


def awq(layer: Quantized) -> dict[str, Tensor]:
    """The layer's tensors in AWQ's layout (gemm)."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(numbers: np.ndarray) -> Tensor:  # [N, R] to [R, N / 8]
        rows = []
        for row in numbers.T:
            eights = [row[i : i + 8] for i in range(0, len(row), 8)]
            rows.append([words([(eight[j], 4) for j in order])[0] for eight in eights])
        return torch.tensor(rows, dtype=torch.int32)

    return {"qweight": pack(layer.codes), "qzeros": pack(layer.zero), "scales": layer.scale.T.contiguous()}


def compressed(layer: Quantized, scheme: Any) -> dict[str, Tensor]:
    """The layer's tensors as ``pack-quantized``, packed by the compressed-tensors library."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    middle = 1 << (layer.bits - 1)
    state = {
        "weight": layer.weight(),
        "weight_scale": layer.scale,
        "weight_zero_point": torch.from_numpy(layer.zero - middle).to(torch.int8),
    }
    ordered = np.array_equal(layer.g_idx, np.sort(layer.g_idx))
    more = {} if ordered else {"weight_g_idx": torch.from_numpy(layer.g_idx).to(torch.int32)}
    return PackedQuantizationCompressor.compress(state, scheme) | more


def checkpoint(
    directory: Path,
    pack: Callable[[Quantized], dict[str, Tensor]],
    config: dict[str, Any],
    *,
    architecture: str = "llama",
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    **overrides: Any,
) -> Any:
    """Write a tiny model with quantized linear layers to ``directory``; return the equivalent float model."""
    model = tiny_model(architecture, **overrides)
    model.save_pretrained(directory)
    tensors: dict[str, Tensor] = {}
    replaced = set()
    for seed, (name, module) in enumerate(model.named_modules()):
        if is_linear(module) and name != HEAD:
            n, k = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.T.shape
            layer = quantized(
                n, k, bits, group, symmetric=symmetric, act_order=act_order, dtype=dtype, seed=seed
            )
            weight = layer.weight()
            module.weight.data = weight if isinstance(module, torch.nn.Linear) else weight.T.contiguous()
            tensors |= {f"{name}.{key}": value for key, value in pack(layer).items()}
            replaced.add(f"{name}.weight")
    from safetensors.torch import load_file

    left = load_file(directory / "model.safetensors")
    tensors |= {name: value for name, value in left.items() if name not in replaced}
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    settings = json.loads((directory / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(settings))
    return model


def one_layer(
    directory: Path,
    pack: Callable[[Quantized], dict[str, Tensor]],
    config: dict[str, Any],
    shape: tuple[int, int] = (48, 96),
    **options: Any,
) -> tuple[QuantizedLinear, Quantized]:
    """A layer in a checkpoint of its own, read back; and the layer in plain numbers."""
    plain = quantized(*shape, **({"bits": 4, "group": 32, "symmetric": True, "act_order": False, "seed": 3,
                                  "dtype": torch.float16} | options))  # fmt: skip
    save_file({f"a.b.{key}": value for key, value in pack(plain).items()}, directory / "model.safetensors")
    text = json.dumps({"model_type": "llama", "quantization_config": config})
    (directory / "config.json").write_text(text)
    return open_source(directory).layers["a.b"], plain


def is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
