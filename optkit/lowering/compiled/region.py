"""CompiledRegion: compiled code in the place of a layer, for numbers of tokens with code.

The code was generated earlier (``optkit.lowering.compiled.aot``) and loaded from a code tier
(``optkit.lowering.compiled.code_cache``): nothing here compiles, or imports a compiler. The runtime first calls
``serves``; steps without code run the model without the compile plan, native programs included.

Code for a fixed number of tokens also serves fewer tokens: rows are padded with zeros and results are cut. Attention
is the only op across rows, and opaque to the compiler. It gets the true number of tokens by ``slot_mapping``, which
is not padded, and leaves the other rows alone (``opaque.true_rows``). So neither the scheduler nor a kernel handles
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Code = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Argument:
    """A region input: a fixed tensor (a weight), or a tensor with sizes of the batch.

    A size is ``base + per_token * T``; ``varies`` marks other values at equal T (sequences, blocks, and the slots of
    a padded step).
    """

    dtype: torch.dtype
    device: torch.device
    base: tuple[int, ...]
    per_token: tuple[int, ...]
    varies: tuple[bool, ...]
    fixed: Tensor | None = None

    @property
    def has_rows(self) -> bool:
        """True for a row a token: padding adds rows."""
        return any(p and not v for p, v in zip(self.per_token, self.varies, strict=True))

    def sizes(self, tokens: int) -> tuple[int, ...]:
        return tuple(b + p * tokens for b, p in zip(self.base, self.per_token, strict=True))


@dataclass(frozen=True)
class Variant:
    """Code for steps of ``first`` to ``last`` tokens, run at ``last``; None is code for any number of tokens."""

    first: int
    last: int | None
    code: Code

    def serves(self, tokens: int) -> bool:
        return self.first <= tokens and (self.last is None or tokens <= self.last)


class CompiledRegion(nn.Module):
    """Calls the code of the step's number of tokens. ``variants`` in order of preference."""

    def __init__(self, arguments: Sequence[Argument], token_input: int, variants: Sequence[Variant]) -> None:
        super().__init__()
        self.token_input = token_input
        self.rows = [i for i, a in enumerate(arguments) if a.has_rows]
        self.moving = [i for i, a in enumerate(arguments) if a.fixed is None]
        self.variants = tuple(variants)

    def serves(self, tokens: int) -> bool:
        return any(variant.serves(tokens) for variant in self.variants)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        tokens = args[self.token_input].shape[0]
        variant = next(v for v in self.variants if v.serves(tokens))
        inputs = list(args)
        for (
            i
        ) in self.moving:  # generated code has layouts built in; KV pools are contiguous where they are made
            inputs[i] = inputs[i].contiguous()
        if variant.last in (None, tokens):
            return tuple(variant.code(inputs))
        for i in self.rows:
            inputs[i] = padded(inputs[i], variant.last)
        return tuple(out[:tokens] for out in variant.code(inputs))


def padded(rows: Tensor, count: int) -> Tensor:
    """``rows`` [T, ...] with zero rows to ``count``."""
    out = rows.new_zeros(count, *rows.shape[1:])
    out[: rows.shape[0]] = rows
    return out
