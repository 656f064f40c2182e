"""The quality of a candidate, builds that end in time, and the shape of the load."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optkit.bench import workload
from optkit.bench.records import RequestRecord
from optkit.bench.slo import Load
from optkit.bench.workload import RequestSchedule, WorkloadConfig
from optkit.errors import UserError
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Accept, Recipe
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.pace import STEADY, Pace
from optkit.simulation.simulator import Overheads, simulate
from optkit.simulation.step_costs import MeasuredStep, StepCosts, StepShape
from optkit.tune.calibration import Calibration
from optkit.tune.lab import Machine, Shape, _command, quality, refuse_failures
from optkit.tune.settings import Setting
from tests.support.architectures import tiny_model
from tests.support.rounds import broken, record
from tests.support.tuning_lab import LIMITS

ACCEPT = Accept(max_kld=0.01, min_top1=0.97)
KNOWN = StepCosts((4e-3, 3e-4, 3.5e-4, 3e-4, 1e-7, 9e-7))


def report(kl: float, kl_error: float, top1: float = 0.98, top1_error: float = 0.001) -> dict[str, object]:
    return {
        "quality": {
            "kl_mean": {"value": kl, "stderr": kl_error},
            "top1_agreement": {"value": top1, "stderr": top1_error},
        }
    }


def test_a_quality_interval_inside_its_bounds_passes() -> None:
    lines, crossed = quality(report(0.005, 0.001), ACCEPT)
    assert crossed == [] and len(lines) == 2 and "bound 0.01" in lines[0]
    assert quality(report(9.0, 1.0), Accept())[1] == []
    assert quality(None, ACCEPT)[1] == []


@pytest.mark.parametrize(
    "whole",
    [report(0.009, 0.001), report(0.02, 0.0), report(0.001, 0.0, 0.971, 0.001), report(float("nan"), 0.0)],
)
def test_a_quality_interval_that_crosses_a_bound_is_out_though_the_value_may_be_inside(whole: dict) -> None:
    assert quality(whole, ACCEPT)[1]


def test_a_build_is_ended_at_its_time_and_a_failure_has_the_last_words() -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match="not built within 0 s"):
        _command([sys.executable, "-c", "import time; time.sleep(60)"], 0.3, "recipe x")
    assert time.monotonic() - start < 20
    with pytest.raises(UserError, match="recipe x: no such thing"):
        _command([sys.executable, "-c", "import sys; sys.exit('no such thing')"], 30, "recipe x")
    _command([sys.executable, "-c", ""], 30, "recipe x")


def steps_at(pace: Pace, seconds: float, start: float) -> list[MeasuredStep]:
    """Steps of many shapes on a machine of known costs and ``pace``, for ``seconds``."""
    found: list[MeasuredStep] = []
    now = start
    while now < start + seconds:
        for tokens, rows, context in (
            (1, 1, 64),
            (4, 4, 256),
            (64, 1, 0),
            (128, 1, 0),
            (256, 1, 0),
            (512, 1, 0),
        ):
            shape = StepShape(tokens, rows, tokens**2 / 2 if tokens > rows else 0.0, context)
            end = pace.end(now, KNOWN.seconds(shape))
            found.append(MeasuredStep(shape, end - now, now))
            now = end
    return found


def mean_ttft(records: Sequence[RequestRecord]) -> float:
    return float(np.mean([r.first_token - r.send for r in records if r.first_token is not None]))


@pytest.mark.parametrize(
    ("pace", "room"), [(STEADY, True), (Pace((1.3, 1.7), (1.0, 1.6)), True), (STEADY, False)]
)
def test_a_calibration_predicts_latencies_of_a_machine_with_slow_seconds(
    pace: Pace, room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean TTFT within 8 % at another load and other lengths than those of the calibration."""
    truth = Overheads(0.006, 3e-5, 4e-4, 3e-4)

    class KnownMachine(Machine):
        def scheduler_config(self, setting: Setting) -> SchedulerConfig:
            return LIMITS

        def ids(self) -> list[int]:
            return list(range(50_000))

        def without_room(self, setting: Setting, beside: int, engines: int = 1) -> str:
            return "" if room else "no memory"

        @contextmanager
        def serving(self, settings: Sequence[Setting]) -> Iterator[Any]:
            done.append("server")

            def run(_setting: Setting, schedule: RequestSchedule, _limit: float) -> list[RequestRecord]:
                clients = schedule.config.max_concurrency
                found = simulate(
                    LIMITS, KNOWN, schedule.requests, clients=clients, overheads=truth, pace=pace
                )
                return found.records

            yield run, {}
            done.append("end")

    def steps(*_arguments: Any) -> list[MeasuredStep]:
        done.append("steps")
        return steps_at(pace, 3.0, next(starts))

    @contextmanager
    def process(*_arguments: Any) -> Iterator[Any]:
        done.append("load")
        yield steps
        done.append("gone")

    done: list[str] = []
    starts = iter((0.0, 60.3))
    monkeypatch.setattr("optkit.tune.lab.steps_in_a_process", steps)
    monkeypatch.setattr("optkit.tune.lab.step_process", process)
    monkeypatch.setattr("optkit.tune.lab.SETTLE", 0)
    shape = Shape(256, 32, Load(rate=1.0))
    machine = KnownMachine("model", {"baseline": "baseline"}, tmp_path, shape, lambda _line: None)
    known = Calibration.from_dict(machine.calibrate("baseline"))
    beside, alone = ["load", "server", "steps", "end", "steps", "gone"], ["steps", "server", "end", "steps"]
    assert done == (beside if room else alone)  # two engines at once only where both fit
    assert known.pace.mean == pytest.approx(pace.mean, rel=0.05)
    load = workload.build(WorkloadConfig(80, 256, 32, None, 2.0, 5), machine.ids())
    predicted = simulate(LIMITS, known.costs, load.requests, overheads=known.overheads, pace=known.pace)
    actual = simulate(LIMITS, KNOWN, load.requests, overheads=truth, pace=pace)
    assert mean_ttft(predicted.records) == pytest.approx(mean_ttft(actual.records), rel=0.08)


@pytest.mark.parametrize(("free", "fits"), [(15, 1), (25, 2), (9, 0)])
def test_the_memory_is_asked_for_all_engines_that_start_together(
    free: int, fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.artifact.open.Artifact.open", lambda *_args, **_options: None)
    monkeypatch.setattr("optkit.serve.models.memory.estimated_bytes", lambda *_: 10)
    monkeypatch.setattr("optkit.machine.memory.available_bytes", lambda: free)
    shape = Shape(64, 8, Load(clients=1))
    machine = Machine("model", {"baseline": "baseline"}, tmp_path, shape, lambda _line: None)
    setting = Setting("baseline")
    assert (machine.without_room(setting, beside=1) == "") == (fits >= 1)
    assert (machine.without_room(setting, beside=1, engines=2) == "") == (fits >= 2)
    assert machine.without_room(setting, beside=0) == ""


def test_a_calibration_with_unanswered_requests_is_refused() -> None:
    """The answered ones are the faster ones: a fit to them alone would promise too much."""
    refuse_failures([record(0, 0.5)], "x")
    with pytest.raises(UserError, match="1 of 2 requests failed: HTTP 500"):
        refuse_failures([record(0, 0.5), broken(1)], "x")


def test_the_load_decides_arrivals_and_duration() -> None:
    open_, closed = Shape(8, 2, Load(rate=4.0)), Shape(8, 2, Load(clients=3))
    assert open_.duration(60) == 15.0 and closed.duration(60) == 0.0
    assert (open_.config(5, 7).request_rate, open_.config(5, 7).max_concurrency) == (4.0, None)
    assert (closed.config(5, 7).request_rate, closed.config(5, 7).max_concurrency) == (None, 3)


def test_an_artifact_of_another_model_or_recipe_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(64, 8, Load(clients=1))
    machine = Machine("model", {"baseline": "baseline"}, tmp_path, shape, lambda _line: None)
    recipe = machine.recipe("baseline")

    def there(source: str, recipe: Recipe) -> None:
        found = SimpleNamespace(recipe=recipe, manifest={"source": {"digest": source}})
        monkeypatch.setattr("optkit.artifact.open.Artifact.open", lambda _directory: found)

    asked = []
    monkeypatch.setattr(
        "optkit.checkpoint.locate.resolve",
        lambda name, _progress: asked.append(name) or SimpleNamespace(digest="sha256 a"),
    )
    there("sha256 a", recipe)
    assert machine._is_built("baseline")
    there("sha256 b", recipe)
    assert not machine._is_built("baseline")
    there("sha256 a", load_recipe("ttft-cpu"))
    assert not machine._is_built("baseline")
    assert asked == ["model"]  # a model of 16 GB is hashed once


def test_servers_beyond_the_memory_are_not_started_and_the_first_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(
        "model", {"baseline": "baseline"}, tmp_path, Shape(8, 2, Load(clients=1)), lambda _line: None
    )
    machine._ids = list(range(5000))
    manifest = {"files": {"model.safetensors": {"bytes": 3 * 10**9}}}
    opened = SimpleNamespace(manifest=manifest, directory=tmp_path)
    monkeypatch.setattr("optkit.artifact.open.Artifact.open", lambda _directory, verify=True: opened)
    free = [5 * 10**9]
    monkeypatch.setattr("optkit.machine.memory.available_bytes", lambda: free[0])
    started = []

    @contextmanager
    def running(command: list[str], _port: int) -> Iterator[str]:
        started.append(command)
        free[0] -= 4 * 10**9
        yield "http://server"

    monkeypatch.setattr("optkit.tune.lab.servers.running", running)
    monkeypatch.setattr("optkit.tune.lab.servers.model_name", lambda _url: "m")
    monkeypatch.setattr("optkit.tune.lab.client.run_workload", lambda *_args, **_options: [])
    monkeypatch.setattr("optkit.tune.lab.SETTLE", 0.0)
    settings = [
        Setting("baseline"),
        Setting.of("baseline", {"max_num_seqs": 2}),
        Setting.of("baseline", {"max_num_seqs": 4}),
    ]
    with machine.serving(settings) as (_run, failed):
        assert len(started) == 1 and list(failed) == settings[1:]
        assert "needs about 4" in failed[settings[1]] and "1 GB are available" in failed[settings[1]]
    free[0] = 0
    with machine.serving(settings[:1]) as (_run, failed):
        assert not failed


def test_requests_beyond_the_context_are_refused_before_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama")  # 256 tokens of context
    model.save_pretrained(tmp_path / "model")
    for output, fits in ((16, True), (17, False)):
        shape = Shape(240, output, Load(clients=1))
        machine = Machine(
            str(tmp_path / "model"), {"baseline": "baseline"}, tmp_path, shape, lambda _line: None
        )
        if fits:
            machine.check_lengths()
            continue
        with pytest.raises(UserError, match=r"240 tokens in and 17 out are too long.*256 tokens"):
            machine.check_lengths()
