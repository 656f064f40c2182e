"""Variants of a model by the number of tokens of a step. No torch."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Variant(Protocol):
    """The part of a model for steps of up to ``limit`` tokens; None is any number."""

    @property
    def limit(self) -> int | None: ...

    def workspace_bytes(self, sizes: tuple[int, int]) -> int:
        """Working memory in bytes of a step of so many tokens and rows of logits."""
        ...


V = TypeVar("V", bound=Variant)


class ByTokens(Generic[V]):
    """A model of ``variants``, in the order of their limits, the last for any number of tokens."""

    variants: tuple[V, ...]

    @property
    def variant_limits(self) -> tuple[int, ...]:
        """The largest number of tokens of each variant but the last; empty without variants."""
        return tuple(variant.limit for variant in self.variants if variant.limit is not None)

    def variant(self, tokens: int) -> V:
        """The variant for a step of ``tokens`` tokens."""
        return next(variant for variant in self.variants if variant.limit is None or tokens <= variant.limit)

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Working memory of native programs, in bytes, for a step of ``num_tokens`` tokens and ``num_rows`` rows of
        logits.
        """
        return max(variant.workspace_bytes((num_tokens, num_rows)) for variant in self.variants)
