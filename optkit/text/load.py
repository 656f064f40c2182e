"""The transformers tokenizer of a model directory, for calibration, evaluation and benchmarks.

Serving uses ``optkit.text.tokenizer``, which needs no transformers.
"""

from __future__ import annotations

from typing import Any


def load_tokenizer(directory: str) -> Any:
    """The transformers tokenizer of a local model directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
