"""The memory of a model's states on a GPU, by torch (``optkit.runtime.kv.pools.Pools``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optkit.graph.kv_layout import KVLayout
from optkit.graph.states import StateSpec, torch_dtype, unwritten_zeros
from optkit.runtime.draft_tree import Move
from optkit.runtime.kv.pools import Step, allocated
from optkit.runtime.types import BlockCopy, StateCopy


class DevicePools:
    """Pools on ``device``. Raises as ``HostPools``."""

    def __init__(
        self,
        layout: KVLayout,
        states: Sequence[StateSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        num_slots: int = 0,
    ) -> None:
        self.torch_device = torch.device(device)
        self.device = self.torch_device.type

        def zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
            return unwritten_zeros(shape, torch_dtype(dtype), self.torch_device)

        sizes = (num_blocks, block_size, num_slots)
        self.buffers, self.kv, self.states = allocated(layout, states, *sizes, zeros)

    def bind(self, model: Any) -> Step:
        """The step of ``model`` on these pools, whose logits stay on the device."""
        pools = self.kv | self.states

        @torch.inference_mode()
        def step(arrays: Mapping[str, np.ndarray]) -> Tensor:
            inputs = {name: torch.from_numpy(array).to(self.torch_device) for name, array in arrays.items()}
            logits: Tensor = model(inputs | pools)
            return logits

        return step

    @torch.inference_mode()
    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states from slot to slot, in order."""
        for pool in self.states.values():
            for copy in copies:
                pool[copy.to].copy_(pool[copy.source])

    def move_tokens(self, moves: Sequence[Move]) -> None:
        """Trees of guesses run on CPUs alone."""
        raise NotImplementedError("KV of single tokens is not moved on a GPU")

    @torch.inference_mode()
    def copy_block(self, copy: BlockCopy) -> None:
        """Copy the KV of a block in all layers, after the steps before."""
        for slot in self.buffers:
            for buffer in slot:
                buffer[copy.to].copy_(buffer[copy.source])

    @torch.inference_mode()
    def read_block(self, block: int) -> np.ndarray:
        """The KV of ``block`` in the layers of its group, as bytes [n] uint8 on the host."""
        return torch.cat(self._bytes_of(block)).cpu().numpy()

    @torch.inference_mode()
    def write_block(self, block: int, data: np.ndarray) -> None:
        """Write the bytes of ``read_block`` into any block."""
        rows = self._bytes_of(block)
        parts = torch.tensor(data, device=self.torch_device).split([row.numel() for row in rows])
        for row, part in zip(rows, parts, strict=True):
            row.copy_(part)

    def _bytes_of(self, block: int) -> list[Tensor]:
        """The bytes of ``block`` in each buffer, as views."""
        return [buffer[block] for slot in self.buffers for buffer in slot]
