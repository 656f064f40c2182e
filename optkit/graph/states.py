"""States of layers: paged KV of attention, and recurrent states of fixed size, which a sequence keeps between calls.

Each kind names the graph inputs of a layer's pools, and gives pools and bytes by formula:

- ``KVSpec``: K and V of every token, in blocks (``token_bytes`` for each token). With a ``window`` only the blocks
  within reach of a later query are needed (``optkit.graph.kv_layout`` has the tables of blocks). ``latent`` KV has
  one pool for both. With ``bounds`` a layer has one pool more.
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

import torch
from torch import Tensor

from optkit.kernels.reference import KV_SCALE_BYTES, bounds_token_bytes

STATE_SLOTS = "state_slots"
PROMPT_LENS = "prompt_lens"  # [S] int32, tokens of each sequence's prompt, where keys have bounds

# The storage of a token's head in KV pools: the dtype, and the elements of a row besides the D values.
KV_DTYPES = {
    "float32": (torch.float32, 0),
    "bfloat16": (torch.bfloat16, 0),  # as the graph's activations, where it computes in half precision
    "float16": (torch.float16, 0),
    "int8": (torch.int8, KV_SCALE_BYTES),
    "fp8": (torch.uint8, KV_SCALE_BYTES),  # the bytes of E4M3
}
MAX_STATE_ELEMENTS = (
    1 << 40
)  # of a sequence in a layer: beyond any memory, and products of such sizes do not overflow
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KVSpec:
    """The KV pools of an attention layer: K [blocks, block_size, num_kv_heads, head_dim] and V, of v_head_dim.

    ``dtype`` is a key of ``KV_DTYPES``. Rows of an int8 or fp8 pool are four bytes longer: their scale
    (``reference.quantize_kv``). A query reads the last ``window`` tokens up to its own; 0 is all tokens.

    ``latent`` KV has no pool of V: the first v_head_dim channels of a key are the value (multi-head latent attention,
    arXiv 2405.04434).

    With ``bounds`` there is a pool [blocks, block_size, bytes] int8 with bounds of the keys
    (``reference.selected_attention``).
    """

    layer: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "float32"
    window: int = 0
    latent: bool = False
    bounds: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {self.dtype!r:.80} is none of {', '.join(KV_DTYPES)}")
        if self.latent and self.v_head_dim > self.head_dim:
            raise ValueError(f"values of {self.v_head_dim} channels are no part of keys of {self.head_dim}")
        if self.bounds and (self.window or self.latent):
            raise ValueError("keys of a layer with a window, or of latent KV, have no bounds")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The graph inputs of the pools."""
        names = f"k_cache_{self.layer}", f"v_cache_{self.layer}"
        return names[: len(self.row_dims)] + self.bounds_inputs

    @property
    def bounds_inputs(self) -> tuple[str, ...]:
        """The graph input of the pool of bounds; empty without."""
        return (f"k_bounds_{self.layer}",) if self.bounds else ()

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The channels of a head's row in each pool."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.v_head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all pools."""
        return sum(self.pool_bytes)

    @property
    def pool_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each pool."""
        dtype, extra = KV_DTYPES[self.dtype]
        rows = tuple(self.num_kv_heads * (dim + extra) * dtype.itemsize for dim in self.row_dims)
        return (*rows, bounds_token_bytes(self.num_kv_heads, self.head_dim)) if self.bounds else rows

    def views(self, buffers: Sequence[Tensor], block_size: int) -> tuple[Tensor, ...]:
        """Buffers of bytes [n, bytes of a block] as pools, one an input of ``inputs``."""
        dtype, extra = KV_DTYPES[self.dtype]
        rows: list[tuple[torch.dtype, tuple[int, ...]]]
        rows = [(dtype, (self.num_kv_heads, dim + extra)) for dim in self.row_dims]
        rows += [(torch.int8, self.pool_bytes[-1:])] * self.bounds
        return tuple(
            buffer.view(kind).view(-1, block_size, *shape)
            for buffer, (kind, shape) in zip(buffers, rows, strict=True)
        )

    def pools(
        self, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, ...]:
        """Zeroed pools, one an input of ``inputs``. On the CPU a page costs memory from the first write on."""
        sizes = [(num_blocks, block_size * size) for size in self.pool_bytes]
        return self.views([unwritten_zeros(size, torch.uint8, device) for size in sizes], block_size)


@dataclass(frozen=True)
class RecurrentSpec:
    """A state of fixed size of each sequence in a layer: the pool [slots, *shape], whose graph input has the name and
    the layer's number.

    ``dtype`` is a key of ``STATE_DTYPES``.
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
        return prod(self.shape) * STATE_DTYPES[self.dtype].itemsize

    def pool(self, num_slots: int, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed pool [num_slots, *shape]. On the CPU a page costs memory from the first write on."""
        return unwritten_zeros((num_slots, *self.shape), STATE_DTYPES[self.dtype], device)


StateSpec = KVSpec | RecurrentSpec


def kv_of(states: Iterable[StateSpec]) -> tuple[KVSpec, ...]:
    """The states that are paged KV."""
    return tuple(state for state in states if isinstance(state, KVSpec))


def recurrent_of(states: Iterable[StateSpec]) -> tuple[RecurrentSpec, ...]:
    """The states of fixed size."""
    return tuple(state for state in states if isinstance(state, RecurrentSpec))


def state_inputs(states: Iterable[StateSpec]) -> tuple[str, ...]:
    """The graph inputs of the pools of ``states``, ``state_slots`` where a state needs a slot, and ``prompt_lens``
    where keys have bounds.
    """
    states = tuple(states)
    names = [name for state in states for name in state.inputs]
    names += [STATE_SLOTS] * bool(recurrent_of(states)) + [PROMPT_LENS] * has_bounds(states)
    return tuple(names)


def has_bounds(states: Iterable[StateSpec]) -> bool:
    """True where a layer keeps bounds of its keys."""
    return any(spec.bounds for spec in kv_of(states))


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


def unwritten_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros like ``torch.zeros``, in pages filled with zeros by the kernel on first use."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
