"""``optkit.tune``: arguments, defaults, and a whole run on a machine of simulations."""

from __future__ import annotations

from pathlib import Path

import pytest

import optkit
from optkit.api.tune import default_recipes, named, parse_budget
from optkit.bench.slo import parse_slo
from optkit.errors import UserError
from tests.support.tuning_lab import FAST, SLOW, FakeLab


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("2h", 7200), ("90s", 90), ("5", 300), ("1.5 min", 90), (75.0, 75)]
)
def test_a_budget_has_a_unit_and_minutes_without(text: str | float, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5m", "5 days", "1s", 0.0, float("nan"), float("inf")])
def test_a_wrong_budget_is_a_user_error(text: str | float) -> None:
    with pytest.raises(UserError):
        parse_budget(text)


def test_the_default_recipe_is_the_one_for_the_objective() -> None:
    assert default_recipes(parse_slo("ttft<700"))[0] == "ttft-cpu"
    assert default_recipes(parse_slo("tpot<20"))[0] == "edge-cpu"
    assert default_recipes(parse_slo("throughput>20"))[0] == "throughput-cpu"
    assert {"baseline", "ttft-cpu"} <= set(default_recipes(parse_slo("tpot<20")))


def test_recipes_are_named_by_themselves(tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("schema_version: 1\nname: mine\nextends: baseline\n")
    assert named(["ttft-cpu", str(file)]) == {"ttft-cpu": "ttft-cpu", "mine": str(file)}
    with pytest.raises(UserError, match="two recipes are named"):
        named(["ttft-cpu", "ttft-cpu"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo": "ttft"}, "is no bound"),
        ({"slo": "ttft_p50<=0.5x baseline"}, "compares two sides"),
        ({"budget": "never"}, "is no time"),
        ({"recipes": ["ttft-h100"]}, "tuning is for CPUs"),
        ({"recipes": ["no-such"]}, "no such recipe"),
        ({"input_len": 0}, "input_len must be positive"),
        ({"slo": "95%:ttft<700ms,tpot<20ms", "output_len": 1}, "answers of 1 token have no tpot"),
    ],
)
def test_wrong_arguments_are_user_errors_before_any_work(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        optkit.tune("no-model", **{"slo": "ttft<700", "out": tmp_path / "out"} | options)
    assert not (tmp_path / "out").exists()


class Source:
    digest = "0" * 64


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> list[FakeLab]:
    """The labs that calls of ``optkit.tune`` make."""
    made: list[FakeLab] = []

    def machine(
        model: str, recipes: dict[str, str], directory: Path, shape: object, progress: object
    ) -> FakeLab:
        found = FakeLab({name: SLOW if name == "baseline" else FAST for name in recipes}, shape)
        found.recipes = {name: found.recipe(name) for name in recipes}
        found.conditions, found.source = lambda: {"cpu": "x"}, Source()
        found.check_lengths = lambda: None
        made.append(found)
        return found

    monkeypatch.setattr("optkit.tune.lab.Machine", machine)
    monkeypatch.setattr("optkit.tune.search.SIMULATED_REQUESTS", 16)
    monkeypatch.setattr("optkit.tune.search.SIMULATION_SHARE", 0.0003)
    return made


def test_a_tuning_writes_its_files_and_a_second_call_repeats_nothing(
    tmp_path: Path, lab: list[FakeLab]
) -> None:
    arguments = {"out": tmp_path, "recipes": ["baseline", "ttft-cpu"], "input_len": 64, "output_len": 4}
    report = optkit.tune("my-model", "ttft_p95<700ms@1rps", **arguments)
    assert report.ok and report.exit_code == 0 and report.recipe == "ttft-cpu"
    assert [file.name for file in report.files] == ["recipe.yaml", "report.md", "trials.json"]
    assert optkit.recipe(str(tmp_path / "recipe.yaml")).name == "ttft-cpu"
    assert "Held" in str(report) and report.claim
    lines: list[str] = []
    again = optkit.tune(
        "my-model", "ttft_p95<700ms@1rps", **arguments, progress=lambda e: lines.append(e.text)
    )
    assert lab[1].calls == [] and again.claim == report.claim
    assert any(line.startswith("resuming after") for line in lines)
    with pytest.raises(UserError, match="another task"):
        optkit.tune("my-model", "ttft_p95<800ms@1rps", **arguments)
    assert optkit.tune("my-model", "ttft_p95<1ms@1rps", **arguments, force=True).exit_code == 3


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "recipe.yaml"
    mine.write_text("schema_version: 1\nname: mine\nextends: baseline\n# a comment\n")
    for recipes, force, message in (
        ([str(mine)], True, "the recipe would be overwritten"),
        (["baseline"], False, "the file is of no tuning"),
    ):
        with pytest.raises(UserError, match=message):
            optkit.tune("no-model", slo="ttft<700", out=tmp_path, recipes=recipes, force=force)
    assert "a comment" in mine.read_text() and [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]
