"""Calls of ops with a recurrent state on random numbers, in ragged batches over a pool of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference

OPS = ("short_conv", "gated_delta_rule", "ssd_scan", "selective_scan")
WEIGHTS = {"short_conv": (1, 2), "gated_delta_rule": (), "ssd_scan": (2, 5), "selective_scan": (2, 5)}


@dataclass
class Call:
    """An op's name, its tensors before the pool, and its options."""

    op: str
    tensors: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.tensors[0])

    def __add__(self, other: Call) -> Call:
        """The rows of both, with this call's weights."""
        kept = WEIGHTS[self.op]
        pairs = enumerate(zip(self.tensors, other.tensors, strict=True))
        return Call(self.op, [a if i in kept else torch.cat((a, b)) for i, (a, b) in pairs], self.options)


@dataclass
class Batch:
    """Rows, length so far and slot of each sequence."""

    rows: Sequence[int]
    lengths: Sequence[int]
    slots: Sequence[int]

    @classmethod
    def of(cls, rows: Sequence[int]) -> Batch:
        """Whole prompts."""
        return cls(rows, rows, range(len(rows)))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        starts = torch.tensor([0, *self.rows]).cumsum(0)
        return tuple(
            torch.as_tensor(t, dtype=torch.int32) for t in (starts, list(self.lengths), list(self.slots))
        )  # type: ignore[return-value]


def cut(call: Call, first: int, last: int) -> Call:
    """Rows [first, last) of a call."""
    kept = WEIGHTS[call.op]
    return Call(
        call.op, [t if i in kept else t[first:last] for i, t in enumerate(call.tensors)], call.options
    )


def random_call(op: str, tokens: int, seed: int = 0, **wanted: Any) -> Call:
    return MAKERS[op](torch.Generator().manual_seed(seed), tokens, **wanted)


def run(call: Call, batch: Batch, pool: Tensor, fn: Callable[..., Tensor] | None = None) -> Tensor:
    """The result of ``fn``, by default the reference."""
    return (fn or getattr(reference, call.op))(*call.tensors, pool, *batch.tensors(), **call.options)


def pool_of(call: Call, slots: int) -> Tensor:
    t = call.tensors
    shape = {
        "short_conv": lambda: (t[1].shape[2] - 1, t[1].shape[0]),
        "gated_delta_rule": lambda: (t[2].shape[1], t[1].shape[2], t[2].shape[2]),
        "ssd_scan": lambda: (t[0].shape[1], t[3].shape[2], t[0].shape[2]),
        "selective_scan": lambda: t[2].shape,
    }[call.op]()
    return torch.zeros(slots, *shape)


def short_conv(
    g: torch.Generator,
    tokens: int,
    channels: int = 37,
    taps: int = 4,
    bias: bool = True,
    activation: str = "silu",
) -> Call:
    x, weight = torch.randn(tokens, channels, generator=g), torch.randn(channels, 1, taps, generator=g)
    return Call("short_conv", [x, weight, torch.randn(channels, generator=g) if bias else None],
                {"activation": activation})  # fmt: skip


def gated_delta_rule(
    g: torch.Generator,
    tokens: int,
    heads: int = 4,
    key_heads: int = 2,
    keys: int = 12,
    values: int = 21,
    by_channel: bool = False,
    l2norm: int = 1,
) -> Call:
    q, k = torch.randn(2, tokens, key_heads, keys, generator=g).unbind() if l2norm else (
        torch.randn(2, tokens, key_heads, keys, generator=g) * keys**-0.5).unbind()  # fmt: skip
    v = torch.randn(tokens, heads, values, generator=g)
    decay = -torch.rand(tokens, heads, *((keys,) if by_channel else ()), generator=g)
    beta = torch.rand(tokens, heads, generator=g)
    options = {"scale": keys**-0.5, "l2norm": l2norm}
    return Call("gated_delta_rule", [q, k, v, decay, beta], options)


def ssd_scan(
    g: torch.Generator, tokens: int, heads: int = 4, groups: int = 2, states: int = 12, channels: int = 21
) -> Call:
    x, dt = torch.randn(tokens, heads, channels, generator=g), torch.rand(tokens, heads, generator=g)
    b, c = torch.randn(2, tokens, groups, states, generator=g).unbind()
    a, d = -torch.rand(heads, generator=g) - 0.1, torch.randn(heads, generator=g)
    return Call("ssd_scan", [x, dt, a, b, c, d])


def selective_scan(g: torch.Generator, tokens: int, channels: int = 37, states: int = 6) -> Call:
    x, dt = torch.randn(tokens, channels, generator=g), torch.rand(tokens, channels, generator=g)
    b, c = torch.randn(2, tokens, states, generator=g).unbind()
    a, d = -torch.rand(states, channels, generator=g) - 0.1, torch.randn(channels, generator=g)
    return Call("selective_scan", [x, dt, a, b, c, d])


MAKERS: dict[str, Callable[..., Call]] = {
    "short_conv": short_conv,
    "gated_delta_rule": gated_delta_rule,
    "ssd_scan": ssd_scan,
    "selective_scan": selective_scan,
}
