"""Positions of a sequence whose KV has fewer tokens than the text: a list for the prompt, an offset afterwards.

A KV slot counts the tokens with KV; a position is what rotary embeddings and position tables see. The two differ only
for a request with ``Positions``; kernels attend by slots, in whose order the positions ascend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a prompt's kept tokens, and of the tokens behind the prompt.

    Attributes:
        kept: positions of the prompt tokens with a slot, ascending, [slots] int64.
        num_prompt: tokens of the whole prompt, and so the position of the next token.
        left_out: distinct tokens of the prompt without a slot; penalties count them as seen.
    """

    kept: np.ndarray
    num_prompt: int
    left_out: tuple[int, ...] = ()

    @classmethod
    def of(cls, kept: Sequence[int], prompt: Sequence[int]) -> Positions:
        """The positions of ``prompt`` with the tokens at ``kept`` alone.

        Raises:
            ValueError: ``kept`` is empty, does not ascend, or is outside of the prompt.
        """
        array = np.array(kept, dtype=np.int64)
        ascending = (
            len(array) > 0 and array[0] >= 0 and array[-1] < len(prompt) and (np.diff(array) > 0).all()
        )
        if not ascending:
            raise ValueError(f"kept positions must ascend within the prompt of {len(prompt)} tokens")
        rest = set(prompt) - {prompt[at] for at in array.tolist()}
        return cls(array, len(prompt), tuple(sorted(rest)))

    def span(self, start: int, count: int) -> np.ndarray:
        """The positions of ``count`` slots from slot ``start`` on, [count] int64."""
        slots = np.arange(start, start + count, dtype=np.int64)
        in_prompt = np.minimum(slots, len(self.kept) - 1)
        return np.where(slots < len(self.kept), self.kept[in_prompt], slots + self.num_left_out)

    @property
    def num_left_out(self) -> int:
        """Prompt tokens without a slot: the distance of position and slot behind the prompt."""
        return self.num_prompt - len(self.kept)
