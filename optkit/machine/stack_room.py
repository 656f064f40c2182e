"""Room on CPython's stack for all calls under a function.

CPython from 3.11 on keeps the frames of Python functions in chunks of 16 KB. A call whose frame does not fit the
current chunk maps a new chunk, and the return from the call unmaps the chunk. A loop right below the end of a chunk
pays for a system call, page faults and an interrupt of other cores in each call. A decode step of a float model with
120 layers took 35 ms instead of 24 in some processes, by chance of the depth of the stack.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

SLOT_BYTES = 8
OF_A_PROCESS, OF_A_STEP = 128 << 10, 64 << 10  # bytes of a frame; a step fits the chunk of a process, 256 KB

Given = ParamSpec("Given")
Result = TypeVar("Result")


def with_stack_room(frame_bytes: int) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: the function with room for ``frame_bytes`` of nested calls on the stack of its thread.

    Each call of the result maps a chunk, or none where the current chunk has ``frame_bytes`` left. Unwritten pages of
    a chunk take no memory. What a coroutine or generator function does later runs outside the room.
    """

    def decorated(function: Callable[Given, Result]) -> Callable[Given, Result]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        # A frame has room for the deepest stack of its expressions: a large number makes the frame large.
        room = call.__code__.replace(co_stacksize=frame_bytes // SLOT_BYTES)
        roomy = types.FunctionType(room, call.__globals__, function.__name__, None, call.__closure__)
        return cast("Callable[Given, Result]", functools.wraps(function)(roomy))

    return decorated
