"""A plan: the sites and predictions of the real run, from a config alone, for machines that are not here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optkit.cli import main
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.kernels.cpu import native
from optkit.pipeline.dry_run import dry_run
from optkit.recipe.load import load_recipe, shipped_names
from tests.support.architectures import tiny_model
from tests.support.target import not_measured  # noqa: F401

POINTS = ["prefill 24", "decode@25"]
GRAPHS: dict[Path, Graph] = {}
SETTINGS = ["workload.prompt_tokens=[24]", "workload.output_tokens=4"]


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").config.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def captured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every recipe is planned on the same graph: capturing takes longer than all the rest."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    from optkit import capture

    def once(directory: Path, *, weights: bool, **options: Any) -> Graph:
        assert not weights
        if directory not in GRAPHS:
            GRAPHS[directory] = real(directory, weights=False, **options)
        return GRAPHS[directory].clone()

    real = capture.capture_directory
    monkeypatch.setattr(capture, "capture_directory", once)


@pytest.fixture(scope="module")
def wide(config_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers as wide as those of a 7B model, so that their work counts."""
    config = json.loads((config_only / "config.json").read_text())
    config |= {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "head_dim": 128}
    directory = tmp_path_factory.mktemp("models") / "wide"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("recipe", shipped_names())
def test_a_config_is_enough(config_only: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)  # with AMX there is nothing to smooth
    found = dry_run(str(config_only), load_recipe(recipe, SETTINGS))
    assert list(found["baseline"]) == POINTS and found["model"] == "tiny"
    sites = {record["name"]: len(record["sites"]) for record in found["passes"]}
    assert sites.pop("latent_kv", 0) == 0  # the model has no latents
    assert all(sites.values()) and [file.name for file in config_only.iterdir()] == ["config.json"]
    previous = found["baseline"]
    for record in found["passes"]:
        before = {label: pair[0] for label, pair in record["predicted"].items()}
        assert before == previous  # each pass begins where the one before it ended
        previous = {label: pair[1] for label, pair in record["predicted"].items()}


def test_each_variant_of_a_layer_counts_where_it_runs(wide: Path) -> None:
    """int4 for few tokens is predicted for decoding, fp8 for the prompt."""
    passes = {p["name"]: p for p in dry_run(str(wide), load_recipe("ttft-h100", SETTINGS))["passes"]}
    change = {
        name: {label: after < before for label, (before, after) in passes[name]["predicted"].items()}
        for name in ("gptq", "fp8")
    }
    assert change["gptq"] == dict(zip(POINTS, (False, True), strict=True))
    assert change["fp8"] == dict(zip(POINTS, (True, False), strict=True))


def test_by_the_command(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["optimize", str(config_only), "--recipe", "ttft-h100", "--dry-run"]
    arguments += [word for setting in SETTINGS for word in ("--set", setting)]
    assert main.run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["name"] == "cuda-h100"
    assert main.run(arguments) == 0
    assert "gptq: " in capsys.readouterr().out


def test_a_run_that_can_not_fit_is_said_to_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.pipeline import estimate

    tiny_model("llama").save_pretrained(tmp_path)
    fitting = dry_run(str(tmp_path), load_recipe("baseline", SETTINGS))["estimate"]
    assert "refusal" not in fitting
    monkeypatch.setattr(estimate, "PROCESS_BYTES", 1e15)
    refused = dry_run(str(tmp_path), load_recipe("baseline", SETTINGS))["estimate"]
    assert "GB of memory, this machine has" in refused["refusal"]


def test_a_quantized_model_is_planned_from_its_weights(config_only: Path, tmp_path: Path) -> None:
    config = json.loads((config_only / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="from its weights"):
        dry_run(str(tmp_path), load_recipe("ttft-cpu", SETTINGS))


def test_a_config_is_enough_for_the_sizes(config_only: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    by_config, by_weights = (
        dry_run(str(directory), load_recipe("baseline", SETTINGS))["estimate"]
        for directory in (config_only, tmp_path)
    )
    assert by_config == by_weights and by_config["parameters"] > 0


def test_points_without_a_prediction_are_named_and_the_run_would_be_refused(
    config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.pipeline import dry_run as module

    target, about = module.planning_target("cpu")
    small = replace(target, memory_bytes=1 << 16)
    monkeypatch.setattr(module, "planning_target", lambda name: (small, about))
    plan = dry_run(str(config_only), load_recipe("baseline", SETTINGS))
    assert plan["unpredicted"] == POINTS and not plan["baseline"]
    assert "of memory" in plan["estimate"]["refusal"]
