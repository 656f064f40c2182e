"""Hostile and broken checkpoints: each is refused with one line, before any library opens it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optkit.checkpoint.validate import INDEX, SINGLE, CheckpointInfo, validate_checkpoint
from optkit.errors import UserError

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 32}
WEIGHT = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
fuzz = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shard(header: Any = WEIGHT, data: bytes = bytes(24)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small valid checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / SINGLE).write_bytes(shard())
    return tmp_path


def make_sharded(model: Path, mapping: Any) -> Path:
    (model / SINGLE).unlink()
    (model / "a.safetensors").write_bytes(shard())
    (model / INDEX).write_text(json.dumps({"weight_map": mapping}))
    return model


def refusal(model: Path) -> str:
    with pytest.raises(UserError) as caught:
        validate_checkpoint(model)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_valid_checkpoint(model: Path) -> None:
    info = validate_checkpoint(model)
    assert info.config == CONFIG
    assert info.tensors["w"].shape == (2, 3)
    assert info.tensors["w"].dtype == "F32"
    assert info.tensors["w"].file == model / SINGLE


def test_a_valid_sharded_checkpoint(model: Path) -> None:
    info = validate_checkpoint(make_sharded(model, {"w": "a.safetensors"}))
    assert info.tensors["w"].file == model / "a.safetensors"


# -- code -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        {"auto_map": {"AutoModel": "evil.Model"}},
        {"text_config": {"deep": [{"auto_map": {}}]}},
        {"vision_config": {"trust_remote_code": True}},
        {"_attn_implementation": "someone/kernel"},
    ],
)
def test_references_to_code_are_refused_wherever_they_are(
    model: Path, file: str, content: dict[str, Any]
) -> None:
    (model / file).write_text(json.dumps(CONFIG | content))
    assert file in refusal(model)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".PT"])
def test_pickles_are_refused_by_name(model: Path, suffix: str) -> None:
    (model / f"pytorch_model{suffix}").write_bytes(b"x")
    assert "safetensors" in refusal(model)


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02", b"\x80\x04"])
def test_pickles_are_refused_by_content(model: Path, start: bytes) -> None:
    (model / SINGLE).write_bytes(start + bytes(100))
    assert "pickle" in refusal(model)


def test_an_adapter_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(model)


def test_another_weights_file_is_refused(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"transformers_weights": "../x.safetensors"}))
    assert "transformers_weights" in refusal(model)


# -- paths ------------------------------------------------------------------------------------------

HOSTILE = [
    "../a.safetensors",
    "/etc/passwd",
    "/dev/zero",
    "sub/a.safetensors",
    "C:\\a.safetensors",
    "..\\a.safetensors",
    "a\x00.safetensors",
    "a.safetensors\n",
    "․․/a.safetensors",
    "",
    ".",
    "..",
    "a.bin",
    "x" * 200 + ".safetensors",
    7,
    None,
    ["a.safetensors"],
    {},
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shard_names_are_refused(model: Path, name: Any) -> None:
    assert INDEX in refusal(make_sharded(model, {"w": name}))


@pytest.mark.parametrize(
    ("mapping", "part"),
    [
        ({"w": "b.safetensors"}, "b.safetensors is missing"),
        ({"w": "a.safetensors", "v": "a.safetensors"}, "'v' is not in a.safetensors"),
        ({"v": "a.safetensors"}, "not listed"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_disagrees_with_its_shards(model: Path, mapping: Any, part: str) -> None:
    assert part in refusal(make_sharded(model, mapping))


def to_etc(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def to_sibling(path: Path) -> None:
    outside = path.parent.parent / "outside.json"
    outside.write_text("{}")
    path.symlink_to(outside)


def to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [to_etc, to_sibling, to_itself, os.mkfifo])
def test_links_out_and_pipes_are_refused(model: Path, make: Callable[[Path], None]) -> None:
    make(model / "extra.json")
    assert "extra.json" in refusal(model)


def test_links_into_the_blobs_of_a_hub_snapshot_are_allowed(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--o--m" / "blobs", tmp_path / "models--o--m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", SINGLE):
        (model / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert "w" in validate_checkpoint(snapshot).tensors


# -- contents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1025},
        {"max_position_embeddings": 0},
        {"n_positions": 1},
        {"hidden_size": 1 << 40},
        {"vocab_size": (1 << 21) + 1},
        {"vocab_size": -1},
        {"vocab_size": "many"},
        {"vocab_size": True},
        {"vocab_size": 1e3},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"intermediate_size": [8, 1 << 60]},
        {"model_type": None},
    ],
)
def test_config_bounds(model: Path, change: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | change))
    assert "config.json" in refusal(model)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a":1,"a":2}', "[" * 100_000, "\udcff", "{" + "1" * 10_000 + "}"]
)
def test_config_that_is_not_json(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "JSON" in refusal(model)


def test_what_is_missing_is_named(model: Path) -> None:
    (model / SINGLE).unlink()
    assert "no weights" in refusal(model)
    (model / "config.json").unlink()
    assert "no config.json" in refusal(model)
    assert "no such directory" in refusal(model / "nowhere")


# -- fuzz -------------------------------------------------------------------------------------------

numbers = st.integers(-(1 << 70), 1 << 70) | st.integers(0, 30)
scalars = st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


def outcome(model: Path) -> None:
    try:
        assert isinstance(validate_checkpoint(model), CheckpointInfo)
    except UserError as error:
        assert error.what


@fuzz
@given(
    st.dictionaries(
        st.sampled_from([*CONFIG, "auto_map", "text_config", "n_inner"]) | st.text(max_size=5), anything
    )
)
def test_fuzzed_configs(model: Path, change: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | change))
    outcome(model)


@fuzz
@given(anything)
def test_fuzzed_indexes(model: Path, mapping: Any) -> None:
    if (model / SINGLE).exists():
        make_sharded(model, {})
    (model / INDEX).write_text(json.dumps({"weight_map": {"w": mapping}}))
    outcome(model)
