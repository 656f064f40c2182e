"""The text of quality measurements: the shipped text, or a file of the recipe's author.

A run reads a file once for each number of tokens. The hash of its content is part of the keys of finished steps:
another text means other measurements.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from optkit.errors import UserError
from optkit.evaluation.limits import LEAST_WINDOWS, WINDOW_TOKENS
from optkit.recipe.schema import SHIPPED, Recipe

MAX_TEXT_BYTES = 64 << 20
CHARACTERS = 16  # of a text, read for each token to score: a token has about four


def read_text(file: Path) -> str:
    """The content of a UTF-8 text file of at most ``MAX_TEXT_BYTES``.

    Raises:
        UserError: the file can't be read.
    """
    try:
        if file.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(
                f"larger than {MAX_TEXT_BYTES >> 20} MiB", where=str(file), fix="give a part of the text"
            )
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot be read: {reason}", where=str(file)) from error


def own_text(recipe: Recipe) -> str | None:
    """The text of the recipe's author; None for the shipped text."""
    source = recipe.evaluation.text
    return None if source == SHIPPED else read_text(Path(source))


def text_digest(recipe: Recipe) -> str | None:
    """A hash of ``own_text``; None for the shipped text."""
    text = own_text(recipe)
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def check_text(recipe: Recipe, directory: Path) -> None:
    """Refuse an evaluation text that is too short, by the tokenizer of the model in ``directory``.

    Raises:
        UserError: the file can't be read, or has fewer tokens than ``LEAST_WINDOWS`` windows.
    """
    from optkit.text.load import load_tokenizer

    text, needed = own_text(recipe), LEAST_WINDOWS * WINDOW_TOKENS
    if text is None:
        return
    found = len(
        load_tokenizer(str(directory))(text[: CHARACTERS * needed], add_special_tokens=False).input_ids
    )
    if found < needed:
        raise UserError(
            f"the evaluation text has {found} tokens, at least {needed} are needed",
            where=recipe.evaluation.text,
            fix="give a longer text, or leave it out for the shipped text",
        )
