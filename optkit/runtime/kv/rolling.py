"""Sinks and a rolling window: the tokens with KV of a sequence that may grow without end (arXiv 2309.17453).

The first tokens of a sequence, the *sinks*, draw much of the attention whatever their text, so a model without the
sinks fails, while a model with the sinks and the last tokens goes on. With s sinks, a window of w tokens, and blocks
of b tokens, the token at position n attends to::

    forgotten(n) = 0                               for the first tokens, n < num_exact
                   (n + 1 - s - w) // b * b        for all later tokens

    the tokens from forgotten(n) + s to n, which are w to w + b - 1 tokens, at their positions, and
    the s sinks, at the positions forgotten(n) to forgotten(n) + s - 1

So the visible positions have no gap, and no distance is longer than s + w + b - 1. Keys of the window stay unchanged,
since rotary embedding and ALiBi depend on distances alone. The sinks move by a block at a time: K and V of the sinks
are computed anew, from the tokens, at the next positions. No error can add up.

``num_exact`` is the length of the prompt, or the first length at which a block can be forgotten, if the prompt is
shorter. A prompt longer than the context of the model is read through the window from the beginning. The rule
depends on positions alone: the tokens of an answer do not change with other requests, chunks, guesses, or preemptions.

In the block table the block with the sinks, which no other sequence has, stands in the place of the first block after
the forgotten blocks: the first s tokens are the sinks, the rest is a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

MOST_TOKENS = 1 << 20  # of a sequence: angles of later positions would be too coarse in float32


class RollingWindow(msgspec.Struct, frozen=True):
    """A request's choice, in tokens: the last ``window`` tokens and the first ``sinks`` tokens are attended to."""

    window: int
    sinks: int


@dataclass(frozen=True)
class Rolling:
    """The rule for a sequence in blocks of ``block_size`` tokens.

    Attributes:
        num_exact: first tokens that attend to all earlier ones.
    """

    window: int
    sinks: int
    block_size: int
    num_exact: int

    @staticmethod
    def of(chosen: RollingWindow, block_size: int, num_prompt: int, max_model_len: int) -> Rolling:
        """The rule for a sequence whose prompt has ``num_prompt`` tokens."""
        rule = Rolling(chosen.window, chosen.sinks, block_size, 0)
        prompt = num_prompt if num_prompt < max_model_len else 0
        return replace(rule, num_exact=max(prompt, rule.most_seen))

    @property
    def most_seen(self) -> int:
        """The most tokens seen by a token after ``num_exact``, with the token at the end."""
        return self.sinks + self.window + self.block_size - 1

    def forgotten(self, position: int) -> int:
        """Tokens without KV for the token at ``position``, a multiple of the block size."""
        if position < self.num_exact:
            return 0
        return (position + 1 - self.sinks - self.window) // self.block_size * self.block_size

    def next_change(self, position: int) -> int:
        """The first position after ``position`` whose token sees other tokens forgotten."""
        if position < self.num_exact:
            return self.num_exact
        return self.forgotten(position) + self.most_seen
