"""Messages between the server and the process for compiling grammars, and the frames of messages.

A frame is a 4-byte big-endian length and as many bytes of msgpack.
"""

from __future__ import annotations

import struct

import msgspec

from optkit.runtime.types import Constraint

HEADER = struct.Struct(">I")


class Tokens(msgspec.Struct, frozen=True):
    """The first message: the text of ``tokenizer.json``, and the width of the model's logits."""

    tokenizer_json: str
    vocab_size: int


class Verdict(msgspec.Struct, frozen=True):
    """The result for a constraint.

    Attributes:
        error: the reason of a refusal; None for a good constraint.
        constraint: the good constraint, with a grammar in Lark.
    """

    error: str | None = None
    constraint: Constraint | None = None


def frame(message: Tokens | Constraint | Verdict) -> bytes:
    """The bytes of a message on the pipe."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body
