"""Occurrences of the last tokens of an answer in earlier text, for guesses of what comes next.

The question of a suffix tree (SuffixDecoding, arXiv 2411.04975) is answered by the chains of LZ77: the places of each
pair of tokens form a list, newest first, in an integer a token. The newest ``MOST`` places are compared backwards
with the end of the answer, so each occurrence comes with the number of matching tokens. A token costs a microsecond
to add and some 200 bytes, a text 32 KB more.
"""

from __future__ import annotations

from collections.abc import Sequence

from optkit.kernels.cpu.decode_steps import TokenPairs

MOST = 8  # occurrences that are looked at, the newest
LONGEST = 16  # tokens that are compared
NOWHERE, END = -1, -1  # no place; stands between texts

Place = tuple[
    int, int
]  # position of the token after an occurrence, and the number of tokens that match before it


class Occurrences:
    """The pairs of tokens of a growing text, with places.

    Attributes:
        pairs: the pairs for which ``find`` gives a place.
    """

    def __init__(self) -> None:
        self.pairs = TokenPairs()
        self.ids: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}  # a pair -> the position after its newest occurrence
        self._before: list[int] = []  # position -> the position after the occurrence of the same pair before

    def extend(self, ids: Sequence[int]) -> None:
        """Append ``ids``. The last pair of the text becomes known with the next token."""
        start = len(self.ids)
        self.ids += ids
        for position in range(start, len(self.ids)):
            place = NOWHERE
            if position > 1:
                pair = (self.ids[position - 2], self.ids[position - 1])
                place = self._newest.get(pair, NOWHERE)
                self._newest[pair] = position
            self._before.append(place)
        self.pairs.add_all(pairs_inside(self.ids[max(start - 2, 0) :]))

    def find(self, tail: Sequence[int]) -> list[Place]:
        """The places of the last tokens of ``tail`` in the text, with a next token, the newest first."""
        found = list[Place]()
        place = self._newest.get((tail[-2], tail[-1]), NOWHERE) if len(tail) > 1 else NOWHERE
        while place != NOWHERE and len(found) < MOST:
            if self.ids[place] != END:
                found.append((place, self._matching(place, tail)))
            place = self._before[place]
        return found

    def _matching(self, place: int, tail: Sequence[int]) -> int:
        """The number of tokens before ``place`` equal to the last of ``tail``, up to ``LONGEST``."""
        ids, count, most = self.ids, 2, min(LONGEST, place, len(tail))
        while count < most and ids[place - 1 - count] == tail[-1 - count]:
            count += 1
        return count


def pairs_inside(ids: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of neighbours in ``ids``, except for pairs without a next token in the same text."""
    following = zip(ids, ids[1:], ids[2:], strict=False)
    return [(first, second) for first, second, third in following if END not in (first, second, third)]
