"""Drafts with branches (arXiv 2305.09781): a step verifies several guesses for the same place.

The new tokens of a step are the last known token, the *root*, and the nodes of the tree in preorder. The KV of node i
is stored i places behind the root at any depth; attention looks at the depths (``reference.attention``). After
the step the KV of the right branch moves to the places of the tokens (``Move``), and the rest is overwritten later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DraftTree(tuple[int, ...]):
    """The guessed tokens of a tree in preorder, the likeliest branch first.

    Attributes:
        depths: of each token below the root, which has depth 0. The parent of a token is the last token before with
            a depth smaller by 1.
    """

    depths: tuple[int, ...]

    def __new__(cls, tokens: Sequence[int], depths: Sequence[int]) -> DraftTree:
        tree = super().__new__(cls, tokens)
        tree.depths = tuple(depths)
        return tree


def depths_of(draft: tuple[int, ...]) -> Sequence[int]:
    """The depth of each token of a draft, 1 after the last known token: of a tree or a chain."""
    return draft.depths if isinstance(draft, DraftTree) else range(1, len(draft) + 1)


def first_branch(draft: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of a draft's first branch."""
    count = 0
    for depth in depths_of(draft):
        if depth != count + 1:
            break
        count += 1
    return tuple(draft[:count])


def child(draft: tuple[int, ...], node: int, token: int) -> int | None:
    """The row of the child with ``token`` of the row ``node``, or None. Row 0 is the root, row i + 1 ``draft[i]``."""
    depths = depths_of(draft)
    parent = depths[node - 1] if node else 0
    for row in range(node, len(draft)):
        if depths[row] <= parent:
            break
        if depths[row] == parent + 1 and draft[row] == token:
            return row + 1
    return None


@dataclass(frozen=True)
class Move:
    """Copy the KV at the positions ``sources`` of a sequence to ``targets``, in order.

    ``table`` is the sequence's block table.
    """

    table: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]


def move_to_branch(table: Sequence[int], start: int, rows: Sequence[int]) -> Move:
    """The copies of the right tokens' KV to their places.

    Args:
        table: block table of the sequence.
        start: position of the root.
        rows: of the right tokens in the step, from the root on, which is row 0.
    """
    places = [(row, place) for place, row in enumerate(rows, 1) if row != place]
    return Move(table, [start + row for row, _ in places], [start + place for _, place in places])
