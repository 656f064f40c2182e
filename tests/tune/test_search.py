"""The search on a machine whose true times are known: finds what holds, prefers defaults, resumes, ends in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.bench.slo import parse_slo
from optkit.simulation.pace import Pace
from optkit.simulation.simulator import Overheads
from optkit.tune import goal
from optkit.tune.advice import single_changes
from optkit.tune.calibration import Calibration
from optkit.tune.journal import Journal
from optkit.tune.outcome import Outcome
from optkit.tune.search import Search
from optkit.tune.settings import Setting
from tests.support.tuning_lab import FAST, SLOW, FakeLab, shape

BOTH = {"baseline": SLOW, "ttft-cpu": FAST}
KILLED = "ttft_p95<700ms@2rps"


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.tune.search.SIMULATED_REQUESTS", 16)
    monkeypatch.setattr("optkit.tune.search.SIMULATION_SHARE", 0.003)


def search(
    lab: FakeLab, file: Path, slo: str, names: tuple[str, ...], budget: float = 1800.0, seed: int = 0
) -> tuple[Outcome, Journal]:
    journal = Journal(file, {"slo": slo}, lab.clock)
    try:
        return Search(lab, journal, parse_slo(slo), lab.shape, names, budget, seed).run(), journal
    finally:
        journal.close()


def test_a_recipe_that_holds_is_found_where_the_default_misses(tmp_path: Path) -> None:
    lab = FakeLab(BOTH, shape(rate=1.0))
    found, journal = search(lab, tmp_path / "j", "ttft_p95<700ms@1rps", ("baseline", "ttft-cpu"))
    assert found.held and found.setting is not None and found.setting.recipe == "ttft-cpu"
    assert len(found.orders) == 3 and all(order["requests"] >= 59 for order in found.orders)
    assert found.against_default is not None and found.against_default.is_less
    assert found.claim in [order["values"] for order in found.orders]
    assert found.quality == ["as the source"] and found.simulated.startswith("ttft_p95")
    seeds = {int(call.split()[-1]) for call in lab.calls if call.startswith("run")}
    assert {seed for seed in seeds if seed >= 2000} and {seed for seed in seeds if seed < 2000}, (
        "fresh prompts"
    )
    assert lab.now <= 1800 * 1.1
    assert all(trial.seconds >= 0 for trial in journal.trials.values())


def test_options_that_earn_nothing_stay_as_in_the_recipe(tmp_path: Path) -> None:
    """With little load no option matters, so none moves."""
    lab = FakeLab({"ttft-cpu": FAST}, shape(rate=0.5))
    found, _ = search(lab, tmp_path / "j", "ttft_p95<700ms@0.5rps", ("ttft-cpu",))
    assert found.held and found.setting == found.default == Setting("ttft-cpu")
    assert found.effects == {}


def test_an_option_that_helps_moves_with_its_measured_effect(tmp_path: Path) -> None:
    """edge-cpu has 4 places: with 16 clients most wait for a place, unless there are more."""
    lab = FakeLab({"edge-cpu": FAST}, shape(rate=None, clients=16, input_len=64))
    slo = "ttft_p95<2000ms@16clients"
    found, _ = search(lab, tmp_path / "j", slo, ("edge-cpu",))
    assert found.setting is not None
    assert dict(found.setting.options).get("max_num_seqs", 0) >= 16
    assert found.effects["max_num_seqs"].high < 1 and found.held


def test_what_nothing_can_hold_ends_in_the_honest_answer(tmp_path: Path) -> None:
    lab = FakeLab(BOTH, shape(rate=1.0))
    found, _ = search(lab, tmp_path / "j", "ttft_p95<20ms@1rps", ("baseline", "ttft-cpu"))
    assert not found.held and found.reasons and found.setting is not None
    text = "\n".join(found.advice)
    assert "what binds" in text and "most help" in text
    assert found.claim.startswith("ttft_p95"), "the best reachable value"
    assert lab.now <= 1800 * 1.1


def test_a_load_beyond_the_capacity_names_the_queue_and_the_rate_that_holds(tmp_path: Path) -> None:
    lab = FakeLab({"baseline": SLOW}, shape(rate=4.0))
    found, _ = search(lab, tmp_path / "j", "ttft_p95<1500ms@4rps", ("baseline",))
    text = "\n".join(found.advice)
    assert not found.held
    assert "waiting in the queue" in text and "are no promise" in text and "it holds up to about" in text


def test_a_recipe_that_misses_its_quality_bound_never_wins(tmp_path: Path) -> None:
    lab = FakeLab(BOTH, shape(rate=0.5))
    lab.broken["ttft-cpu"] = "the quality interval crosses its bound"
    found, journal = search(lab, tmp_path / "j", "ttft_p95<700ms@0.5rps", ("ttft-cpu", "baseline"))
    assert found.setting is None or found.setting.recipe == "baseline"
    assert any("crosses its bound" in note for note in found.notes)
    assert journal.trials["build ttft-cpu of 1800 s"].reason
    again = FakeLab(BOTH, shape(rate=0.5))
    search(again, tmp_path / "j", "ttft_p95<700ms@0.5rps", ("ttft-cpu", "baseline"))
    assert again.calls == [], "a failed trial is a finished trial"


def test_no_recipe_at_all_is_an_answer(tmp_path: Path) -> None:
    lab = FakeLab(BOTH, shape(rate=0.5))
    lab.broken = dict.fromkeys(BOTH, "broken")
    found, _ = search(lab, tmp_path / "j", "ttft_p95<700ms@0.5rps", tuple(BOTH))
    assert not found.held and found.setting is None and found.reasons


def test_a_setting_whose_server_does_not_start_is_out_with_the_reason(tmp_path: Path) -> None:
    lab = FakeLab(BOTH, shape(rate=0.5))
    lab.refused.add("ttft-cpu")
    found, _ = search(lab, tmp_path / "j", "ttft_p95<700ms@0.5rps", tuple(BOTH))
    assert any("did not start" in note for note in found.notes)
    assert found.setting is None or found.setting.key != "ttft-cpu"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """The end of a search that nothing interrupts, and the calls of its machine."""
    lab = FakeLab(BOTH, shape(rate=2.0, input_len=64), noise=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optkit.tune.search.SIMULATED_REQUESTS", 16)
        patch.setattr("optkit.tune.search.SIMULATION_SHARE", 0.003)
        found, _ = search(lab, tmp_path_factory.mktemp("whole") / "j", KILLED, tuple(BOTH))
    return found, lab.calls


@settings(max_examples=5)
@given(st.integers(1, 20))
def test_a_killed_search_resumes_to_the_same_end_without_repeating_a_trial(
    tmp_path_factory: pytest.TempPathFactory, uninterrupted: tuple[Outcome, list[str]], kill_after: int
) -> None:
    folder, slo = tmp_path_factory.mktemp("kill"), KILLED
    expected, calls = uninterrupted
    first = FakeLab(BOTH, shape(rate=2.0, input_len=64), noise=0.0, kill_after=kill_after)
    try:
        search(first, folder / "killed", slo, tuple(BOTH))
    except KeyboardInterrupt:
        first.calls.pop()  # the run that did not finish
    second = FakeLab(BOTH, shape(rate=2.0, input_len=64), noise=0.0)
    second.now = 1e6
    found, _ = search(second, folder / "killed", slo, tuple(BOTH))
    assert (found.held, found.setting, found.claim) == (expected.held, expected.setting, expected.claim)
    assert not set(first.calls) & set(second.calls)
    assert sorted(first.calls + second.calls) == sorted(calls)


def test_a_larger_budget_goes_on_where_a_smaller_one_ended(tmp_path: Path) -> None:
    lab = FakeLab(BOTH, shape(rate=1.0, input_len=64))
    short, _ = search(lab, tmp_path / "j", "ttft_p95<700ms@1rps", tuple(BOTH), 150.0)
    assert not short.held and any("the budget ended" in reason for reason in short.reasons)
    assert len(short.advice) == 1 and "a larger --budget" in short.advice[0]
    first = list(lab.calls)
    found, _ = search(lab, tmp_path / "j", "ttft_p95<700ms@1rps", tuple(BOTH), 1800.0)
    assert found.held
    assert not set(first) & set(lab.calls[len(first) :])


@pytest.mark.parametrize("budget", [120.0, 300.0, 600.0, 3600.0])
@pytest.mark.parametrize("build_seconds", [5.0, 100.0])
def test_the_budget_is_kept_within_a_tenth(tmp_path: Path, budget: float, build_seconds: float) -> None:
    lab = FakeLab(BOTH, shape(rate=2.0))
    lab.build_seconds = build_seconds
    found, _ = search(lab, tmp_path / "j", "ttft_p95<700ms@2rps", tuple(BOTH), budget)
    assert lab.now <= 1.1 * budget
    assert found.held or found.reasons


def test_the_journal_has_simulated_and_measured_values_of_each_setting(tmp_path: Path) -> None:
    lab = FakeLab({"ttft-cpu": FAST}, shape(rate=0.5))
    _, journal = search(lab, tmp_path / "j", "ttft_p95<700ms@0.5rps", ("ttft-cpu",))
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()][1:]
    rows = next(line["result"] for line in lines if line["key"] == "simulate ttft-cpu")
    assert len(rows) > 20 and {"cost", "values", "known", "load"} <= rows[0].keys()
    assert any(line["result"]["records"] for line in lines if line["key"].startswith("race round 0"))
    assert len(journal.trials) == len(lines)


@pytest.mark.parametrize("slo", ["ttft_p95<700ms@2rps", "ttft_p95<700ms@4clients"])
def test_simulations_and_advice_take_the_pace_of_the_calibration(tmp_path: Path, slo: str) -> None:
    objective = parse_slo(slo)
    assert objective.load is not None
    lab = FakeLab({"ttft-cpu": FAST}, shape(rate=objective.load.rate, clients=objective.load.clients))
    journal = Journal(tmp_path / "j", {}, lab.clock)
    made = Search(lab, journal, objective, lab.shape, ("ttft-cpu",), 1800.0, 0)
    setting, requests = Setting("ttft-cpu"), lab.requests(20, 0)
    costs = {}
    for slowness in (1.0, 3.0):
        known = Calibration(FAST, Overheads(), 25.0, Pace((1.0,), (slowness,)))
        made.calibrations = {"ttft-cpu": known}
        simulated = goal.cost(objective, made.simulation(setting, requests.requests).records)
        (half,) = [
            cost for change, cost in single_changes(made, setting, requests) if change.startswith("prompts")
        ]
        costs[slowness] = simulated, half
    journal.close()
    assert all(slow > 2.9 * fast for fast, slow in zip(costs[1.0], costs[3.0], strict=True))
