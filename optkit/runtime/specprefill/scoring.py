"""A prompt on the way to scores, in the queue of the scheduler's process, which may run without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optkit.runtime.types import EngineRequest, Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Scoring:
    """A prompt on the way to scores.

    Attributes:
        count: tokens to keep.
        part: the prompt as a request of the scorer's runner.
        queries: [up to QUERIES, columns] float32 of each layer, of the last tokens so far.
        keys: [n, columns] float32 of each layer, for each step so far.
    """

    count: int
    part: Request
    queries: list[Tensor] = field(default_factory=list)
    keys: list[list[Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Sequence[int], count: int) -> Scoring:
        """The beginning, for ``prompt``, of which about ``count`` tokens are to be kept."""
        sampling = SamplingParams(max_tokens=1)
        shadow = EngineRequest(request_id="", prompt_ids=(), sampling=sampling, arrival=0.0)
        return cls(count, Request(shadow, list(prompt)))
