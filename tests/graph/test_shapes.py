"""Shape rules: what their references compute, and refusals where broadcasting would let something pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.graph import shapes
from optkit.graph.ir import Graph
from optkit.graph.ops import shape_rule
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import reference
from optkit.pipeline.records import RunRecord
from tests.support.graphs import apply, captured
from tests.support.hostile_artifact import native_artifact
from tests.support.sample_artifact import real_artifact

POINTS = (Point(5, 2, 5), Point(2, 2, 33))


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.is_contiguous()
    return [described(each) for each in value] if isinstance(value, tuple | list) else value


def every(graph: Graph, point: Point) -> dict[str, Any]:
    return {node.name: described(value) for node, value in infer_shapes(graph, point).items()}


@pytest.mark.parametrize("quantizer", [None, "int8", "w4a8"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "qwen3_moe"])
def test_rules_agree_with_references(
    name: str, quantizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = captured(name)
    for each in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm"):
        apply(graph, each)
    if quantizer == "int8":
        apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    elif quantizer:
        apply(graph, quantizer)
    by_rule = [every(graph, point) for point in POINTS]
    monkeypatch.setattr(shapes.ops, "shape_rule", lambda target: target)
    assert by_rule == [every(graph, point) for point in POINTS]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "y", [meta(3, 64), meta(64), meta(3, 64, dtype=torch.bfloat16), meta(64, 3).T, 2, 0.5]
)
@pytest.mark.parametrize("options", [{}, {"alpha": 1}, {"alpha": 3}])
def test_the_rule_of_a_sum_is_that_of_torch(y: Tensor | float, options: dict[str, int]) -> None:
    op, x = torch.ops.aten.add.Tensor, meta(3, 64)
    by_rule, by_torch = shape_rule(op)(x, y, **options), op(x, y, **options)
    assert described(by_rule) == described(by_torch) and by_rule.stride() == by_torch.stride()


@pytest.mark.parametrize(("y", "alpha"), [(meta(3, 65), 1), (meta(3, 64), "1"), (meta(3, 64), None)])
def test_a_sum_that_torch_refuses_is_refused(y: Tensor, alpha: Any) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        shape_rule(torch.ops.aten.add.Tensor)(meta(3, 64), y, alpha=alpha)


X, F8 = meta(3, 64), meta(3, 64, dtype=torch.float8_e4m3fn)
FUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (reference.quantize_fp8_per_token, (X,), {}),
    (reference.rms_norm_quantize, (X, meta(64), 1e-5, 0.0), {"fmt": "fp8"}),
    (reference.add_rms_norm_quantize, (X, X, meta(64), 1e-5), {}),
    (reference.silu_mul_quantize, (X,), {"fmt": "fp8"}),
    (reference.gelu_mul_quantize, (X,), {"approximate": "tanh"}),
    (
        reference.linear_fp8_rowwise,
        (F8, meta(3, 1), meta(8, 64, dtype=torch.float8_e4m3fn), meta(8, 1), meta(8)),
        {"dtype": "bfloat16"},
    ),
]


@pytest.mark.parametrize(("op", "args", "options"), FUSED)
def test_rules_of_fused_ops_agree_with_references(
    op: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert described(shape_rule(op)(*args, **options)) == described(op(*args, **options))


Q, W8, W4 = meta(3, 64, dtype=torch.uint8), meta(8, 64, dtype=torch.int8), meta(8, 8, dtype=torch.int32)
REFUSED: list[tuple[Any, tuple[Any, ...], str]] = [
    (reference.rms_norm, (meta(3, 64), meta(1), 1e-5), "norm weight"),
    (reference.add_rms_norm, (meta(3, 64), meta(1, 64), meta(64), 1e-5), "residual"),
    (reference.rope, (meta(3, 2, 7), meta(3, 7), meta(3, 7)), "even"),
    (reference.rope, (meta(3, 2, 8), meta(1, 8), meta(1, 8)), "cosines"),
    (reference.silu_mul, (meta(3, 64), meta(1, 64)), "same shape"),
    (reference.silu_mul_packed, (meta(3, 7),), "halves"),
    (reference.quantize_per_token, (meta(3, 64), 48), "groups of 48"),
    (reference.linear_w8a8, (Q, meta(3, 1), W8, meta(8, 2)), "scale a group"),
    (reference.linear_w8a8, (meta(3, 64), meta(3, 2), W8, meta(8, 2)), "uint8"),
    (reference.linear_w8a8, (Q, meta(3, 5), W8, meta(8, 5)), "5 groups"),
    (reference.linear_w8a8, (Q, meta(3, 2), W8, meta(8, 2), meta(1)), "bias"),
    (reference.linear_w8a8, (Q, meta(3, 2), meta(8, 32, dtype=torch.int8), meta(8, 2)), "int8 weights"),
    (reference.linear_w8a16, (meta(3, 64), W8, meta(1, 2)), "weight scales"),
    (reference.linear_w8a16, (Q, W8, meta(8, 2)), "float"),
    (reference.linear_w4a8, (meta(3, 64), meta(3, 2), W4, meta(8, 2), None), "uint8"),
    (reference.linear_w4a8, (Q, meta(3, 2), W4, meta(1, 2), None), "scales"),
    (reference.rms_norm_quantize, (X, meta(64), 1e-5, 0.0, "int4"), "int8 or fp8"),
    (reference.linear_fp8_rowwise, (Q, meta(3, 1), F8, meta(3, 1)), "float8"),
    (reference.linear_fp8_rowwise, (F8, meta(1), F8, meta(3, 1)), "scales"),
]


@pytest.mark.parametrize(("op", "args", "reason"), REFUSED)
def test_what_does_not_fit_is_refused(op: Any, args: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        shape_rule(op)(*args)


def test_opening_an_artifact_leaves_the_compiler_alone(tmp_path: Path) -> None:
    recipe = "schema_version: 1\nname: small\n"
    small = real_artifact(tmp_path / "a", tmp_path / "source", recipe, RunRecord([], None))
    code = "import sys; from optkit.artifact.open import Artifact; "
    code += "[Artifact.open(each).executable() for each in sys.argv[1:]]; "
    code += "sys.exit(bool({'torch._dynamo', 'sympy'} & {*sys.modules}))"
    directories = [str(small), str(native_artifact(tmp_path / "llama"))]
    assert subprocess.run([sys.executable, "-c", code, *directories]).returncode == 0


def test_values_of_numbers_alone_are_on_the_meta_device() -> None:
    graph = captured("llama")
    last = next(node for node in graph.fx.nodes if node.op == "output")
    with graph.fx.inserting_before(last):
        full = graph.fx.call_function(torch.ops.aten.full.default, ([3, 2], 1.5))
        total = graph.fx.call_function(torch.ops.aten.sum.default, (full,))
        last.args = (graph.fx.call_function(torch.ops.aten.add.Tensor, (last.args[0], total)),)
    values = infer_shapes(graph, Point(5, 2, 5))
    assert values[full].device.type == "meta" and values[full].shape == (3, 2)
