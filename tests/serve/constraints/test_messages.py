"""Frames of the pipe."""

from __future__ import annotations

import io

from optkit.runtime.types import Constraint
from optkit.serve.constraints.child import read
from optkit.serve.constraints.messages import Tokens, frame


def test_messages_survive_the_pipe() -> None:
    constraint = Constraint("regex", "ä+", after="x", whitespace=" ?")
    pipe = io.BytesIO(frame(Tokens("{}", 3)) + frame(constraint))
    assert read(pipe, Tokens) == Tokens("{}", 3)
    assert read(pipe, Constraint) == constraint
    assert read(pipe, Constraint) is None
