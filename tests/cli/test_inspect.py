"""``optkit inspect``: passes, bounds, files, the graph with its kernels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from optkit.artifact.manifest import MANIFEST, write_manifest
from optkit.artifact.open import Artifact
from optkit.cli.inspect import state_facts, state_lines
from optkit.cli.main import run
from optkit.errors import printable
from optkit.graph.ir import GraphMeta
from optkit.graph.states import KVSpec, RecurrentSpec, StateSpec
from optkit.kernels import triton
from optkit.pipeline import choice_here
from optkit.pipeline.choice_here import Forecast, PlaceChoice
from optkit.pipeline.records import RunRecord
from optkit.recipe.load import parse_recipe
from tests.support.sample_artifact import fake_artifact, int8_record, real_artifact, sample_run

Output = pytest.CaptureFixture[str]
RECIPE = """\
schema_version: 1
name: small
target: cuda-h100
passes:
  int8: {accept: {max_kld: 0.01, min_speedup: 1.5}}
  fuse_qkv: {accept: {min_speedup: 1.0}}
accept: {max_kld: 0.02, max_memory_bytes: 200MB}
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return real_artifact(tmp_path / "artifact", tmp_path / "source", RECIPE, sample_run())


def test_inspect_shows_passes_reasons_bounds_and_files(made: Path, capsys: Output) -> None:
    assert run(["inspect", str(made)]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "small by small, for cuda-h100",
        "int8: kept, prefill 2.00x",
        "skips 3: on the ignore list (first: down_proj)",
        "flash_attention: rolled back, prefill speedup 0.900 is below 1.000",
        "3 of 9 predictions are more than 20% off: int8, prefill 512: predicted 4.00x, measured 1.00x",
        "whole max_memory_bytes",
        "model.safetensors",
        "optkit/graph.json",
    ):
        assert expected in shown


def test_inspect_names_the_variants_when_layers_have_several(tmp_path: Path, capsys: Output) -> None:
    record = sample_run()
    assert record.whole is not None
    record.whole.variants = dict.fromkeys(("up to 4 tokens", "more than 4 tokens"), record.whole.quality)
    made = real_artifact(tmp_path / "artifact", tmp_path / "source", RECIPE, record)
    assert run(["inspect", str(made)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "variants up to 4 tokens, more than 4 tokens in a step: answers depend on the number of tokens"
        in shown
    )
    assert run(["inspect", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forms"] == ["up to 4 tokens", "more than 4 tokens"]


def test_inspect_shows_bounds_of_a_pass_under_its_present_name_when_the_artifact_has_the_former_one(
    tmp_path: Path, capsys: Output
) -> None:
    text = RECIPE.replace("  int8:", "  select_logits_rows:")
    former = RunRecord([int8_record(name="prune_rows")], None)
    made = real_artifact(tmp_path / "artifact", tmp_path / "source", text, former)
    recipe = made / "optkit" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("select_logits_rows", "prune_rows"))
    manifest = json.loads((made / MANIFEST).read_text())
    (made / MANIFEST).unlink()
    write_manifest(made, {key: manifest[key] for key in manifest if key not in ("files", "digest")})
    assert run(["inspect", str(made), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["passes"][0]["name"] == "select_logits_rows"
    assert {bound["of"] for bound in shown["bounds"]} == {"select_logits_rows"}


@pytest.mark.parametrize(("group_size", "limit"), [(64, 0.5), (32, 0.01)])
def test_inspect_shows_the_bounds_of_the_chosen_candidate(
    tmp_path: Path, capsys: Output, group_size: int, limit: float
) -> None:
    candidates = "".join(
        f"    - int8: {{group_size: {size}, accept: {{max_kld: {bound}}}}}\n"
        for size, bound in ((64, 0.5), (32, 0.01))
    )
    text = f"schema_version: 1\nname: small\npasses:\n  layers:\n    one_of:\n{candidates}"
    run_record = RunRecord([int8_record(config={"group_size": group_size})], None)
    made = real_artifact(tmp_path / "artifact", tmp_path / "source", text, run_record)
    assert run(["inspect", str(made), "--json"]) == 0
    (bound,) = json.loads(capsys.readouterr().out)["bounds"]
    assert (bound["of"], bound["limit"]) == ("int8", limit)


def test_inspect_has_no_line_of_variants_when_layers_have_one(made: Path, capsys: Output) -> None:
    assert run(["inspect", str(made)]) == 0
    assert "variants" not in capsys.readouterr().out


def test_inspect_json_has_records_and_bounds_with_measured_values(made: Path, capsys: Output) -> None:
    assert run(["inspect", str(made), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passes"][0] == int8_record().to_dict()
    assert data["recipe"]["name"] == "small"
    bounds = {(row["of"], row["bound"]): (row["limit"], row["measured"]) for row in data["bounds"]}
    assert bounds == {
        ("int8", "max_kld"): (0.01, 0.004),
        ("int8", "min_speedup"): (1.5, pytest.approx(2.0)),
        ("fuse_qkv", "min_speedup"): (1.0, None),
        ("whole", "max_kld"): (0.02, 0.004),
        ("whole", "max_memory_bytes"): (200_000_000, 100_000_000),
    }


def test_inspect_graph_lists_ops_with_shapes_of_the_given_length(made: Path, capsys: Output) -> None:
    assert run(["inspect", str(made), "--graph", "--tokens", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "embedding = embedding(embed.weight, input_ids)  # [5, 8]",
        "select_rows = select_rows(embedding, logits_index)  # [1, 8]",
        "linear = linear(select_rows, lm_head.weight)  # [1, 8]"
        + ("  <triton>" if triton.available() else ""),
    ]
    assert run(["inspect", str(made), "--graph", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graph"] == lines


def test_inspect_exits_with_2_when_a_file_was_changed(made: Path, capsys: Output) -> None:
    (made / "config.json").write_text("{}")
    assert run(["inspect", str(made)]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"passes": [1], "whole": null}', '{"passes": [{}], "whole": null}']
)
def test_inspect_exits_with_2_when_the_report_is_unreadable(
    tmp_path: Path, capsys: Output, text: str
) -> None:
    made = fake_artifact(tmp_path / "artifact")
    (made / "optkit" / "report.json").write_text(text)
    (made / MANIFEST).unlink()
    write_manifest(made, {"name": "fake"})
    assert run(["inspect", str(made)]) == 2
    assert "the report can't be read" in capsys.readouterr().err


def test_printable_spells_control_characters_out() -> None:
    assert printable("a\x1b[2J\n\x9b\u202e é") == "a\\x1b[2J\\n\\x9b\\u202e é"


def test_inspect_here_shows_the_predicted_choice(
    made: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["inspect", str(made), "--here"]) != 0  # an artifact without candidates
    assert "there are no candidates to choose from" in capsys.readouterr().err
    forecasts = {"": Forecast(4.0, 2.0), "int8": Forecast(2.0, 1.0), "w4a8": Forecast(1.0, 1.0)}
    choice = PlaceChoice("layers", False, ("int8", "int8"), ("w4a8", "int8"), forecasts)
    monkeypatch.setattr(choice_here, "predict_here", lambda directory: ([choice], "would choose w4a8"))
    (made / "optkit" / "candidates.json").write_text("{}")
    (made / MANIFEST).unlink()
    write_manifest(made, {"name": "small"})
    assert run(["inspect", str(made), "--here"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["w4a8", "0.50x", "1.00x", "best", "for", "prompts"] in shown
    assert ["none", "2.00x", "2.00x"] in shown
    assert shown[-1] == ["would", "choose", "w4a8"]
    assert run(["inspect", str(made), "--here", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["choices"][0]["best"] == ["w4a8", "int8"] and data["sentence"] == "would choose w4a8"


# -- memory of states --------------------------------------------------------------------------------------

HYBRID = (
    KVSpec(0, 2, 16, 16),
    RecurrentSpec(1, "ssm_state", (4, 8, 16)),
)  # 256 bytes a token, 2048 a sequence


@pytest.mark.parametrize(
    ("states", "size", "lines"),
    [
        (
            HYBRID,
            "1MiB",
            [
                "states  256 bytes of KV a token, 2,048 bytes of recurrent states a sequence",
                # 8 requests in 16 KiB of at most 512, 128 checkpoints in 256 KiB, KV in 768 KiB - 16 KiB
                "states  kv_cache_bytes of the recipe holds 3,008 tokens of KV, the recurrent states of 8 requests "
                "and 128 checkpoints",
            ],
        ),
        (
            HYBRID[:1],
            "1MiB",
            [
                "states  256 bytes of KV a token",
                "states  kv_cache_bytes of the recipe holds 4,096 tokens of KV",
            ],
        ),
        (
            HYBRID[1:],
            "64KiB",
            [
                "states  2,048 bytes of recurrent states a sequence",
                "states  kv_cache_bytes of the recipe holds the recurrent states of 8 requests and 24 checkpoints",
            ],
        ),
        (
            HYBRID,
            "8KiB",
            [
                "states  256 bytes of KV a token, 2,048 bytes of recurrent states a sequence",
                "states  8,192 bytes of KV cache do not hold 2 recurrent states and 4 checkpoints and two blocks "
                "(20,480 bytes)",
            ],
        ),
        ((), "1MiB", []),
    ],
)
def test_inspect_states_the_memory_of_a_token_and_a_sequence(
    states: tuple[StateSpec, ...], size: str, lines: list[str]
) -> None:
    recipe = parse_recipe(
        RECIPE.replace("cuda-h100", "cpu")
        + f"runtime: {{kv_cache_bytes: {size}, max_num_seqs: 8, block_size: 16}}\n"
    )
    meta = GraphMeta("bamba", 8, 64, states, "embed.weight", "lm_head")
    assert list(state_lines(cast(Artifact, SimpleNamespace(recipe=recipe, meta=lambda: meta)))) == lines


def test_inspect_leaves_the_memory_of_states_to_the_start_on_a_gpu() -> None:
    meta = GraphMeta("bamba", 8, 64, HYBRID, "embed.weight", "lm_head")
    artifact = cast(Artifact, SimpleNamespace(recipe=parse_recipe(RECIPE), meta=lambda: meta))
    assert state_facts(artifact) == {"token_bytes": 256, "sequence_bytes": 2048}
