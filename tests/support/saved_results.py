"""Files of plans, profiles and tunings, written by the code of the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.bench.slo import Load, parse_slo
from optkit.machine import target as targets
from optkit.plan.planner import Request, plan
from optkit.recipe.load import load_recipe
from optkit.tune.journal import Journal
from optkit.tune.lab import Shape
from optkit.tune.outcome import Outcome
from optkit.tune.report import write_files
from optkit.tune.settings import Setting
from tests.support.architectures import tiny_model
from tests.support.recorded import tiny_report
from tests.support.target import TARGET


def plan_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``optkit plan --json`` of a tiny model, for a load."""
    monkeypatch.setattr(targets, "detect", lambda refresh=False: TARGET)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    tiny_model("llama").config.save_pretrained(folder / "tiny")
    recipe = load_recipe("ttft-cpu", ["workload.prompt_tokens=[24, 64]", "workload.output_tokens=8"])
    found = plan(Request(str(folder / "tiny"), recipe, slo="ttft_p95<5000ms@0.1rps"))
    return written(folder / "plan.json", found.to_dict())


def profile_file(folder: Path) -> Path:
    """``optkit profile --json`` of a tiny model."""
    return written(folder / "profile.json", tiny_report().to_dict() | {"files": []})


def tuning_file(folder: Path, *, held: bool = True) -> Path:
    """``trials.json`` of a tuning with two runs."""
    journal = Journal(folder / "journal.jsonl", {})
    run = {"cost": float("inf"), "values": "ttft_p95 453 ms", "requests": 59, "failed": [], "records": []}
    for name in ("race round 0 ttft-cpu", "confirm 0 part 0 ttft-cpu"):
        journal.trial(name, lambda: run)
    outcome = Outcome(
        held=held,
        setting=Setting.of("ttft-cpu", {"max_num_seqs": 4}),
        claim="ttft_p95 453 ms",
        reasons=[] if held else ["order 1: 9 of 59 requests miss it"],
        advice=[] if held else ["what binds: computing the prompt"],
    )
    slo, shape = parse_slo("ttft_p95<650ms@4rps"), Shape(512, 64, Load(rate=4.0))
    write_files(
        folder, outcome, journal, slo, shape, {"ttft-cpu": load_recipe("ttft-cpu")}, {"cpu": "a processor"}
    )
    journal.close()
    return folder / "trials.json"


def written(file: Path, data: object) -> Path:
    file.write_text(json.dumps(data))
    return file
