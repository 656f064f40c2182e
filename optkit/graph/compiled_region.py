"""CompiledRegion: one function for all layers, with generated code per token count.

TorchInductor compiles the region for each of ``buckets`` (T fixed, loops of known length) and once for any other T
(the dynamic tail). ``torch.compile`` is not used: it decides when to recompile by guards on every argument, and a
decode batch of one sequence, or a longer block table, would each be a reason. Here the graph is already captured, so
Inductor gets it directly, with what may vary spelled out. Nothing can trigger a compilation but a bucket's first use:
``compilations`` is at most ``len(buckets) + dynamic_tail``, by construction.

What the generated code assumes is checked when it runs: size conditions found while compiling (normally none), and
layouts, which Inductor asserts at entry. A call that does not fit runs the uncompiled layer, and says so in the log.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from optkit.paths import cache_dir

log = logging.getLogger(__name__)

TAIL_TOKENS = 173  # the size the dynamic tail is tuned for; equal to no other size by chance


@dataclass(frozen=True)
class Argument:
    """A region input: a fixed tensor (a weight), or sizes that depend on the batch.

    A size is ``base + per_token * T``; ``varies`` marks sizes that change at equal T (sequences, blocks).
    """

    dtype: torch.dtype
    device: torch.device
    base: tuple[int, ...]
    per_token: tuple[int, ...]
    varies: tuple[bool, ...]
    fixed: Tensor | None = None

    def sizes(self, tokens: int) -> tuple[int, ...]:
        return tuple(b + p * tokens for b, p in zip(self.base, self.per_token, strict=True))


class CompiledRegion(nn.Module):
    """Runs a region: ``plain`` is the lowered module, ``traced`` the same for the compiler."""

    def __init__(
        self,
        plain: fx.GraphModule,
        traced: fx.GraphModule,
        arguments: Sequence[Argument],
        token_input: int,
        buckets: Sequence[int],
        dynamic_tail: bool,
    ) -> None:
        super().__init__()
        self.plain, self.traced = plain, traced
        self.arguments, self.token_input = list(arguments), token_input
        self.buckets, self.dynamic_tail = frozenset(buckets), dynamic_tail
        self.code: dict[int | None, Callable[..., Any]] = {}  # by T; None is the dynamic tail
        self.compilations = 0

    @property
    def max_compilations(self) -> int:
        return len(self.buckets) + self.dynamic_tail

    def forward(self, *args: Tensor) -> Any:
        tokens = args[self.token_input].shape[0]
        if tokens in self.buckets:
            return self.variant(tokens)(*args)
        if self.dynamic_tail and tokens > 1:
            return self.variant(None)(*args)
        return self.plain(*args)

    def variant(self, tokens: int | None) -> Callable[..., Any]:
        """The code for T = ``tokens``, or for any T; compiled on first use."""
        if tokens not in self.code:
            self.compilations += 1
            self.code[tokens] = self.compile(tokens)
        return self.code[tokens]

    def warm_up(self) -> None:
        """Compile everything the plan names, so that no request waits for it."""
        for tokens in sorted(self.buckets):
            self.variant(tokens)
        if self.dynamic_tail:
            self.variant(None)

    def compile(self, tokens: int | None) -> Callable[..., Any]:  # type: ignore[override]
        label = "any T" if tokens is None else f"T={tokens}"
        try:
            return Guarded(*generate(self.traced, self.arguments, tokens), self.plain, label)
        except Exception:
            log.exception("compiling the layer for %s failed; it runs uncompiled", label)
            return self.plain


class Guarded:
    """Generated code that runs only where its assumptions hold, else the uncompiled module."""

    def __init__(
        self, code: Callable[..., Any], conditions: Conditions, plain: nn.Module, label: str
    ) -> None:
        self.code, self.conditions, self.plain, self.label = code, conditions, plain, label

    def __call__(self, *args: Tensor) -> Any:
        if not self.conditions.hold(args):
            return self.plain(*args)
        try:
            return self.code(*args)
        except AssertionError as error:  # Inductor's checks of layouts; writing the KV pool twice is harmless
            log.warning("the layer compiled for %s runs uncompiled from now on: %s", self.label, error)
            self.code = self.plain
            return self.plain(*args)


class Conditions:
    """Size conditions under which the code was generated, as sympy expressions over input sizes."""

    def __init__(self, expressions: Sequence[Any], places: Mapping[Any, tuple[int, int]]) -> None:
        self.expressions = [e for e in expressions if e.free_symbols]
        self.symbols = sorted({s for e in self.expressions for s in e.free_symbols}, key=str)
        self.places = [places[symbol] for symbol in self.symbols]
        self.known: dict[tuple[int, ...], bool] = {}

    def hold(self, args: Sequence[Tensor]) -> bool:
        if not self.expressions:
            return True
        sizes = tuple(args[i].shape[dim] for i, dim in self.places)
        if sizes not in self.known:
            values = dict(zip(self.symbols, sizes, strict=True))
            self.known[sizes] = all(bool(e.xreplace(values)) for e in self.expressions)
        return self.known[sizes]


# -- the compiler ------------------------------------------------------------------------------------------


def generate(
    module: fx.GraphModule, arguments: Sequence[Argument], tokens: int | None
) -> tuple[Callable[..., Any], Conditions]:
    """Code for ``module`` at T = ``tokens``, or at any T, and the conditions it relies on."""
    import torch._inductor
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    with private_cache(), torch.inference_mode(False), torch.no_grad(), config.patch(compile_threads=1):
        examples: list[Any] = [example(mode, a, i, tokens) for i, a in enumerate(arguments)]
        with tracing(TracingContext(mode)):
            code = torch._inductor.compile(copy.deepcopy(module), examples)
    return code, Conditions([guard.expr for guard in environment.guards], symbol_places(examples))  # type: ignore[return-value]


@contextmanager
def private_cache() -> Iterator[None]:
    """Inductor's cache in optkit's private directory: by default it is a predictable path in /tmp."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(cache_dir("inductor"))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def example(mode: Any, argument: Argument, index: int, tokens: int | None) -> Tensor:
    """A fake input: no data, and a symbol for every size that may vary."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if argument.fixed is not None:
        return mode.from_tensor(argument.fixed, static_shapes=True)
    dynamic = [
        v or (tokens is None and p > 0) for v, p in zip(argument.varies, argument.per_token, strict=True)
    ]
    kinds = [DimDynamic.DUCK if d else DimDynamic.STATIC for d in dynamic]  # DUCK: equal sizes, one symbol
    value = torch.empty(argument.sizes(tokens or TAIL_TOKENS), dtype=argument.dtype, device=argument.device)
    return mode.from_tensor(
        value,
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
        source=ConstantSource(f"input{index}"),
    )


def symbol_places(examples: Sequence[Tensor]) -> dict[Any, tuple[int, int]]:
    """Where to read each symbol's value: (input, dimension)."""
    places: dict[Any, tuple[int, int]] = {}
    for index, value in enumerate(examples):
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(size.node.expr, (index, dim))
    return places
