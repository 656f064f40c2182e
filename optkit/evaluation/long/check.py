"""The check of a recipe's ``max_long_loss``, before hours of work."""

from __future__ import annotations

from pathlib import Path

from optkit.recipe.schema import Recipe


def check_long(recipe: Recipe, directory: Path, context: int | None) -> None:
    """Refuse lengths without room for the documents, by the tokenizer of the model in ``directory``.

    Args:
        context: tokens that the model takes, or None where unknown; longer documents are cut to the context.

    Raises:
        UserError: the shortest documents are too short.
    """
    from optkit.evaluation.long.tasks import documents
    from optkit.text.load import load_tokenizer

    if recipe.bounds_long_loss:
        shortest = min(recipe.evaluation.long_lengths)
        documents(load_tokenizer(str(directory)), [min(shortest, context or shortest)])
