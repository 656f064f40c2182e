"""A small vocabulary for constraints, and engines that have it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from optkit.runtime.engine import Engine
from optkit.runtime.structured.compiler import Grammars
from optkit.runtime.types import Constraint, EngineRequest, SamplingParams, TokenOutput
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
    """The first ``size`` of ``TOKENS``, encoded from the left by the longest."""

    eos_token_id, bos_token_id = END, None
    special_token_ids = (END,)

    def __init__(self, size: int) -> None:
        self.tokens = TOKENS[:size]

    def __call__(self, text: bytes | str) -> list[int]:
        return encode(text.decode() if isinstance(text, bytes) else text, len(self.tokens))


def encode(text: str, size: int = SIZE) -> list[int]:
    """The tokens of ``text``, the longest first."""
    ids: list[int] = []
    rest = text.encode()
    while rest:
        fitting = (i for i in range(size) if rest.startswith(TOKENS[i]))
        ids.append(max(fitting, key=lambda i: len(TOKENS[i])))
        rest = rest[len(TOKENS[ids[-1]]) :]
    return ids


def decode(ids: Iterable[int]) -> str:
    return b"".join(TOKENS[i] for i in ids).decode()


@functools.cache
def vocabulary(size: int = SIZE) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Ascii(size)), n_vocab=size)


def constrained_engine(**options: object) -> Engine:
    """A ``fake_engine`` over ``TOKENS``."""
    engine = fake_engine(options={"vocab_size": SIZE, "max_model_len": 256, "num_blocks": 256} | options)
    engine.grammars = Grammars(vocabulary)
    return engine


def sampling(constraint: Constraint | None, **fields: object) -> SamplingParams:
    """Sampling parameters that end at ``END``."""
    defaults: dict[str, object] = {"max_tokens": 60, "temperature": 1.0, "seed": 1, "stop_token_ids": (END,)}
    return SamplingParams(constraint=constraint, **defaults | fields)  # type: ignore[arg-type]


def texts(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[str]:
    """The answers as text."""
    return [decode(ids) for ids in engine.generate(prompts, params)]


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[TokenOutput]]:
    """The outputs of ``requests``, by name, until all have ended."""
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs
