"""A small vocabulary for constraints, and engines that have it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from optkit.runtime.engine import Engine
from optkit.runtime.structured.compiler import Grammars
from optkit.runtime.types import Constraint, SamplingParams
from tests.support.fakes import fake_engine

WORDS = [
    '{"',
    '": ',
    ', "',
    '": "',
    '"}',
    '", "',
    "name",
    "size",
    "true",
    "false",
    "null",
    "ab",
    "abc",
    "12",
    "  ",
]
TOKENS = [bytes([code]) for code in range(127)] + [b"<|end|>"] + [word.encode() for word in WORDS]
END = 127
SIZE = len(TOKENS)


class _Ascii:
    """ASCII characters and ``WORDS``, encoded from the left by the longest token."""

    eos_token_id, bos_token_id, tokens = END, None, TOKENS
    special_token_ids = (END,)

    def __call__(self, text: bytes | str) -> list[int]:
        return encode(text.decode() if isinstance(text, bytes) else text)


def encode(text: str) -> list[int]:
    """The tokens of ``text``, the longest first."""
    ids: list[int] = []
    rest = text.encode()
    while rest:
        best = max(
            (i for i, token in enumerate(TOKENS) if rest.startswith(token)), key=lambda i: len(TOKENS[i])
        )
        ids.append(best)
        rest = rest[len(TOKENS[best]) :]
    return ids


def decode(ids: Iterable[int]) -> str:
    return b"".join(TOKENS[i] for i in ids).decode()


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Ascii()), n_vocab=SIZE)


def constrained_engine(**options: object) -> Engine:
    """A ``fake_engine`` over ``TOKENS``."""
    engine = fake_engine(options={"vocab_size": SIZE, "max_model_len": 256, "num_blocks": 256} | options)
    engine.grammars = Grammars(vocabulary)
    return engine


def sampling(constraint: Constraint | None, **fields: object) -> SamplingParams:
    """Sampling parameters that end at ``END``."""
    defaults: dict[str, object] = {"max_tokens": 60, "temperature": 1.0, "seed": 1}
    return SamplingParams(constraint=constraint, stop_token_ids=(END,), **defaults | fields)  # type: ignore[arg-type]


def texts(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[str]:
    return [decode(ids) for ids in engine.generate(prompts, params)]
