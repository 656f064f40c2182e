"""Files of a model directory that describe text: tokenizer, chat template, licence.

``optkit serve`` and other readers of an artifact read ``tokenizer.json``. Older checkpoints have the vocabulary alone
(OPT: ``vocab.json`` and ``merges.txt``), and transformers makes a ``tokenizer.json`` of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from optkit.checkpoint.validate import MAX_JSON_BYTES
from optkit.errors import UserError
from optkit.text.tokenizer import Tokenizer
from optkit.untrusted_json import parse_json, read_bounded

TOKENIZER = "tokenizer.json"
VOCABULARIES = ("vocab.json", "tokenizer.model")  # of tokenizers without TOKENIZER
COPIED = (
    TOKENIZER,
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "README.md",
)
NO_TOKENIZER = (
    f"the model has no {TOKENIZER}, and transformers can't make one: optkit serve will refuse the artifact"
)


def write_text_files(source: Path, directory: Path) -> None:
    """Copy the files of the model directory ``source`` to ``directory``, and make a missing ``tokenizer.json``."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    template = source / "chat_template.json"  # of a multimodal processor
    if template.is_file() and not (source / "chat_template.jinja").is_file():
        write_template(template, directory / "chat_template.jinja")
    if not (source / TOKENIZER).is_file() and (made := tokenizer_of_vocabulary(source)) is not None:
        made.save(str(directory / TOKENIZER))


def write_template(file: Path, out: Path) -> None:
    """Write the chat template in the JSON file of a processor to ``out``; nothing where the file has none."""
    source = parse_json(read_bounded(file, MAX_JSON_BYTES), str(file)).get("chat_template")
    if isinstance(source, str):
        out.write_text(source, "utf-8")


def tokenizer_of_vocabulary(directory: Path) -> Any | None:
    """The ``tokenizers.Tokenizer`` that transformers makes of the vocabulary in ``directory``; None where it can't."""
    from optkit.text.load import load_tokenizer

    if not any((directory / name).is_file() for name in VOCABULARIES):
        return None  # transformers would make an empty one for some types of models
    try:
        return getattr(load_tokenizer(str(directory)), "backend_tokenizer", None)
    except UserError:
        return None


def notes_on_tokenizer(directory: Path) -> tuple[str, ...]:
    """A sentence for users where the artifact of the model in ``directory`` will have no ``tokenizer.json``."""
    if (directory / TOKENIZER).is_file() or tokenizer_of_vocabulary(directory) is not None:
        return ()
    return (NO_TOKENIZER,)


def refuse_broken_tokenizer(directory: Path) -> None:
    """Refuse a tokenizer unreadable to ``optkit serve``.

    Raises:
        UserError: with the file.
    """
    if (directory / TOKENIZER).is_file():
        Tokenizer.from_directory(directory)
