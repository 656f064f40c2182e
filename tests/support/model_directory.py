"""A Hugging Face directory for whole runs: a tiny model, by default a llama, and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.architectures import tiny_model
from tests.support.tiny_tokenizer import fast_tokenizer

VOCABULARY = 320


def save_model(directory: Path, name: str = "llama", **overrides: Any) -> Path:
    """Write the model, with ``overrides`` of its config, and the tokenizer to ``directory``."""
    tiny_model(name, vocab_size=VOCABULARY, max_position_embeddings=1024, **overrides).save_pretrained(
        directory
    )
    (directory / "tokenizer.json").write_text(fast_tokenizer().to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
