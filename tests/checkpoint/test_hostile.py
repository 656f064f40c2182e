"""Broken and hostile quantized checkpoints: one line that says what and where, before anything is run or allocated."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optkit.capture import capture_directory
from optkit.checkpoint.source import open_source
from optkit.errors import UserError
from tests.checkpoint.test_compressed import CT, GROUP, changed, int8_layer, refusal, write
from tests.support.packers import AWQ, GPTQ, awq, checkpoint, gptq, quantized

PACKS = {"gptq": gptq, "awq": awq}


def plain() -> Any:
    return quantized(16, 64, 4, 32, symmetric=False, act_order=False, dtype=torch.float16, seed=0)


def read_all(directory: Path) -> None:
    source = open_source(directory)
    for name in source:
        _ = source[name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "'aqlm'"),
        ("gptq", "must be a table"),
        ({"quant_method": ["gptq"]}, "quantized by"),
        (GPTQ | {"bits": 5}, "'bits'"),
        (GPTQ | {"bits": "4"}, "'bits'"),
        (GPTQ | {"bits": True}, "'bits'"),
        (GPTQ | {"group_size": 0.5}, "'group_size'"),
        (GPTQ | {"group_size": -7}, "'group_size'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'checkpoint_format'"),
        (AWQ | {"version": "gemv"}, "'version'"),
        (AWQ | {"zero_point": False}, "'zero_point'"),
    ],
)
def test_settings_that_are_not_the_formats(tmp_path: Path, config: Any, message: str) -> None:
    method = config.get("quant_method") if isinstance(config, dict) else None
    pack = PACKS.get(method, gptq) if isinstance(method, str) else gptq
    write(tmp_path, config, pack(plain()))
    assert message in refusal(partial(open_source, tmp_path))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qweight", lambda t: t.to(torch.int64)),
        ("qweight", lambda t: t[:-1]),
        ("qweight", lambda t: t[None]),
        ("scales", lambda t: t[:, :-1]),
        ("scales", lambda t: t.to(torch.int32)),
        ("scales", lambda t: t * float("nan")),
        ("qzeros", lambda t: t[:, :-1]),
        ("qzeros", None),
        ("scales", None),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, method: str, name: str, change: Any) -> None:
    tensors = PACKS[method](plain())
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    write(tmp_path, {"gptq": GPTQ, "awq": AWQ}[method], tensors)
    assert "a.b" in refusal(partial(read_all, tmp_path))


@pytest.mark.parametrize("value", [-1, 2, 1 << 30])
def test_g_idx_out_of_range(tmp_path: Path, value: int) -> None:
    tensors = gptq(plain())
    tensors["g_idx"][5] = value
    assert "g_idx" in refusal(partial(open_source, write(tmp_path, GPTQ, tensors)))


def test_a_quantized_config_without_quantized_tensors(tmp_path: Path) -> None:
    write(tmp_path, GPTQ, {"weight": torch.zeros(2, 2)})
    assert "no quantized tensor" in refusal(partial(open_source, tmp_path))


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["quant_method", "bits", "group_size", "sym", "checkpoint_format", "dynamic", "version", "zero_point",
        "config_groups", "format", "sparsity_config", "transform_config", "w_bit", "q_group_size"]  # fmt: skip


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["gptq", "awq", "ct"]), st.sampled_from(KEYS), junk)
def test_any_value_of_any_setting_is_read_or_refused(
    tmp_path: Path, method: str, key: str, value: Any
) -> None:
    config = {"gptq": GPTQ, "awq": AWQ, "ct": CT}[method] | {key: value}
    write(tmp_path, config, int8_layer() if method == "ct" else PACKS[method](plain()))
    try:
        read_all(tmp_path)
    except UserError as error:
        assert "\n" not in str(error)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["targets", "weights", "input_activations", "format"]), junk)
def test_any_value_in_a_group_is_read_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, changed((*GROUP, key), value), int8_layer())
    try:
        read_all(tmp_path)
    except UserError as error:
        assert "\n" not in str(error)


# -- against the model -------------------------------------------------------------------------------------


def test_layers_of_another_shape_than_the_config_says(tmp_path: Path) -> None:
    checkpoint(tmp_path, gptq, GPTQ, num_hidden_layers=1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 128}))
    assert "in its config" in refusal(partial(capture_directory, tmp_path))


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    checkpoint(tmp_path, gptq, GPTQ, num_hidden_layers=2)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    assert "no linear layer" in refusal(partial(capture_directory, tmp_path))
