"""The written recipe reads back, with the evidence as comments; the artifact serves with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optkit.bench.slo import Load, parse_slo
from optkit.recipe.engine_options import engine_options
from optkit.recipe.load import load_recipe, parse_recipe
from optkit.tune.intervals import Ratio
from optkit.tune.journal import Journal, TrialFailed
from optkit.tune.lab import Shape
from optkit.tune.outcome import Outcome
from optkit.tune.report import evidence, markdown, recipe_text, write_artifact, write_files
from optkit.tune.settings import Setting

SLO = parse_slo("ttft_p95<650ms@4rps")
SHAPE = Shape(512, 64, Load(rate=4.0))
ORDERS = [
    {"order": n, "requests": 59, "cost": 0.7 + n / 100, "values": f"ttft_p95 {450 + n} ms", "missing": []}
    for n in (1, 2, 3)
]


def outcome(**options: object) -> Outcome:
    return Outcome(
        held=True,
        setting=Setting.of("ttft-cpu", options),
        default=Setting("ttft-cpu"),
        claim="ttft_p95 453 ms",
        orders=ORDERS,
        effects={"max_num_seqs": Ratio(0.8, 0.75, 0.86)} if options else {},
        against_default=Ratio(0.8, 0.75, 0.86) if options else None,
    )


def test_the_recipe_has_the_options_and_the_evidence_beside_each() -> None:
    text = recipe_text(load_recipe("ttft-cpu"), outcome(max_num_seqs=4), SLO, SHAPE)
    recipe = parse_recipe(text)
    assert recipe.runtime.max_num_seqs == 4 and recipe.slo.ttft_ms == 650.0
    assert recipe.passes == load_recipe("ttft-cpu").passes
    lines = text.splitlines()
    note = "# runtime.max_num_seqs: 4, was 16; cost 0.800 [0.750, 0.860] of that without the change"
    assert lines[lines.index(note) + 1].startswith("runtime:")
    assert "177 requests in 3 orders of arrival" in text and "the worst: ttft_p95 453 ms" in text


def test_an_order_without_time_is_none_and_the_claim_is_that_of_the_others() -> None:
    unmeasured = {
        "order": 3,
        "requests": 0,
        "cost": float("inf"),
        "values": "",
        "missing": ["the budget ended"],
    }
    early = replace(outcome(), held=False, orders=[*ORDERS[:2], unmeasured])
    (line,) = [line for line in evidence(early, SLO, SHAPE) if line.startswith("NOT SHOWN")]
    assert "118 requests in 2 orders" in line and line.endswith("the worst: ttft_p95 453 ms.")
    none = replace(outcome(), held=False, claim="", orders=[unmeasured])
    assert any("nothing was measured" in line for line in evidence(none, SLO, SHAPE))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduling_policy": "slo", "ttft_slo_ms": 300.0},
        {"kv_cache_bytes": 1 << 30, "max_num_batched_tokens": 256},
        {"speculative_model": "ngram"},
    ],
)
def test_a_server_of_the_recipe_has_the_options_that_were_measured(options: dict[str, object]) -> None:
    recipe = load_recipe("ttft-cpu")
    found = engine_options(parse_recipe(recipe_text(recipe, outcome(**options), SLO, SHAPE)))
    measured = engine_options(recipe, options)
    same = [name for name in type(found).__struct_fields__ if getattr(found, name) != getattr(measured, name)]
    assert set(same) <= {"ttft_slo_ms"}  # the promise, unused by the policy fcfs
    if options.get("scheduling_policy") == "slo":
        assert found == measured


def test_the_log_has_every_trial_and_failed_ones_with_the_reason(tmp_path: Path) -> None:
    def fail() -> None:
        raise TrialFailed("the server | did not start")

    journal = Journal(tmp_path / "journal.jsonl", {})
    journal.trial("race round 0 x", fail)
    journal.trial(
        "simulate ttft-cpu",
        lambda: [
            Setting("ttft-cpu").to_dict()
            | {"cost": 0.5, "known": False, "values": "ttft_p95 1 ms", "reason": "", "load": 0.95}
        ],
    )
    held = outcome(max_num_seqs=4)
    files = write_files(tmp_path, held, journal, SLO, SHAPE, {"ttft-cpu": load_recipe("ttft-cpu")}, {})
    journal.close()
    assert [file.name for file in files] == ["recipe.yaml", "report.md", "trials.json"]
    log = json.loads((tmp_path / "trials.json").read_text())
    assert [trial["reason"] for trial in log["trials"]] == ["the server | did not start", ""]
    assert log["held"] and log["setting"] == {"recipe": "ttft-cpu", "options": {"max_num_seqs": 4}}
    page = (tmp_path / "report.md").read_text()
    assert "the server \\| did not start" in page and "not known" in page and "0.800 [0.750, 0.860]" in page


def test_an_outcome_that_is_not_held_says_so_in_the_recipe_and_the_log(tmp_path: Path) -> None:
    found = outcome()
    found.held, found.reasons, found.advice = False, ["order 2: 3 of 59 requests miss it"], ["what binds: x"]
    journal = Journal(tmp_path / "j", {})
    assert "# NOT SHOWN" in recipe_text(load_recipe("ttft-cpu"), found, SLO, SHAPE)
    page = markdown(found, journal, SLO, SHAPE)
    journal.close()
    assert page.startswith("# optkit tune: not shown") and "what binds: x" in page and "3 of 59" in page


def test_the_artifact_is_a_copy_with_the_tuned_recipe(tmp_path: Path) -> None:
    from optkit.artifact.open import Artifact
    from tests.support.sample_artifact import fake_artifact

    source = fake_artifact(tmp_path / "source")
    before = (source / "optkit" / "recipe.yaml").read_text()
    recipe = Artifact.open(source).recipe
    text = "# measured\n" + recipe.to_yaml().replace("max_num_seqs: 16", "max_num_seqs: 3")
    write_artifact(source, tmp_path / "out", parse_recipe(text), text)
    made = Artifact.open(tmp_path / "out")
    assert made.recipe.runtime.max_num_seqs == 3
    assert made.manifest["recipe"]["runtime"]["max_num_seqs"] == 3
    assert (source / "optkit" / "recipe.yaml").read_text() == before
    assert Artifact.open(source).recipe == recipe
