"""Steps of a model of torch on the pools of a runner on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from optkit.runtime.kv.pools import Step


def torch_step(model: Callable[[dict[str, Tensor]], Tensor], pools: Mapping[str, np.ndarray]) -> Step:
    """The step of ``model``, with tensors over the memory of ``pools``."""
    tensors = {name: as_tensor(pool) for name, pool in pools.items()}

    @torch.inference_mode()
    def step(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        logits: np.ndarray = model(inputs | tensors).numpy()
        return logits

    return step


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor over the memory of ``array``; uint16 stands for bfloat16, a type that is missing in NumPy."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
