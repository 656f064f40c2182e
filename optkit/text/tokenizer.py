"""Text to token ids and back, from the files of a Hugging Face directory.

Only the Rust ``tokenizers`` library is used. Importing transformers takes seconds, and a restarted server should be
ready before the weights are loaded. Files read:

- ``tokenizer.json``: the tokenizer;
- ``tokenizer_config.json``: special tokens, and ``chat_template`` when there is no ``chat_template.jinja``;
- ``generation_config.json``, ``config.json``: the ids that end an answer, and the number of rows of the vocabulary.

Ids equal the ids of ``AutoTokenizer`` for models with a complete ``tokenizer.json``, as written by
``save_pretrained``. A special token spelled out in a message becomes the special token, as in
``apply_chat_template``: the author of the messages could also write the markers of the template.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from optkit.errors import UserError
from optkit.text.chat_template import ChatTemplate
from optkit.text.detokenizer import Detokenizer
from optkit.text.token_text import TokenTexts

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encode prompts and decode answers.

    Args:
        fast: the Rust tokenizer.
        chat_template: None for a base model without chat messages.
        eos_ids: ids that end an answer.
        vocab_size: rows of the model's embedding; ids at or above the size are refused.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        chat_template: ChatTemplate | None = None,
        eos_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast, self.chat_template = fast, chat_template
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.vocab_size = vocab_size or fast.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_directory(cls, directory: Path, chat_template: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory or an artifact.

        Args:
            chat_template: a file with the template, in the place of the model's.

        Raises:
            UserError: a file is missing or broken.
        """
        fast = _load_fast(directory / "tokenizer.json")
        config = _load_json(directory / "tokenizer_config.json")
        special = special_tokens(config)
        source = read_template(chat_template) if chat_template else _template_source(directory, config)
        template = ChatTemplate(source, special) if source is not None else None
        model_config = _load_json(directory / "config.json")
        eos_ids = _eos_ids(directory, model_config, fast.token_to_id(special.get("eos_token", "")))
        return cls(fast, template, eos_ids, _vocab_size(model_config))

    def to_json(self) -> str:
        """The text of a ``tokenizer.json`` of this tokenizer."""
        return self._fast.to_str()

    @cached_property
    def longest_token(self) -> int:
        """Upper bound of the bytes of a token: a text of N bytes has at least N / longest_token tokens."""
        return max((len(token.encode()) for token in self._fast.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Bytes of single tokens, for logprobs."""
        return TokenTexts(self._fast)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``, by default without special tokens; a broken character shows as U+FFFD."""
        return self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._fast.token_to_id(token)

    def token(self, token_id: int) -> str:
        """The name of a token in the vocabulary; "" for an id without a token."""
        return self._fast.id_to_token(token_id) or ""

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of ``word`` at the beginning of a text and after a space, as far as they differ."""
        found = [self.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]
        return [tuple(ids) for i, ids in enumerate(found) if ids and ids not in found[:i]]

    def detokenizer(self, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """A new incremental decoder; of special tokens to skip, those in ``shown`` have their text all the same."""
        if not (skip_special_tokens and shown):
            return Detokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens))
        hidden = self.token_texts.special.difference(shown)
        return Detokenizer(
            lambda ids: self.decode([i for i in ids if i not in hidden], skip_special_tokens=False)
        )

    def special_ids(self, names: Iterable[str]) -> frozenset[int]:
        """The special tokens among ``names``."""
        found = map(self.token_id, names)
        return frozenset(i for i in found if i is not None and i in self.token_texts.special)


# -- reading the directory --------------------------------------------------------------------------


def _load_fast(path: Path) -> FastTokenizer:
    if not path.is_file():
        fix = "save it with AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
        raise UserError("tokenizer.json is missing", where=str(path.parent), fix=fix)
    try:
        return FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        fix = "download or copy it again"
        raise UserError(f"not a tokenizer: {error!s:.200}", where=str(path), fix=fix) from error


def _load_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; an absent file is an empty object."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("not a JSON file", where=str(path)) from error
    if not isinstance(data, dict):
        raise UserError("the file must hold a JSON object", where=str(path))
    return data


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and further special tokens as plain strings; older files write objects."""
    found = {}
    for name in SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def read_template(file: Path) -> str:
    """The text of a chat template.

    Raises:
        UserError: there is no such file, or no text in it.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the chat template cannot be read", where=str(file)) from error
    if not text.strip():
        raise UserError("the chat template is empty", where=str(file))
    return text


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """The chat template: the file before the key in the configuration, and among several templates ``default``."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _eos_ids(directory: Path, model_config: dict[str, Any], eos_token: int | None) -> list[int]:
    """The ids that end an answer: the tokenizer's end token and ``eos_token_id`` of the generation or model config."""
    listed = _load_json(directory / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = model_config.get("eos_token_id")
    ids = [*(listed if isinstance(listed, list) else [listed]), eos_token]
    return [value for value in ids if isinstance(value, int) and not isinstance(value, bool) and value >= 0]


def _vocab_size(model_config: dict[str, Any]) -> int | None:
    for config in (model_config, model_config.get("text_config")):
        if isinstance(config, dict) and isinstance(config.get("vocab_size"), int):
            return config["vocab_size"]
    return None
