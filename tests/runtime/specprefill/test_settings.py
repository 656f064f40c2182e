"""The choice of a request crosses the process border, and is checked there."""

from __future__ import annotations

import msgspec
import pytest

from optkit.runtime.specprefill.settings import SpecPrefill
from optkit.runtime.types import EngineRequest, SamplingParams


def test_a_request_keeps_the_choice_on_the_pipe() -> None:
    choice = SpecPrefill(enabled=True, keep_pct=0.25)
    sent = EngineRequest(
        request_id="a",
        prompt_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        arrival=0.0,
        specprefill=choice,
    )
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineRequest)
    assert received == sent and received.specprefill == choice


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"keep_pct": share}), type=SpecPrefill)
