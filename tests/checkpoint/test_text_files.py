"""Text files of an artifact: a tokenizer made of an older vocabulary has the ids of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

from optkit.checkpoint.text_files import (
    NO_TOKENIZER,
    notes_on_tokenizer,
    refuse_broken_tokenizer,
    write_text_files,
)
from optkit.errors import UserError
from optkit.text.tokenizer import Tokenizer
from tests.support.model_directory import save_model

TEXT = "the old man and the sea, the sun and the rain; an old man sat by the sea and the sun was on the sea"
CONFIG = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "bos_token_id": 2, "eos_token_id": 2}
TOKENIZER_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_bos_token": True,
    "bos_token": "</s>",
    "eos_token": "</s>",
}


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A directory as OPT's: ``vocab.json`` and ``merges.txt``, no ``tokenizer.json``."""
    directory = tmp_path / "older"
    directory.mkdir()
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT] * 4, vocab_size=320, special_tokens=["<s>", "<pad>", "</s>", "<unk>"])
    trained.save_model(str(directory))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return directory


def written(source: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "artifact"
    directory.mkdir()
    write_text_files(source, directory)
    shutil.copyfile(source / "config.json", directory / "config.json")
    return directory


def test_older_vocabulary_becomes_a_tokenizer_with_the_ids_of_transformers(
    older: Path, tmp_path: Path
) -> None:
    found = Tokenizer.from_directory(written(older, tmp_path))
    expected = AutoTokenizer.from_pretrained(older, local_files_only=True)
    for text in (TEXT, "rain\n\nby  the café", ""):
        assert list(found.encode(text)) == expected(text).input_ids
    assert notes_on_tokenizer(older) == ()


def test_tokenizer_of_the_model_stays_as_it_is(older: Path, tmp_path: Path) -> None:
    (older / "tokenizer.json").write_text("{}")
    assert (written(older, tmp_path) / "tokenizer.json").read_text() == "{}"
    assert notes_on_tokenizer(older) == ()


@pytest.mark.parametrize("damage", ["none", "unreadable"])
def test_model_without_a_tokenizer_is_noted(older: Path, tmp_path: Path, damage: str) -> None:
    (older / "merges.txt").unlink()
    if damage == "none":
        (older / "vocab.json").unlink()
    else:
        (older / "vocab.json").write_text("[")
    assert not (written(older, tmp_path) / "tokenizer.json").exists()
    assert notes_on_tokenizer(older) == (NO_TOKENIZER,)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "none"}}'])
def test_a_tokenizer_that_can_not_be_served_is_refused(older: Path, text: str) -> None:
    refuse_broken_tokenizer(older)
    (older / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer: .*download or copy it again"):
        refuse_broken_tokenizer(older)


def test_optimize_refuses_a_broken_tokenizer_before_anything_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.pipeline.driver import Pipeline, optimize

    monkeypatch.setattr(Pipeline, "run", lambda self: pytest.fail("the run began"))
    (save_model(tmp_path / "m") / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="not a tokenizer"):
        optimize(str(tmp_path / "m"), "baseline", tmp_path / "out")
