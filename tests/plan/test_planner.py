"""A whole plan from a configuration alone: parts that agree, machines that are not here, loads, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.machine import load
from optkit.machine import target as targets
from optkit.plan import planner
from optkit.plan.calibrate import Anchor, Calibrated
from optkit.plan.planner import Request, plan
from optkit.plan.steps import StepModel
from optkit.recipe.load import load_recipe
from tests.support.architectures import tiny_model
from tests.support.graphs import captured
from tests.support.target import TARGET

SIZES = ["workload.prompt_tokens=[24, 64]", "workload.output_tokens=8"]
GRAPHS: dict[Path, Graph] = {}


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").config.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A described CPU, a cache of its own, and one capture for all plans."""
    from optkit.pipeline import dry_graph

    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(targets, "detect", lambda refresh=False: TARGET)
    real = dry_graph.capture_planned

    def once(directory: Path, *options: Any) -> Graph:
        if directory not in GRAPHS:
            GRAPHS[directory] = real(directory, *options)
        return GRAPHS[directory].clone()

    monkeypatch.setattr(dry_graph, "capture_planned", once)


def made(model: Path, recipe: str = "ttft-cpu", **options: Any) -> planner.ServingPlan:
    return plan(Request(str(model), load_recipe(recipe, SIZES), **options))


def test_a_configuration_is_enough(config_only: Path) -> None:
    found = made(config_only)
    assert [file.name for file in config_only.iterdir()] == ["config.json"]
    assert list(found.times) == [("prefill 24", 1), ("prefill 64", 1), ("prefill 128", 1), ("prefill 256", 1),
                                 ("decode@65", 1), ("decode@65", 8), ("decode@65", 16), ("decode@256", 1)]  # fmt: skip
    assert found.memory.fits and found.clients is not None and found.clients["clients"] == 8
    data = json.loads(json.dumps(found.to_dict()))
    assert data["machine"]["target"]["name"] == "cpu" and data["steps"][0]["bound_by"]
    for step in data["steps"]:
        assert step["seconds"] == pytest.approx(sum(step["parts"].values()))
        assert step["seconds"] >= step["floor_seconds"] > 0


@pytest.mark.parametrize("machine", ["h100", "a100", "rtx-4090", "mi300x", "b200"])
def test_any_gpu_of_the_table_is_planned_for(config_only: Path, machine: str) -> None:
    found = made(config_only, "balanced-h100" if machine != "a100" else "ttft-a100", target=machine)
    assert found.machine.name == machine and found.memory.fits
    assert "floor" in found.source and all(time.seconds > 0 for time in found.times.values())


@pytest.mark.parametrize("machine", ["graviton4", "xeon-6", "epyc-9005"])
def test_a_large_cpu_is_faster_than_a_small_one(config_only: Path, machine: str) -> None:
    here, there = made(config_only), made(config_only, target=machine)
    label = ("prefill 256", 1)
    assert there.times[label].seconds < here.times[label].seconds
    assert "not verified" in there.machine.source


def test_an_empty_objective_is_refused(config_only: Path) -> None:
    with pytest.raises(UserError, match="--slo"):
        made(config_only, slo="")


@pytest.mark.parametrize(("used", "noted"), [(0.9, True), (0.1, False), (None, False)])
def test_a_calibration_beside_other_work_is_noted(
    config_only: Path, monkeypatch: pytest.MonkeyPatch, used: float | None, noted: bool
) -> None:
    monkeypatch.setattr(load, "cpu_in_use", lambda: used)
    monkeypatch.setattr(planner, "calibrate", lambda graph, model, *rest, **options: Calibrated(model))
    notes = made(config_only, calibrate=True).notes
    assert any("90% of the processors were in use before the calibration" in note for note in notes) is noted
    assert not any("in use" in note for note in made(config_only).notes)
    elsewhere = made(config_only, target="graviton4", calibrate=True)
    assert not any("in use" in note for note in elsewhere.notes), "nothing is measured for another machine"


def test_a_load_gets_its_replicas(config_only: Path, tmp_path: Path) -> None:
    few = made(config_only, slo="ttft_p95<5000ms@0.1rps").replicas
    assert few is not None and few.fewest is not None and few.fewest.replicas == 1
    rate = 1.5 / sum(made(config_only).times["prefill 64", 1].parts.values())
    many = made(config_only, slo=f"ttft_p95<5000ms@{rate:.3f}rps").replicas
    assert many is not None and many.fewest is not None and many.fewest.replicas > 1
    assert many.single.saturated and many.to_dict()["assumptions"]
    never = made(config_only, slo="ttft_p95<0.001ms@0.1rps").replicas
    assert never is not None and never.fewest is None and "ttft_p95" in never.cause
    (tmp_path / "burst").write_text(
        "".join(f'{{"timestamp": {n / 100}, "input_length": 64, "output_length": 4}}\n' for n in range(3))
    )
    burst = made(config_only, trace=tmp_path / "burst", slo="ttft_p95<5000ms").replicas
    assert burst is not None and burst.fewest is None and "how many more than 3 replicas" in burst.cause
    rows = [{"timestamp": 100 * n, "input_length": 24 + n, "output_length": 4} for n in range(40)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    traced = made(config_only, trace=file, slo="95%:ttft<5000ms,tpot<500ms").replicas
    assert traced is not None and traced.rate == pytest.approx(10.0) and traced.requests == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo": "ttft:700"}, "an objective needs a load"),
        ({"slo": "ttft_p95<700ms@8clients"}, "an objective needs a load"),
        ({"slo": "ttft_p95<700ms@8clients", "trace": Path("none.jsonl")}, "the load of a plan is a rate"),
        ({"slo": "ttft_p95<700ms@1e-320rps"}, "no rate for a plan"),
        ({"slo": "throughput>=100@4rps"}, "can't be planned"),
        ({"slo": "ttft_p90<700ms@4rps"}, "can't be planned"),
        ({"slo": "90%:ttft<700ms@4rps"}, "ttft_p90<700ms can't be planned"),
        ({"slo": "e2e_mean<700ms@4rps"}, "p50, p95 or p99 of ttft and e2e"),
        ({"slo": "ttft_p50<0.5x@4rps"}, "can't be planned"),
        ({"slo": "tftt<1@4rps"}, "unknown metric: tftt"),
        ({"target": "h10"}, "unknown machine 'h10'.*did you mean 'h100'"),
        ({"trace": Path("none.jsonl")}, "the trace can't be read"),
        ({"hardware": Path("none.yaml")}, "the table of hardware can't be read"),
    ],
)
def test_errors_are_one_line(config_only: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        made(config_only, **options)
    assert "\n" not in error.value.line()


@pytest.mark.parametrize(("measured", "said"), [(0.5, True), (1.5, False)])
def test_ceilings_below_the_layers_are_said(measured: float, said: bool) -> None:
    anchor = Anchor(Point(64, 1, 64), 2.0, measured, floor=1.0)
    steps = Calibrated(StepModel(captured("llama"), TARGET), [anchor])
    assert ("--refresh" in planner.low_ceilings(steps)) == said


def test_a_request_that_never_fits_is_an_error(config_only: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    lines = [json.dumps({"timestamp": at, "input_length": 5000, "output_length": 1}) for at in (0, 9000)]
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"can't be served.*--trace-scale"):
        made(config_only, trace=file)
    assert made(config_only, trace=file, scale=0.01, slo=None).replicas is not None


def test_a_share_of_requests_bounds_its_own_percentile(config_only: Path) -> None:
    """Of the same load, p99 of TTFT is later than p50: a bound between them holds for half of the requests alone."""
    rate = 0.7 / sum(made(config_only).times["prefill 64", 1].parts.values())
    need = made(config_only, slo=f"ttft_p50<1e6ms@{rate:.6f}rps").replicas
    assert need is not None and need.fewest is not None
    p50, p95, p99 = (1e3 * seconds for seconds in need.fewest.ttft)
    assert p50 < p95 < p99
    bound = f"ttft<{(p95 + p99) / 2:.9f}ms@{rate:.6f}rps"
    held, more = (made(config_only, slo=f"{share}%:{bound}").replicas for share in (95, 99))
    assert held is not None and held.fewest is not None and held.fewest.replicas == need.fewest.replicas
    assert more is not None and (more.fewest is None or more.fewest.replicas > need.fewest.replicas)


def test_a_trace_at_a_single_moment_has_no_rate(config_only: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(3 * '{"timestamp": 5, "input_length": 9, "output_length": 1}\n')
    with pytest.raises(UserError, match="different times"):
        made(config_only, trace=file, slo="ttft:700@4rps")


def test_prefills_of_a_trace_are_predicted_at_few_lengths() -> None:
    asked: list[int] = []

    def seconds(tokens: int) -> float:
        asked.append(tokens)
        return 0.005 + 3e-4 * tokens + 5e-9 * tokens**2

    found = planner.on_grid(seconds)
    for tokens in range(1, 20_000):
        assert found(tokens) == pytest.approx(0.005 + 3e-4 * tokens + 5e-9 * tokens**2, rel=1e-3)
    assert len(asked) == len(set(asked)) < 140
