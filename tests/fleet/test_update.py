"""An update over the dashboard's REST API: Serve's replicas are replaced one by one, or the old version comes back."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.fleet import update as module
from optkit.fleet.autoscale import AutoscaleConfig
from optkit.fleet.cluster import Cluster, NoAnswer
from optkit.fleet.config import FleetConfig
from optkit.fleet.manifests import replicas, serve_config
from optkit.fleet.rollout import Phase, Rollout
from optkit.fleet.update import ClusterControl, deployed, update
from tests.support.fake_serve import FakeServe

OLD = FleetConfig(artifact="/models/one", digest="a" * 64, replicas=2)
NEW = msgspec.structs.replace(OLD, artifact="/models/two", digest="b" * 64)
SHORT = {"old": "a" * 12, "new": "b" * 12}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)


def updated(
    board: FakeServe, count: int = 2, surge: int = 1, config: FleetConfig = NEW
) -> tuple[Rollout, list[str]]:
    """The end of an update, and what it told."""
    cluster, told = board.cluster(), list[str]()
    config = msgspec.structs.replace(config, replicas=count)
    control = ClusterControl(cluster, deployed(cluster.applications(), "optkit"), config, 8000)
    rollout = Rollout(control.old, control.new, count, max_surge=surge)
    return asyncio.run(update(control, rollout, told.append)), told


@given(count=st.integers(1, 4), surge=st.integers(0, 1), seed=st.integers(0, 1000), autoscaled=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_update_replaces_all_replicas_and_never_serves_with_fewer(
    count: int, surge: int, seed: int, autoscaled: bool
) -> None:
    count += 1 - surge
    scale = AutoscaleConfig(min_replicas=count, max_replicas=9) if autoscaled else None
    old = msgspec.structs.replace(OLD, replicas=count, autoscale=scale)
    board = FakeServe(serve_config(old, 8000), dice=random.Random(seed))
    rollout, _ = updated(board, count, surge, msgspec.structs.replace(NEW, autoscale=scale))
    assert rollout.phase is Phase.DONE, rollout.reason
    assert board.exams == ["test", "compare"] and not board.mixed
    assert board.fewest >= count - (1 - surge) and board.most <= count + surge
    for _ in range(20):
        board.cluster().applications()
    assert board.counts() == {SHORT["new"]: count}
    config = msgspec.structs.replace(NEW, replicas=count, autoscale=scale)
    left = {name: details["deployed_app_config"] for name, details in board.applications.items()}
    assert left == {app["name"]: app for app in serve_config(config, 8000)["applications"]}


@given(seed=st.integers(0, 1000), kind=st.sampled_from(["test", "compare"]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_failed_examination_brings_the_old_version_back(seed: int, kind: str) -> None:
    slow = "time per token 1.4x [1.3, 1.5] of the old one's, beyond 1.1x"
    board = FakeServe(
        serve_config(OLD, 8000), verdict=lambda asked: slow if asked == kind else "", dice=random.Random(seed)
    )
    rollout, told = updated(board)
    assert rollout.phase is Phase.FAILED and "1.4x [1.3, 1.5]" in rollout.reason
    assert any("FAILED" in line and "1.4x" in line for line in told)
    for _ in range(20):
        board.cluster().applications()
    assert board.counts() == {SHORT["old"]: 2} and board.fewest == 2 and not board.mixed
    names = {details["deployed_app_config"]["name"] for details in board.applications.values()}
    assert names == {"optkit", f"optkit-{SHORT['old']}"}
    assert board.applications[f"optkit-{SHORT['old']}"]["deployed_app_config"]["deployments"][0][
        "user_config"
    ]["open"]


def test_a_version_that_does_not_start_is_rolled_back_with_the_reason() -> None:
    board = FakeServe(serve_config(OLD, 8000), failing="/models/two: no artifact here.")
    rollout, _ = updated(board)
    assert rollout.phase is Phase.FAILED and "/models/two: no artifact here" in rollout.reason
    assert board.counts() == {SHORT["old"]: 2}


def test_two_deaths_of_new_replicas_are_an_alarm() -> None:
    board = FakeServe(serve_config(msgspec.structs.replace(OLD, replicas=4), 8000))
    cluster = board.cluster()
    control = ClusterControl(
        cluster, deployed(cluster.applications(), "optkit"), msgspec.structs.replace(NEW, replicas=4), 8000
    )
    rollout = Rollout(control.old, control.new, 4)
    kills = [Phase.SHIFT, Phase.SHIFT]

    def tell(line: str) -> None:
        if kills and rollout.phase is kills[0] and "start a replica" in line:
            kills.pop(0)
            board.kill(SHORT["new"])

    asyncio.run(update(control, rollout, tell))
    assert rollout.phase is Phase.FAILED and "2 replicas of the new version died" in rollout.reason
    assert board.fewest >= 3, "a death takes one"


def test_an_update_goes_on_where_another_has_ended() -> None:
    """A command was killed in the middle: the fleet has replicas of both versions."""
    board = FakeServe(serve_config(OLD, 8000))
    both = serve_config(OLD, 8000)
    both["applications"].append(replicas(msgspec.structs.replace(NEW, replicas=1)))
    board._put(both)
    rollout, _ = updated(board)
    assert rollout.phase is Phase.DONE and board.fewest == 2


def test_a_third_version_is_refused() -> None:
    both = serve_config(OLD, 8000)
    both["applications"].append(replicas(msgspec.structs.replace(NEW, digest="c" * 64)))
    with pytest.raises(UserError, match="2 other versions"):
        updated(FakeServe(both))


def test_the_name_of_the_model_stays() -> None:
    cluster = FakeServe(serve_config(OLD, 8000)).cluster()
    present = deployed(cluster.applications(), "optkit")
    assert present.with_names(NEW).http.served_model_names == ("one",)
    assert deployed({}, "optkit").with_names(NEW).http.served_model_names == ("two",)
    assert present.without(NEW.digest) == [f"optkit-{SHORT['old']}"]


def test_silence_of_the_dashboard_is_borne_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeServe(serve_config(OLD, 8000))
    cluster = board.cluster()
    control = ClusterControl(cluster, deployed(cluster.applications(), "optkit"), NEW, 8000)
    views = asyncio.run(control.view())

    def silent() -> dict[str, object]:
        raise NoAnswer("no Ray cluster answers here")

    monkeypatch.setattr(cluster, "applications", silent)
    assert asyncio.run(control.view()) == views
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.0)
    with pytest.raises(UserError, match="no Ray cluster"):
        asyncio.run(control.view())


def test_an_update_goes_on_when_the_dashboard_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of three gets no answer, in each phase, changes among them."""
    board = FakeServe(serve_config(OLD, 8000))
    call, dice = Cluster._call, random.Random(4)

    def flaky(self: Cluster, method: str, body: object = None) -> dict[str, object]:
        if dice.random() < 1 / 3:
            raise NoAnswer("no Ray cluster answers here")
        return call(self, method, body)

    cluster = board.cluster()
    control = ClusterControl(cluster, deployed(cluster.applications(), "optkit"), NEW, 8000)
    monkeypatch.setattr(Cluster, "_call", flaky)
    rollout = Rollout(control.old, control.new, 2)
    asyncio.run(update(control, rollout, lambda _: None))
    assert rollout.phase is Phase.DONE and board.fewest == 2


def test_a_refusal_of_the_dashboard_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def refused() -> None:
        calls.append(1)
        raise UserError("the cluster answered 400")

    with pytest.raises(UserError, match="400"):
        asyncio.run(module._patiently(refused))
    assert len(calls) == 1


def test_an_examination_without_an_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXAM_SECONDS", 0.2)
    monkeypatch.setattr(module, "status_of", lambda details: ("DEPLOYING", ""))
    board = FakeServe(serve_config(OLD, 8000))
    cluster = board.cluster()
    control = ClusterControl(cluster, deployed(cluster.applications(), "optkit"), NEW, 8000)
    verdict = asyncio.run(control.test("r"))
    assert not verdict.passed and "no end" in verdict.reason
    assert board.applications[control._exam_name]["status"] == "DELETING"


def test_a_config_without_a_user_config_is_open() -> None:
    app = replicas(OLD)
    assert module._is_open(app) and not module._is_open(None)
    del app["deployments"][0]["user_config"]
    assert module._is_open(app) and module._is_open({**app, "deployments": []})
