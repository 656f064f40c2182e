"""An update replaces every replica with no failed request, and a failing check brings the old version back."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet.local_fleet import LocalControl, MockFleet
from optkit.fleet.mock import MockModel
from optkit.fleet.rollout import (
    Add,
    Drain,
    Judge,
    Patience,
    Phase,
    Remove,
    ReplicaView,
    Rollout,
    SelfTest,
    Verdict,
    VersionSplit,
    roll,
)
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.types import FinishReason, TokenOutput
from tests.fleet.test_failover import asked, run, tokens

GOOD = Verdict(True)


class PlainFleet:
    """Replicas as numbers, for the state machine alone: drains and starts take a random number of steps."""

    def __init__(self, count: int, dice: random.Random) -> None:
        self.views = {f"o{i}": ReplicaView(f"o{i}", "old", True) for i in range(count)}
        self.dice, self.made = dice, 0
        self.fewest, self.most = count, count

    def perform(self, action: object) -> None:
        match action:
            case Add(version):
                self.made += 1
                self.views[f"n{self.made}"] = ReplicaView(f"n{self.made}", version, False)
            case Drain(name):
                view = self.views[name]
                self.views[name] = view._replace(
                    is_draining=True, num_requests=self.dice.randrange(3) * view.is_ready
                )
            case Remove(name):
                assert self.views[name].num_requests == 0 and self.views[name].is_draining
                del self.views[name]

    def pass_time(self) -> None:
        for name, view in self.views.items():
            if self.dice.random() < 0.5:
                self.views[name] = view._replace(is_ready=True, num_requests=max(0, view.num_requests - 1))
        ready = [view for view in self.views.values() if view.is_ready and not view.is_draining]
        self.fewest, self.most = min(self.fewest, len(ready)), max(self.most, len(self.views))


def drive(
    rollout: Rollout, fleet: PlainFleet, verdicts: Sequence[Verdict], alarm_at: int | None = None
) -> list[object]:
    """All actions until the end."""
    left, actions = list(verdicts), list[object]()
    for step in range(400):
        if step == alarm_at:
            rollout.fail("alarm")
        found = rollout.step(list(fleet.views.values()))
        if rollout.is_over:
            return actions
        for action in found:
            actions.append(action)
            fleet.perform(action)
            if isinstance(action, (SelfTest, Judge)):
                rollout.report(left.pop(0))
        fleet.pass_time()
    raise AssertionError("the update never ended")


@given(count=st.integers(1, 5), seed=st.integers(0, 1000), surge=st.integers(0, 1))
@settings(max_examples=100)
def test_step_replaces_all_replicas_and_never_serves_with_fewer(count: int, seed: int, surge: int) -> None:
    count += 1 - surge
    fleet = PlainFleet(count, random.Random(seed))
    rollout = Rollout("old", "new", count, clock=lambda: 0.0, max_surge=surge)
    actions = drive(rollout, fleet, [GOOD, GOOD])
    assert rollout.phase is Phase.DONE
    assert [view.version for view in fleet.views.values()] == ["new"] * count
    assert fleet.fewest == count - (1 - surge)
    assert fleet.most <= count + surge
    kinds = [type(action) for action in actions if isinstance(action, (Add, SelfTest, Judge))]
    assert kinds[:3] == [Add, SelfTest, Judge]
    assert rollout.share(list(fleet.views.values())) == 1.0


@given(
    count=st.integers(1, 5),
    seed=st.integers(0, 1000),
    alarm=st.one_of(st.integers(0, 40)),
    bad=st.sampled_from([0, 1, 2]),
    surge=st.integers(0, 1),
)
@settings(max_examples=100)
def test_step_brings_the_old_version_back_when_a_check_fails_or_an_alarm_comes(
    count: int, seed: int, alarm: int, bad: int, surge: int
) -> None:
    count += 1 - surge
    fleet = PlainFleet(count, random.Random(seed))
    rollout = Rollout("old", "new", count, clock=lambda: 0.0, max_surge=surge)
    verdicts = [GOOD] * bad + [Verdict(False, "too slow")]
    drive(rollout, fleet, verdicts, alarm_at=alarm if bad == 2 else None)
    assert fleet.fewest >= count - (1 - surge)
    assert {view.version for view in fleet.views.values()} == {
        "old" if rollout.phase is Phase.FAILED else "new"
    }
    if bad < 2:
        assert rollout.phase is Phase.FAILED and "too slow" in rollout.reason
    assert sum(view.is_ready for view in fleet.views.values()) == count


def test_step_rolls_back_when_the_new_version_does_not_start() -> None:
    now = [0.0]
    rollout = Rollout("old", "new", 1, Patience(start=10.0), lambda: now[0])
    old, loading = ReplicaView("o", "old", True), ReplicaView("n", "new", False)
    assert rollout.step([old]) == [Add("new")]
    assert rollout.step([old, loading]) == []
    now[0] = 11.0
    rollout.step([old, loading])
    assert rollout.phase is Phase.ROLL_BACK and rollout.share([old, loading]) == 0.0
    assert rollout.step([old, loading]) == [Drain("n")]
    assert rollout.step([old, loading._replace(is_draining=True)]) == [Remove("n")]
    rollout.step([old])
    assert rollout.phase is Phase.FAILED


def test_step_rolls_back_when_the_canary_dies_or_the_bench_takes_too_long() -> None:
    now = [0.0]
    old, new = ReplicaView("o", "old", True), ReplicaView("n", "new", True)
    rollout = Rollout("old", "new", 1, Patience(judge=10.0), lambda: now[0])
    assert rollout.step([old, new]) == [SelfTest("n")]
    rollout.step([old, new._replace(is_ready=False)])
    assert rollout.phase is Phase.ROLL_BACK and "died" in rollout.reason
    rollout = Rollout("old", "new", 1, Patience(judge=10.0), lambda: now[0])
    rollout.step([old, new])
    rollout.report(GOOD)
    assert rollout.step([old, new]) == [Judge("n", "o")]
    assert rollout.step([old, new]) == [], "asked once"
    now[0] = 11.0
    rollout.step([old, new])
    assert rollout.phase is Phase.ROLL_BACK and "too long" in rollout.reason
    rollout.report(GOOD)
    assert rollout.phase is Phase.ROLL_BACK, "a late verdict changes nothing"


@pytest.mark.parametrize(
    ("old", "new", "count", "surge"), [("a", "a", 1, 1), ("a", "b", 0, 1), ("a", "b", 1, 0)]
)
def test_an_update_is_refused_when_there_is_nothing_to_replace(
    old: str, new: str, count: int, surge: int
) -> None:
    with pytest.raises(ValueError, match=r"update|same|only"):
        Rollout(old, new, count, max_surge=surge)


def test_an_alarm_rolls_an_update_back() -> None:
    async def main() -> Rollout:
        fleet = MockFleet()
        await fleet.add(OLD, "old")

        async def held(*names: str) -> Verdict:
            control.alarms = "two replicas of the new version died"
            return GOOD

        models, split = {"old": OLD, "new": NEW}, VersionSplit("old", "new")
        control = LocalControl(fleet, split, lambda version: fleet.add(models[version], version), held, held)
        clock = asyncio.get_running_loop().time
        rollout = await roll(Rollout("old", "new", 1, clock=clock), control)
        await fleet.close()
        return rollout

    rollout = run(main())
    assert rollout.phase is Phase.FAILED and "died" in rollout.reason


@given(st.floats(0, 1), st.integers(1, 200))
def test_split_sends_each_version_its_share(share: float, count: int) -> None:
    split = VersionSplit("old", "new")
    split.share = share
    new = [split.choose() for _ in range(count)].count("new")
    assert abs(new - share * count) <= 0.5 + 1e-6


OLD = MockModel(step_seconds=0.02, prompt_tokens_per_second=3000.0, num_blocks=512, load_seconds=1.0)
NEW = MockModel(
    step_seconds=0.02, prompt_tokens_per_second=3000.0, num_blocks=512, load_seconds=1.0, answers=7
)
PROMPT, LENGTH = 200, 12


async def update_under_load(verdict: Verdict, requests: int, rate: float) -> dict[str, Any]:
    """Serve ``requests`` while the fleet is updated; outcome and times to first token."""
    fleet = MockFleet(EngineOptions(max_num_seqs=8))
    for _ in range(3):
        await fleet.add(OLD, "old")

    async def passes(replica_id: str) -> Verdict:
        await asyncio.sleep(0.5)
        return GOOD

    async def judged(canary: str, baseline: str) -> Verdict:
        await asyncio.sleep(2.0)
        return verdict

    clock = asyncio.get_running_loop().time
    models = {"old": OLD, "new": NEW}
    split = VersionSplit("old", "new")
    control = LocalControl(fleet, split, lambda version: fleet.add(models[version], version), passes, judged)
    rollout, dice = Rollout("old", "new", 3, clock=clock), random.Random(1)
    firsts: dict[int, tuple[float, float]] = {}

    async def one(index: int) -> list[TokenOutput]:
        begun = clock()
        outputs = []
        prompt = [40 + index % 64, *range(100, 99 + PROMPT)]
        async for output in fleet.failover.generate(asked(f"r{index}", prompt, max_tokens=LENGTH)):
            if not outputs:
                firsts[index] = (begun, clock() - begun)
            outputs.append(output)
        return outputs

    answers = []
    rolling: asyncio.Task[Rollout] | None = None
    for index in range(requests):
        if index == requests // 4:
            rolling = asyncio.create_task(roll(rollout, control))
        answers.append(asyncio.create_task(one(index)))
        await asyncio.sleep(dice.expovariate(rate))
    found = await asyncio.gather(*answers)
    assert rolling is not None
    begun = firsts[requests // 4][0]
    await rolling
    await fleet.close()
    return {"rollout": rollout, "answers": found, "firsts": firsts, "begun": begun, "shares": control.shares}


def p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def versions_of(found: dict[str, Any]) -> list[str]:
    """The version of each answer; none is a mixture."""
    versions = []
    for index, outputs in enumerate(found["answers"]):
        assert outputs[-1].finish_reason is FinishReason.LENGTH, outputs[-1].error
        prompt = [40 + index % 64, *range(100, 99 + PROMPT)]
        by_version = {"old": OLD.answer(prompt, LENGTH), "new": NEW.answer(prompt, LENGTH)}
        versions += [version for version, right in by_version.items() if tokens(outputs) == right]
    assert len(versions) == len(found["answers"]), "an answer of two versions"
    return versions


def test_roll_serves_500_requests_without_a_failed_or_mixed_answer() -> None:
    found = run(update_under_load(GOOD, 500, 15.0))
    versions = versions_of(found)
    assert found["rollout"].phase is Phase.DONE
    assert versions[:125] == ["old"] * 125 and versions[-1] == "new"
    assert found["shares"][0] == 0.0 and found["shares"][-1] == 1.0
    before = [ttft for at, ttft in found["firsts"].values() if at < found["begun"]]
    after = [ttft for at, ttft in found["firsts"].values() if at >= found["begun"]]
    assert p95(after) <= 2 * p95(before)


def test_roll_goes_back_when_the_bench_fails_under_load() -> None:
    found = run(update_under_load(Verdict(False, "tpot_p50 is 1.4x old"), 150, 15.0))
    versions = versions_of(found)
    assert versions[:37] == ["old"] * 37 and versions[-20:] == ["old"] * 20
    assert found["rollout"].phase is Phase.FAILED and "tpot" in found["rollout"].reason
    assert max(found["shares"]) == pytest.approx(1 / 4) and found["shares"][-1] == 0.0, (
        "a share of the clients, and back"
    )
