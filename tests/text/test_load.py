"""The transformers tokenizer of a local directory."""

from __future__ import annotations

from pathlib import Path

from optkit.text.load import load_tokenizer
from tests.support.model_directory import save_model
from tests.support.tiny_tokenizer import fast_tokenizer


def test_load_tokenizer_gives_the_ids_of_the_tokenizer_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_model(tmp_path)))
    text = "Hello, größe!"
    assert tokenizer(text, add_special_tokens=False).input_ids == fast_tokenizer().encode(text).ids
