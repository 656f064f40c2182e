"""Calibration text: which samples, from where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from optkit.calibration.samples import Calibration, calibration_windows
from optkit.errors import UserError
from tests.support.tiny_tokenizer import fast_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(fast_tokenizer().to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def samples(directory: Path, max_length: int = 512, **options: object) -> list[list[int]]:
    return calibration_windows(Calibration.model_validate(options), directory, max_length)


def text(directory: Path, ids: list[int]) -> str:
    from optkit.text.load import load_tokenizer

    return str(load_tokenizer(str(directory)).decode(ids))


def test_the_shipped_text_in_windows(directory: Path) -> None:
    found = samples(directory, samples=5, length=32)
    assert [len(window) for window in found] == [32] * 5
    assert len({tuple(window) for window in found}) == 5


def test_the_seed_decides_which_and_in_what_order(directory: Path) -> None:
    first, again, other = (samples(directory, samples=5, length=32, seed=s) for s in (1, 1, 2))
    assert first == again != other


def test_samples_are_no_longer_than_the_context(directory: Path) -> None:
    assert {len(w) for w in samples(directory, 24, samples=3, length=512)} == {24}


def test_a_text_file(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("abcdefghij" * 10)
    found = samples(directory, source=str(file), samples=10, length=10)
    assert {text(directory, window) for window in found} == {"abcdefghij"}


def test_lines_of_jsonl_are_samples_of_their_own_length(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"text": "a" * 12}, {"text": "b" * 300}, {"text": "tiny"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = samples(directory, source=str(file), samples=2, length=100)
    assert sorted(text(directory, window) for window in found) == ["a" * 12, "b" * 100]


def test_messages_go_through_the_chat_template(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    (found,) = samples(directory, source=str(file), samples=1, chat_template=True)
    assert text(directory, found) == "<|im_start|>user\nhello<|im_end|>\n"
    file.write_text(json.dumps({"text": "plain words"}))
    (found,) = samples(directory, source=str(file), samples=1, chat_template=True)
    assert text(directory, found) == "<|im_start|>user\nplain words<|im_end|>\n"


def test_too_few_samples_are_an_error_with_both_numbers(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * 350)
    with pytest.raises(
        UserError, match=r"short.txt: calibration asks for 64 samples of 100 tokens, and there are 3"
    ):
        samples(directory, source=str(file), length=100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "mine.jsonl:2: not a line of JSON"),
        ("[1]", "mine.jsonl:2: a sample must be a JSON object"),
        ('{"prompt": "x"}', "mine.jsonl:2: a sample needs 'text' or 'messages'"),
        ('{"messages": []}', "mine.jsonl:2: a sample needs"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "mine.jsonl:2: messages need the chat template"),
        ("[" * 100_000, "mine.jsonl:2: not a line of JSON"),
    ],
)
def test_a_bad_line_is_named(directory: Path, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"text": "fine and long enough"}) + "\n" + line + "\n")
    with pytest.raises(UserError) as error:
        samples(directory, source=str(file), samples=1)
    assert message in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00bad"])
def test_a_file_that_is_not_text(directory: Path, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match="calibration text cannot be read"):
        samples(directory, source=str(file))


def test_messages_the_template_refuses(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}]}))
    with pytest.raises(UserError, match="calibration messages: no tools"):
        samples(directory, source=str(file), samples=1, chat_template=True)


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"length": 1}, {"seed": -1}, {"sample": 3}, {"source": 7}]
)
def test_options_are_bounded(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Calibration.model_validate(options)


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    assert Calibration().digest() is None
    file.write_text("one")
    first = Calibration(source=str(file)).digest()
    file.write_text("two")
    assert Calibration(source=str(file)).digest() != first
