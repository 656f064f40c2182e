"""Proposers of tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from optkit.kernels.cpu import native
from optkit.kernels.cpu.decode_steps import TokenPairs
from optkit.runtime.sampling.proposer import Lengths, StepTime
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.types import EngineRequest, Request, SamplingParams, ScheduledRequest

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


class EveryStep:
    """The part of a proposer that looks for guesses in every step, and learns no times."""

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        pass

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        return 1

    def watched(self, requests: Sequence[Request]) -> Sequence[Sequence[TokenPairs]]:
        return ()


class Eager(Lengths):
    """As many as allowed, always."""

    def choose(self, sequences: Sequence[Request], seconds_per_token: float) -> list[int]:
        return [self.longest] * len(sequences)


def sequence(ids: list[int]) -> Request:
    request = EngineRequest(
        request_id="r", prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=1), arrival=0.0
    )
    return Request(request, list(ids))


class Untimed(TreeSpeculator):
    """Trees by the prices of the cost model: measured times would change from run to run."""

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        pass
