"""The text of quality measurements."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.evaluation import text as texts
from optkit.evaluation.text import check_text, own_text, read_text, text_digest
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe
from optkit.text import corpora
from tests.support.model_directory import save_model


def with_text(file: Path) -> Recipe:
    return load_recipe("baseline", {"evaluation.text": str(file)})


def test_the_shipped_text_has_no_digest_and_is_never_too_short(tmp_path: Path) -> None:
    recipe = load_recipe("baseline")
    assert own_text(recipe) is None and text_digest(recipe) is None
    check_text(recipe, tmp_path / "no model is needed")


def test_the_digest_of_an_own_text_is_that_of_its_content(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("grüße")
    recipe = with_text(file)
    assert own_text(recipe) == "grüße"
    assert text_digest(recipe) == hashlib.sha256("grüße".encode()).hexdigest()
    file.write_text("grüße!")
    assert text_digest(recipe) != hashlib.sha256("grüße".encode()).hexdigest()


def test_an_own_text_needs_two_windows(tmp_path: Path) -> None:
    model, file = save_model(tmp_path / "tiny"), tmp_path / "own.txt"
    file.write_text("abc")
    with pytest.raises(
        UserError, match=r"own\.txt: the evaluation text has \d tokens, at least 1024 are needed"
    ):
        check_text(with_text(file), model)
    file.write_text(corpora.load_text("evaluation")[:8000])
    check_text(with_text(file), model)


def test_a_file_that_cannot_be_read_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_text(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_text(tmp_path / "latin")
    monkeypatch.setattr(texts, "MAX_TEXT_BYTES", 2)
    with pytest.raises(UserError, match="larger than"):
        read_text(tmp_path / "latin")
