"""Mutants by number: the seed, how many changes and which follow from the number alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz import file_mutations, graph_mutations
from tests.fuzz.contents import Contents
from tests.fuzz.graph_mutations import Mutation

TABLE: dict[Mutation, int] = graph_mutations.MUTATIONS | file_mutations.MUTATIONS
FEW = ((1, 60), (2, 30), (3, 10))  # changes of a mutant, and how often of a hundred

ATTEMPTS = 100


def mutant(number: int, seeds: Sequence[Contents]) -> tuple[Contents, list[str]]:
    """Mutant ``number``: its contents, and a line on each change."""
    dice = Random(number)
    contents = dice.choice(seeds).copy()
    (count,) = dice.choices([n for n, _ in FEW], [weight for _, weight in FEW])
    changes: list[str] = []
    for _ in range(ATTEMPTS):
        if len(changes) == count:
            break
        (mutation,) = dice.choices(list(TABLE), list(TABLE.values()))
        try:
            line = mutation(dice, contents)
        except (IndexError, KeyError, TypeError, AttributeError, ValueError):
            line = None  # an earlier change left nothing to change here
        if line is not None:
            changes.append(line)
    return contents, changes
