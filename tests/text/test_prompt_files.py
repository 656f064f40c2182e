"""Prompts in files, and their tokens in every request that goes on from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.text.chat_template import ChatTemplate
from optkit.text.prompt_files import KnownPrompt, prefix_ids, read_prompts
from tests.support.chat_templates import QWEN
from tests.support.tiny_tokenizer import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def test_files_of_text_and_of_messages(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, text in (("s.txt", "Be kind."), ("m.json", json.dumps(MESSAGES)), ("a/s.txt", "Be brief.")):
        (tmp_path / name).write_text(text)
    found = read_prompts([str(tmp_path / name) for name in ("s.txt", "m.json", "a/s.txt")])
    assert [prompt.name for prompt in found] == ["1-s.txt", "m.json", "3-s.txt"]
    assert found[0].messages == MESSAGES[:1] and found[1].messages == MESSAGES


def test_names_differ_also_from_those_that_are_made(tmp_path: Path) -> None:
    files = ("s.txt", "1-s.txt", "a/s.txt")
    (tmp_path / "a").mkdir()
    for name in files:
        (tmp_path / name).write_text("Be kind.")
    found = read_prompts([str(tmp_path / name) for name in files])
    assert [prompt.name for prompt in found] == ["1-s.txt", "2-1-s.txt", "3-s.txt"]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.json", "{", "not valid JSON"),
        ("x.json", '[{"role": "pirate", "content": "x"}]', "no list of messages"),
        ("x.json", "[]", "no list of messages"),
        ("x.json", '[{"role": "user", "content": 7}]', "no list of messages"),
        ("x.txt", "  ", "empty"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=reason) as caught:
        read_prompts([str(tmp_path / name)])
    assert caught.value.where == str(tmp_path / name)


def test_the_prefix_begins_every_conversation() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = ChatTemplate(QWEN, {})
    for messages, more in ((MESSAGES[:1], [MESSAGES[1]]), ([], MESSAGES[1:]), (MESSAGES, [])):
        ids = prefix_ids(tokenizer, KnownPrompt("x", messages))
        whole = tokenizer.encode(tokenizer.chat_template.render(messages + more), add_special_tokens=False)
        assert ids and whole[: len(ids)] == ids
    refusing = ChatTemplate("{{ raise_exception('no system here') }}", {})
    tokenizer.chat_template = refusing
    with pytest.raises(UserError, match="no system here"):
        prefix_ids(tokenizer, KnownPrompt("x", MESSAGES))
    tokenizer.chat_template = None
    assert prefix_ids(tokenizer, KnownPrompt("x", [])) == []
    ids = prefix_ids(tokenizer, KnownPrompt("x", MESSAGES[:1]))
    assert tokenizer.encode("Be kind. And brief.")[: len(ids)] == ids
