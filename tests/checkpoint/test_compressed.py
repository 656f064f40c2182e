"""Layers of compressed-tensors checkpoints: the numbers of the library and of the formats' definitions.

Other settings are refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from optkit.checkpoint.compressed import Scheme, scheme_of
from optkit.checkpoint.source import open_source
from optkit.errors import UserError
from optkit.kernels import reference
from tests.support.packers import BITS_AND_GROUPS, compressed, one_layer


def ct_config(
    weights: dict[str, Any], format: str, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "dynamic": False, **weights}}
    group |= {"input_activations": activations, "format": format}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CT = ct_config({"num_bits": 8, "symmetric": True, "strategy": "channel"}, "int-quantized")
GROUP = ("config_groups", "group_0")


def write(directory: Path, config: Any, tensors: dict[str, Tensor]) -> Path:
    save_file({f"a.b.{k}": v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return directory


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def int8_layer() -> dict[str, Tensor]:
    return {"weight": torch.zeros(16, 64, dtype=torch.int8), "weight_scale": torch.ones(16, 1)}


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CT))
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return config


def by_library(layer: Any, scheme: Any, act_order: bool) -> dict[str, torch.Tensor]:
    """The library's tensors; with act-order, which its newest versions no longer write, as older ones wrote it."""
    if not act_order:
        return compressed(layer, scheme)
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    middle = 1 << (layer.bits - 1)
    packed = compressed(layer, scheme)
    packed["weight_packed"] = pack_to_int32(torch.from_numpy(layer.codes - middle).to(torch.int8), layer.bits)
    return packed


@pytest.mark.parametrize("options", [o for o in BITS_AND_GROUPS if o.get("group") != 64])
def test_pack_quantized_layers(tmp_path: Path, options: dict[str, Any]) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    group = options.get("group", 32)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": options.get("bits", 4), "symmetric": options.get("symmetric", True), **strategy}
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    pack = partial(by_library, scheme=scheme, act_order=bool(options.get("act_order")))
    layer, plain = one_layer(tmp_path, pack, ct_config(weights, "pack-quantized"), **options)
    torch.testing.assert_close(layer.float_weight(), plain.weight(), atol=1e-3, rtol=1e-2)
    if options.get("dtype") is None:
        torch.testing.assert_close(layer.float_weight(), plain.weight())


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize(
    ("strategy", "scale_shape"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (16, 1)),
        ({"strategy": "group", "group_size": 16}, (16, 4)),
        ({"strategy": "block", "block_structure": [8, 32]}, (2, 2)),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else "",
)
def test_unpacked_layers_are_codes_times_scales(
    tmp_path: Path, strategy: dict[str, Any], scale_shape: tuple[int, ...], floating: bool
) -> None:
    weight = torch.randint(-100, 100, (16, 64)).to(torch.float8_e4m3fn if floating else torch.int8)
    scale = torch.rand(scale_shape) + 0.5
    kind, stored = ("float", "float-quantized") if floating else ("int", "int-quantized")
    config = ct_config({"num_bits": 8, "type": kind, **strategy}, stored)
    layer = open_source(write(tmp_path, config, {"weight": weight, "weight_scale": scale})).layers["a.b"]
    wide = scale if scale.ndim == 1 else torch.kron(scale, torch.ones(16 // len(scale), 64 // scale.shape[1]))
    torch.testing.assert_close(layer.float_weight(), weight.float() * wide, rtol=1e-6, atol=0)
    assert layer.op is (reference.linear_fp8 if floating else reference.linear_w8a16)


@pytest.mark.parametrize(
    ("kind", "activations", "op", "group", "options"),
    [
        ("int", {"dynamic": True, "strategy": "token"}, reference.linear_w8a8, 0, {}),
        (
            "float",
            {"dynamic": True, "strategy": "token"},
            reference.linear_fp8,
            None,
            {"activations": "token"},
        ),
        (
            "float",
            {"dynamic": False, "strategy": "tensor"},
            reference.linear_fp8,
            None,
            {"activations": "tensor"},
        ),
    ],
)
def test_activations_choose_the_op(
    tmp_path: Path,
    kind: str,
    activations: dict[str, Any],
    op: Any,
    group: int | None,
    options: dict[str, str],
) -> None:
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    tensors = {"weight": torch.zeros(16, 64).to(dtype), "weight_scale": torch.ones(16, 1)}
    tensors |= {} if activations["dynamic"] else {"input_scale": torch.tensor(0.25)}
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    config = ct_config(weights, f"{kind}-quantized", {"num_bits": 8, "type": kind, **activations})
    layer = open_source(write(tmp_path, config, tensors)).layers["a.b"]
    assert (layer.op, layer.activation_group, layer.options) == (op, group, options)
    if not activations["dynamic"]:
        assert layer.operands["input_scale"].tolist() == [0.25]


def test_scheme_of_a_layer_is_by_name_before_pattern_before_class() -> None:
    schemes = [
        Scheme((target,), bits, False, True, 0, None)
        for target, bits in (("Linear", 2), ("re:model.*q_proj$", 3), ("model.0.q_proj", 4))
    ]
    names = ("model.0.q_proj", "model.1.q_proj", "model.1.k_proj")
    assert [scheme_of(name, schemes, "there").bits for name in names] == [4, 3, 2]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("quantization_status",), "frozen", "not compressed"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparse"),
        (("transform_config",), {"r1": {}}, "transforms"),
        (("config_groups",), [], "config_groups"),
        (("config_groups",), {}, "config_groups"),
        ((*GROUP, "weights"), None, "no 'weights'"),
        ((*GROUP, "targets"), "Linear", "'targets'"),
        ((*GROUP, "targets"), ["a.c"], "no group"),
        ((*GROUP, "targets"), ["re:(a+)+$"], "no simple pattern"),
        ((*GROUP, "targets"), ["re:[a"], "no simple pattern"),
        ((*GROUP, "targets"), ["re:(a"], "no regular expression"),
        ((*GROUP, "format"), "nvfp4-pack-quantized", "'format'"),
        ((*GROUP, "weights", "strategy"), "tensor_group", "'strategy'"),
        ((*GROUP, "weights", "symmetric"), False, "symmetric int8"),
        ((*GROUP, "input_activations"), {"num_bits": 8, "dynamic": False}, "static int8"),
        ((*GROUP, "input_activations"), {"num_bits": 4, "dynamic": True}, "'num_bits'"),
        ((*GROUP, "output_activations"), {"num_bits": 8}, "output activations"),
    ],
)
def test_compressed_settings(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    write(tmp_path, changed(path, value), int8_layer())
    assert message in refusal(partial(open_source, tmp_path))


def test_patterns_of_a_checkpoint_take_no_time(tmp_path: Path) -> None:
    hostile = "re:" + ".*" * 3 + "x"
    tensors = {f"{'a' * 100}{i}.{k}": v.clone() for i in range(20) for k, v in int8_layer().items()}
    write(tmp_path, changed((*GROUP, "targets"), [hostile, "Linear"]), tensors)
    start = time.monotonic()
    open_source(tmp_path)
    assert time.monotonic() - start < 30
