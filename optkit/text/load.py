"""The transformers tokenizer of a model directory, for calibration, evaluation and benchmarks.

Serving uses ``optkit.text.tokenizer``, which needs no transformers.
"""

from __future__ import annotations

from typing import Any

from optkit.errors import UserError


def load_tokenizer(directory: str) -> Any:
    """The transformers tokenizer of a local model directory.

    Raises:
        UserError: a file of the tokenizer is missing or damaged.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the tokenizer can't be loaded: {type(error).__name__}: {reason}",
            where=directory,
            fix="a model needs a whole tokenizer.json, or the files that transformers makes one from",
        ) from error
