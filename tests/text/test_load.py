"""The transformers tokenizer of a local directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.text.load import load_tokenizer
from tests.support.model_directory import save_model
from tests.support.tiny_tokenizer import fast_tokenizer


def test_load_tokenizer_gives_the_ids_of_the_tokenizer_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_model(tmp_path)))
    text = "Hello, größe!"
    assert tokenizer(text, add_special_tokens=False).input_ids == fast_tokenizer().encode(text).ids


@pytest.mark.parametrize("content", [None, "", "[]", '{"version": "1.0"}'])
def test_load_tokenizer_names_the_directory_when_the_file_is_missing_or_damaged(
    tmp_path: Path, content: str | None
) -> None:
    file = save_model(tmp_path) / "tokenizer.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match="the tokenizer can't be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.where == str(tmp_path)
