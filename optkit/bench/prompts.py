"""Prompts of exact lengths, cut from real text, with exactly the shared prefixes that a workload asks for.

Real language gives realistic tokens to speculative decoding and early exits. Each prompt, or each conversation, begins
with an own token after the shared prefix: two prompts share nothing by accident, and rounds share nothing at
all, so a prefix cache finds what the workload says and every round meets an equally cold cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optkit.bench.traces import TraceRow, block_len
from optkit.errors import UserError

Prompt = tuple[int, ...]


class PromptSource:
    """Pieces of text for one round: reproducible from the seed and the round.

    Args:
        ids: the text as token ids.
        seed: of the whole run; gives the order of the leading tokens.
        round_: number of the round.
    """

    def __init__(self, ids: Sequence[int], seed: int, round_: int) -> None:
        self.ids, self.seed, self.round = ids, seed, round_
        self.leads = np.random.default_rng(seed).permutation(np.unique(np.asarray(ids)))

    def own(self, count: int, lengths: Sequence[int], prefixes: int = 0) -> list[Prompt]:
        """``count`` pieces, each with a leading token that no other piece or prefix of any round has.

        ``prefixes`` is the number of shared prefixes of a round, which have leading tokens, too.

        Raises:
            UserError: the text is too short, or has too few distinct tokens.
        """
        first = self.round * count
        if first + count + (self.round + 1) * prefixes > len(self.leads):
            raise UserError(
                f"only {len(self.leads)} distinct prompts can be made",
                where="num_prompts",
                fix="ask for fewer",
            )
        places = self._places([self.seed, self.round, 1], lengths)
        return [
            (int(lead), *self.ids[place + 1 : place + length])
            for lead, place, length in zip(self.leads[first : first + count], places, lengths, strict=True)
        ]

    def prefixes(self, count: int, length: int) -> list[Prompt]:
        """Shared prefixes of ``length`` tokens; their leading tokens are taken from the end of the order."""
        if not length:
            return [()] * count
        places = self._places([self.seed, self.round, 4], [length] * count)
        last = len(self.leads) - 1 - self.round * count
        return [
            (int(self.leads[last - i]), *self.ids[place + 1 : place + length])
            for i, place in enumerate(places)
        ]

    def block(self, number: int, length: int) -> Prompt:
        """The block of a trace with hash ``number``: the first two tokens spell the number, text follows."""
        count = len(self.leads)
        digits = [int(self.leads[(number + self.round) % count]), int(self.leads[number // count % count])]
        (place,) = self._places([self.seed, self.round, 3, number], [length])
        return tuple([*digits, *self.ids[place + 2 : place + length]][:length])

    def _places(self, seed: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Random starts of pieces in the text."""
        longest = max(lengths)
        if len(self.ids) < longest:
            raise UserError(
                f"the text has {len(self.ids)} tokens, a prompt needs {longest}", where="input_len"
            )
        generator = np.random.default_rng(list(seed))
        if len(set(lengths)) == 1:
            return [int(at) for at in generator.integers(0, len(self.ids) - longest + 1, len(lengths))]
        return [int(generator.integers(0, len(self.ids) - length + 1)) for length in lengths]


def with_prefixes(
    source: PromptSource, count: int, length: int, prefix_len: int, prefixes: int
) -> list[Prompt]:
    """Prompts of ``prefix_len + length`` tokens; prompt i begins with prefix i modulo ``prefixes``."""
    shared = source.prefixes(prefixes, prefix_len) if prefix_len else [()]
    pieces = source.own(count, [length] * count, len(shared) if prefix_len else 0)
    return [(*shared[i % len(shared)], *piece) for i, piece in enumerate(pieces)]


def of_trace(source: PromptSource, rows: Sequence[TraceRow], scale: float) -> list[Prompt]:
    """Prompts of the rows' scaled lengths, with blocks of text by hash; a piece of its own where no hash covers."""
    size = block_len(scale)
    scaled = [row.scaled(scale) for row in rows]
    shared = [tuple(token for i in row.hash_ids for token in source.block(i, size)) for row in scaled]
    bare = [max(0, row.input_len - len(prefix)) for row, prefix in zip(scaled, shared, strict=True)]
    pieces = iter(source.own(sum(map(bool, bare)), [n for n in bare if n]) if any(bare) else ())
    rests = [next(pieces) if n else () for n in bare]
    return [
        (*prefix, *rest)[: row.input_len] for row, prefix, rest in zip(scaled, shared, rests, strict=True)
    ]
