"""LoRA adapters in PEFT's layout with random values, and a model with the adapters beside the weights, unmerged."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."
RANK, ALPHA = 4, 16


def linear_update(out: int, inputs: int, rank: int = RANK) -> dict[str, Tensor]:
    """Random ``lora_A`` [r, inputs] and ``lora_B`` [out, r]."""
    return {"lora_A.weight": torch.randn(rank, inputs) * 0.2, "lora_B.weight": torch.randn(out, rank) * 0.2}


def write_adapter(
    directory: Path,
    updates: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Tensor] = {},
    **config: Any,
) -> Path:
    """Write an adapter: tensors of updates by module, whole tensors by name, and keys of the configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{PREFIX}{module}.{key}": t for module, update in updates.items() for key, t in update.items()
    }
    tensors |= {f"{PREFIX}{name}": value for name, value in saved.items()}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, directory / "adapter_model.safetensors"
    )
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "org/base"}
    (directory / "adapter_config.json").write_text(json.dumps(plain | config))
    return directory


def unmerged_logits(
    model: Any, updates: Mapping[str, Mapping[str, Tensor]], scales: Mapping[str, float], ids: Tensor
) -> Tensor:
    """Logits [T, V] in float64 of ``model`` with ``scale * B(A(x))`` added to the output of each linear layer."""
    model = copy.deepcopy(model).double()
    for name, update in updates.items():
        a, b = (update[f"lora_{part}.weight"].double() for part in "AB")

        def add(
            module: Any, args: Any, out: Tensor, a: Tensor = a, b: Tensor = b, s: float = scales[name]
        ) -> Tensor:
            return out + s * (args[0] @ a.T @ b.T)

        model.get_submodule(name).register_forward_hook(add)
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]
