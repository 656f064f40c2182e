"""Calibration text: the samples for passes that calibrate.

A recipe names a source of text for each pass. The shipped text needs no network and has no part in common with the
text for measuring quality. Plain text is cut into windows of ``length`` tokens. A JSONL file has a sample in each line,
``{"text": ...}`` or ``{"messages": [...]}``; the first ``length`` tokens of a sample count. ``seed`` alone decides the
choice and the order of windows or lines. Fewer samples than the recipe's number are an error: with a tenth of the text
a quantizer would still give an answer, but a worse answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from optkit.errors import UserError

SHIPPED = "shipped"
MAX_FILE_BYTES = 1 << 30
MIN_SAMPLE_TOKENS = 8  # tokens: shorter samples are not typical inputs of a layer


class Calibration(BaseModel):
    """The text to calibrate on: the ``calibration`` option of passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(default=SHIPPED, description="'shipped', or a text or .jsonl file")
    samples: int = Field(
        default=64, ge=1, le=1 << 16, description="windows of text, or lines of a JSONL file"
    )
    length: int = Field(
        default=512,
        ge=MIN_SAMPLE_TOKENS,
        le=1 << 17,
        description="tokens of a sample, at most the model's context",
    )
    seed: int = Field(
        default=0, ge=0, lt=1 << 32, description="decides which samples are taken, and their order"
    )
    chat_template: bool = Field(
        default=False,
        description="render samples with the model's chat template; text becomes a user's message",
    )

    def digest(self) -> str | None:
        """A hash of the file's content, which decides the outcome as the options do; None for the shipped text."""
        return None if self.source == SHIPPED else hashlib.sha256(read(self.source).encode()).hexdigest()


def calibration_windows(config: Calibration, directory: Path, max_length: int) -> list[list[int]]:
    """The samples as token ids, with a first BOS where the tokenizer of model ``directory`` adds BOS.

    Raises:
        UserError: the file can't be read, a line is not a sample, or there are too few.
    """
    from optkit.text.load import load_tokenizer

    tokenizer = load_tokenizer(str(directory))
    length = min(config.length, max_length)
    first = tokenizer("a").input_ids[:1]
    bos = first if first == [tokenizer.bos_token_id] else []

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    samples = records(config, directory)
    if samples is None:
        return pick(config, cut(encode(source_text(config)), length, bos))
    start = [] if config.chat_template else bos  # a template writes its own
    found = ([*start, *encode(sample)][:length] for sample in samples)
    return pick(config, [ids for ids in found if len(ids) >= MIN_SAMPLE_TOKENS])


def cut(ids: Sequence[int], length: int, bos: Sequence[int]) -> list[list[int]]:
    """Windows of ``length`` tokens without overlap; a shorter rest is dropped."""
    step = length - len(bos)
    return [[*bos, *ids[i : i + step]] for i in range(0, len(ids) - step + 1, step)]


def pick(config: Calibration, samples: list[list[int]]) -> list[list[int]]:
    """A choice of ``config.samples`` windows, by the seed."""
    if len(samples) < config.samples:
        raise UserError(
            f"calibration asks for {config.samples} samples of {config.length} tokens, and there are {len(samples)}",
            where=config.source,
            fix="give more text, or lower calibration.samples or calibration.length",
        )
    order = np.random.default_rng(config.seed).permutation(len(samples))
    return [samples[i] for i in order[: config.samples]]


# -- reading -----------------------------------------------------------------------------------------------


def source_text(config: Calibration) -> str:
    from optkit.text.corpora import load_text

    return load_text("calibration") if config.source == SHIPPED else read(config.source)


def read(source: str) -> str:
    """The content of a file of UTF-8 text."""
    path = Path(source)
    try:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise UserError("a calibration file of more than 1 GiB", where=source, fix="give a part of it")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        fix = f"give a text or .jsonl file, or '{SHIPPED}'"
        raise UserError(f"calibration text cannot be read: {error!s:.200}", where=source, fix=fix) from error


def records(config: Calibration, directory: Path) -> list[str] | None:
    """The texts of a JSONL file's lines, or a text rendered as a single message; None for text to be cut."""
    jsonl = config.source.endswith((".jsonl", ".ndjson"))
    if not jsonl and not config.chat_template:
        return None
    render = chat_renderer(directory) if config.chat_template else None
    if not jsonl:
        return [text_of({"text": part}, render, config.source) for part in paragraphs(source_text(config))]
    texts = []
    for number, line in enumerate(read(config.source).splitlines(), 1):
        if line.strip():
            texts.append(
                text_of(parsed(line, f"{config.source}:{number}"), render, f"{config.source}:{number}")
            )
    return texts


def paragraphs(text: str) -> list[str]:
    return [part for part in text.split("\n\n") if part.strip()]


def parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("not a line of JSON", where=where) from error
    if not isinstance(record, dict):
        raise UserError("a sample must be a JSON object", where=where, fix='such as {"text": "..."}')
    return record


def text_of(record: dict[str, Any], render: Callable[[list[Any]], str] | None, where: str) -> str:
    """The text of a sample, through the chat template where present."""
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str):
        return render([{"role": "user", "content": text}]) if render else text
    if not isinstance(messages, list) or not messages:
        raise UserError("a sample needs 'text' or 'messages'", where=where)
    if render is None:
        raise UserError(
            "messages need the chat template", where=where, fix="set calibration.chat_template: true"
        )
    return render(messages)


def chat_renderer(directory: Path) -> Callable[[list[Any]], str]:
    """Messages to text by the model's own template, which is tried in a sandboxed child first."""
    from optkit.text.chat_template import TemplateFailure
    from optkit.text.template_trial import check_template
    from optkit.text.tokenizer import Tokenizer

    template = Tokenizer.from_directory(directory).chat_template
    if template is None:
        fix = "set calibration.chat_template: false"
        raise UserError("the model has no chat template", where=str(directory), fix=fix)
    check_template(template)

    def render(messages: list[Any]) -> str:
        try:
            return template.render(messages, add_generation_prompt=False)
        except TemplateFailure as failure:
            raise UserError(f"{failure}", where="calibration messages") from failure

    return render
