"""States of layers: paged KV of attention, and recurrent states of fixed size, which a sequence keeps between calls.

Each kind names the graph inputs of a layer's pools, and gives pools and bytes by formula:

- ``KVSpec``: K and V of every token, in blocks (``token_bytes`` for each token). With a ``window`` only the blocks
  within reach of a later query are needed (``optkit.graph.kv_layout`` has the tables of blocks). ``latent`` KV has
  one pool for both.
- ``RecurrentSpec``: a tensor of a fixed shape for each sequence (``sequence_bytes`` at any length), in a *slot* of the
  pool. Convolutions keep the last inputs, linear attention and state-space layers the recurrent state.

A pool is an input of the graph, mutated in place. An op with a recurrent state gets ``state_slots`` [S] int32, the slot
of each sequence, and follows three rules:

- A sequence whose call holds the first token (``seq_lens[s] == query_start[s + 1] - query_start[s]``) begins from
  zeros, whatever the slot holds, so no slot needs clearing.
- After the call the slot has the state after the sequence's last token of the call.
- A padding sequence (length 0) touches no slot.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from optkit.kernels.kv_rows import KV_SCALE_BYTES, is_interleaved

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STATE_SLOTS = "state_slots"

# The storage of a token's head in KV pools: the dtype, and the elements of a row besides the D values.
KV_DTYPES = {
    "float32": ("float32", 0),
    "bfloat16": ("bfloat16", 0),  # as the graph's activations, where it computes in half precision
    "float16": ("float16", 0),
    "int8": ("int8", KV_SCALE_BYTES),
    "fp8": ("uint8", KV_SCALE_BYTES),  # the bytes of E4M3
}
MAX_STATE_ELEMENTS = (
    1 << 40
)  # of a sequence in a layer: beyond any memory, and products of such sizes do not overflow
STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class KVSpec:
    """The KV pools of an attention layer: K [blocks, block_size, num_kv_heads, head_dim] and V, of v_head_dim.

    ``dtype`` is a key of ``KV_DTYPES``. Rows of an int8 or fp8 pool are four bytes longer: their scale
    (``reference.quantize_kv``). A query reads the last ``window`` tokens up to its own; 0 is all tokens.

    ``latent`` KV has no pool of V: the first v_head_dim channels of a key are the value (multi-head latent attention,
    arXiv 2405.04434).
    """

    layer: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "float32"
    window: int = 0
    latent: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {self.dtype!r:.80} is none of {', '.join(KV_DTYPES)}")
        if self.latent and self.v_head_dim > self.head_dim:
            raise ValueError(f"values of {self.v_head_dim} channels are no part of keys of {self.head_dim}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The graph inputs of the pools."""
        names = f"k_cache_{self.layer}", f"v_cache_{self.layer}"
        return names[: len(self.row_dims)]

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The channels of a head's row in each pool."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.v_head_dim)

    def is_interleaved(self, block_size: int) -> bool:
        """True where pools on a CPU, of blocks of so many tokens, are interleaved (``reference_attention``)."""
        return self.dtype == "int8" and not self.latent and is_interleaved(block_size, *self.row_dims)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all pools."""
        return sum(self.row_bytes)

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each pool."""
        size = numpy_dtype(KV_DTYPES[self.dtype][0]).itemsize
        return tuple(prod(shape) * size for shape in self.row_shapes)

    @property
    def row_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shape [Hkv, elements of a head's row] of a token in each pool."""
        _, extra = KV_DTYPES[self.dtype]
        return tuple((self.num_kv_heads, dim + extra) for dim in self.row_dims)

    def pools(
        self, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, ...]:
        """Zeroed pools, one a row of ``row_dims``. On the CPU a page costs memory from the first write on."""
        dtype = torch_dtype(KV_DTYPES[self.dtype][0])
        return tuple(
            unwritten_zeros((num_blocks, block_size, *row), dtype, device) for row in self.row_shapes
        )


@dataclass(frozen=True)
class RecurrentSpec:
    """A state of fixed size of each sequence in a layer: the pool [slots, *shape], whose graph input has the name and
    the layer's number.

    ``dtype`` is one of ``STATE_DTYPES``.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in STATE_DTYPES:
            raise ValueError(f"state dtype {self.dtype!r:.80} is none of {', '.join(STATE_DTYPES)}")
        if not (self.name.isascii() and self.name.isidentifier()):
            raise ValueError(f"state name {self.name!r:.80} is no identifier")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"a state of shape {list(self.shape)} holds nothing")
        if prod(self.shape) > MAX_STATE_ELEMENTS:
            raise ValueError(f"a state of shape {list(self.shape)} is beyond any memory")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The graph input of the pool."""
        return (f"{self.name}_{self.layer}",)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the state of a sequence."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def pool(self, num_slots: int, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed pool [num_slots, *shape]. On the CPU a page costs memory from the first write on."""
        return unwritten_zeros((num_slots, *self.shape), torch_dtype(self.dtype), device)


StateSpec = KVSpec | RecurrentSpec


def kv_of(states: Iterable[StateSpec]) -> tuple[KVSpec, ...]:
    """The states that are paged KV."""
    return tuple(state for state in states if isinstance(state, KVSpec))


def recurrent_of(states: Iterable[StateSpec]) -> tuple[RecurrentSpec, ...]:
    """The states of fixed size."""
    return tuple(state for state in states if isinstance(state, RecurrentSpec))


def state_inputs(states: Iterable[StateSpec]) -> tuple[str, ...]:
    """The graph inputs of the pools of ``states``, and ``state_slots`` where a state needs a slot."""
    states = tuple(states)
    names = [name for state in states for name in state.inputs]
    return (*names, STATE_SLOTS) if recurrent_of(states) else tuple(names)


def token_bytes(states: Iterable[StateSpec]) -> int:
    """Bytes of a token over all layers: KV."""
    return sum(spec.token_bytes for spec in kv_of(states))


def sequence_bytes(states: Iterable[StateSpec]) -> int:
    """Bytes of a sequence of any length over all layers: recurrent states."""
    return sum(spec.sequence_bytes for spec in recurrent_of(states))


def state_bytes(states: Iterable[StateSpec], num_tokens: int) -> int:
    """Bytes that the layers need for a sequence of ``num_tokens`` tokens: a windowed layer holds its window."""
    states = tuple(states)
    kv = sum(spec.token_bytes * min(num_tokens, spec.window or num_tokens) for spec in kv_of(states))
    return kv + sequence_bytes(states)


def named_pools(
    states: Sequence[StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Zeroed pools of ``states`` by graph input."""
    pools: dict[str, Tensor] = {}
    for spec in states:
        if isinstance(spec, KVSpec):
            pools |= zip(spec.inputs, spec.pools(num_blocks, block_size, device), strict=True)
        else:
            pools[spec.inputs[0]] = spec.pool(num_slots, device)
    return pools


def numpy_dtype(name: str) -> np.dtype:
    """The dtype ``name`` of NumPy, which has no bfloat16: its elements are uint16."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype ``name`` of torch."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


def unwritten_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros like ``torch.zeros``, in pages filled with zeros by the kernel on first use."""
    import torch

    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(unwritten((size,), np.dtype(np.uint8))).view(dtype).view(shape)


def host_zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """``unwritten`` zeros by the name of the dtype."""
    return unwritten(shape, numpy_dtype(dtype))


def unwritten(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros of NumPy in pages that cost memory after the first write."""
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype).reshape(shape)
