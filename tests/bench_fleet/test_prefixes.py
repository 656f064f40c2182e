"""Two ways to choose replicas over the same requests, on replicas in this process."""

from __future__ import annotations

from bench.fleet import prefixes
from bench.fleet.prefixes import side
from optkit.fleet.replica import Work
from tests.support.fleet import fleet, local, on_loop
from tests.support.serve_fakes import FakeEngine


@on_loop
async def test_every_prompt_is_answered_once_by_either_way() -> None:
    member = local(FakeEngine(), "0")
    prompts = [[1, 2, 3 + number] for number in range(9)]
    alone = await side(lambda request: member.generate(Work(request=request)), prompts, 3, "alone")
    async with fleet(FakeEngine(), FakeEngine()) as engine:
        routed = await side(engine.generate, prompts, 3, "routed")
    assert (alone.errors, routed.errors) == (0, 0)
    assert len(alone.ttfts) == len(routed.ttfts) == len(prompts)
    assert prefixes.MOST["ttft p50, ratio"] == 0.25
