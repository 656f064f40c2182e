"""Every record: complete or with a stated reason, and true: compared with kernel tables and runs of references."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from optkit import kernels
from optkit.graph import ops
from optkit.graph.ops import RECORDS
from optkit.graph.ops.operands import Role, Source, TensorOperand
from optkit.graph.ops.record import CPU, CUDA, PROGRAM, Op, Work
from optkit.kernels import cpu, reference
from optkit.kernels import triton as gpu
from optkit.kernels.collectives import Threads, using
from optkit.lowering import cost
from tests.support.op_calls import sound_call

EACH = pytest.mark.parametrize("op", RECORDS.values(), ids=lambda op: op.name)
ROWS = {Role.ACTIVATION, Role.ACTIVATION_SCALE, Role.TABLE}
needs_triton = pytest.mark.skipif(not gpu.available(), reason="triton is not installed")


def real(op: Op, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """A sound call on numbers: tensors of the shapes of ``sound_call`` with random values."""
    generator = torch.Generator().manual_seed(seed)
    args, options = sound_call(op)
    return [values(operand, like, generator) for operand, like in zip(op.tensors, args, strict=True)], options


def values(operand: TensorOperand, like: Tensor, generator: torch.Generator) -> Tensor:
    if operand.name == "g_idx":
        return torch.randint(0, 2, like.shape, generator=generator, dtype=like.dtype)
    if operand.name == "experts":
        return torch.arange(like.numel()).view(like.shape) % 4
    if operand.source is Source.BATCH or operand.role is Role.BATCH or like.dtype is torch.int64:
        return torch.arange(like.numel()).view(like.shape).to(like.dtype)
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator).abs().add(0.1).to(like.dtype)
    limits = torch.iinfo(like.dtype)
    return torch.randint(limits.min, limits.max, like.shape, generator=generator, dtype=like.dtype)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Ops that exchange tensors run in a group of one rank."""
    with using(Threads(1).ranks[0]):
        yield


# -- complete ----------------------------------------------------------------------------------------------


@EACH
def test_record_names_a_function_of_the_reference_and_its_parameters(op: Op) -> None:
    assert getattr(reference, op.name) is op.reference
    assert list(op.positions) == list(inspect.signature(op.reference).parameters)
    assert op.operands[: len(op.tensors)] == op.tensors


def test_every_kind_of_work_has_a_cost_rule() -> None:
    assert set(cost.RULES) == set(Work)
    assert {op.work for op in RECORDS.values()} == set(Work)


def lacks(op: Op, where: str, found: bool) -> str:
    """The message of a failure; empty where the op is there or its absence has a reason, and not both."""
    if found and where in op.absent:
        return f"{op.name} has a {where} implementation and a reason for having none"
    if not found and len(op.absent.get(where, "")) < 10:
        return f"{op.name} has no {where} implementation: write it, or state the reason in its record"
    return ""


@EACH
def test_record_has_a_cpu_kernel_or_a_reason(op: Op) -> None:
    assert not lacks(op, CPU, any(kernel.op == op.name for kernel in cpu.kernels()))


@EACH
@needs_triton
def test_record_has_a_gpu_kernel_or_a_reason(op: Op) -> None:
    assert not lacks(op, CUDA, any(kernel.op == op.name for kernel in gpu.kernels()))


@EACH
def test_record_has_an_emitter_or_a_reason(op: Op) -> None:
    assert not lacks(op, PROGRAM, op.name in cpu.emitters())


def test_an_op_without_kernel_or_reason_is_reported() -> None:
    bare = Op(reference.rms_norm, (), shape=reference.rms_norm, work=Work.POINTWISE)
    assert "write it" in lacks(bare, CPU, False) and not lacks(bare, CPU, True)


def test_kernels_and_emitters_are_of_known_ops() -> None:
    assert {kernel.op for kernel in cpu.kernels()} <= set(RECORDS)
    assert set(cpu.emitters()) - set(RECORDS) == {"aten.add.Tensor", "aten.div.Tensor", "aten.mul.Tensor"}
    if gpu.available():
        assert {kernel.op for kernel in gpu.kernels()} - set(RECORDS) == {"sample"}


def parameters(fn: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(fn).parameters)


@EACH
def test_kernels_and_emitters_take_the_arguments_of_the_reference_in_its_order(op: Op) -> None:
    tables = (*kernels.table("cpu"), *kernels.table("cuda"))
    found = [parameters(kernel.fn) for kernel in tables if kernel.op == op.name]
    if op.name in cpu.emitters():
        builder, *rest = parameters(cpu.emitters()[op.name].emit)
        found.append([name for name in rest if name != "quantized"])
        assert builder == "b" and (rest[-1] == "quantized") == cpu.emitters()[op.name].fuses_quantization
    set_by_lowering = [o.name for o in op.operands if not getattr(o, "stored", True) and o not in op.tensors]
    for names in found:
        assert [n for n in names if n not in set_by_lowering] == [
            n for n in op.positions if n not in set_by_lowering
        ]


# -- true --------------------------------------------------------------------------------------------------


@EACH
def test_shape_rule_gives_what_the_reference_gives(op: Op) -> None:
    args, options = sound_call(op)
    by_rule, by_reference = (as_tuple(fn(*args, **options)) for fn in (op.shape, op.reference))
    assert [(t.shape, t.dtype) for t in by_rule] == [(t.shape, t.dtype) for t in by_reference]


@pytest.mark.parametrize("op", [op for op in RECORDS.values() if op.row_wise], ids=lambda op: op.name)
def test_rows_of_a_row_wise_op_can_be_selected_before_it(op: Op) -> None:
    args, options = real(op)
    rows = torch.tensor([3, 0])
    chosen = [a[rows] if o.role in ROWS else a for o, a in zip(op.tensors, args, strict=True)]
    for few, all_rows in zip(
        as_tuple(op.reference(*chosen, **options)), as_tuple(op.reference(*args, **options)), strict=True
    ):
        torch.testing.assert_close(few.float(), all_rows[rows].float(), rtol=1e-5, atol=1e-5)


def test_ops_whose_rows_depend_on_others_are_not_row_wise() -> None:
    assert not any(
        RECORDS[name].row_wise for name in ("attention", "paged_attention", "expert_linear", "select_rows")
    )


@EACH
def test_an_op_is_per_head_where_heads_of_its_activation_can_be_selected_before_it(op: Op) -> None:
    assert op.per_head == (has_heads(op) and keeps_heads_apart(op))


@pytest.mark.parametrize(
    "op",
    [op for op in RECORDS.values() if op.row_wise and not op.quantizes_input],
    ids=lambda op: op.name,
)
def test_only_norms_give_the_same_result_when_the_activations_grow(op: Op) -> None:
    args, options = real(op)
    grown = [8 * a if o.role is Role.ACTIVATION else a for o, a in zip(op.tensors, args, strict=True)]
    options |= {"eps": 0.0} if op.is_norm else {}
    small, large = (as_tuple(op.reference(*given, **options))[0] for given in (args, grown))
    if op.is_norm or small.dtype is torch.float32:  # codes need not grow
        assert torch.equal(small.float(), large.float()) == op.is_norm


def has_heads(op: Op) -> bool:
    """True for ops with a single activation, of any number of leading sizes or three sizes, and no operand a head."""
    activations = [o for o in op.tensors if o.role is Role.ACTIVATION]
    shape = activations[0].shape
    shaped = shape[0] == "..." or (len(shape) == 3 and "..." not in shape)
    return len(activations) == 1 and not op.only_lowered and shaped and "num_heads" not in op.positions


def keeps_heads_apart(op: Op) -> bool:
    """True where the result for some heads of an activation [5, 4, channels] is those heads of the whole result."""
    args, options = real(op)
    place = next(i for i, o in enumerate(op.tensors) if o.role is Role.ACTIVATION)
    x = torch.randn(5, 4, args[place].shape[-1], generator=torch.Generator().manual_seed(1))
    heads = torch.tensor([2, 0])
    whole, some = (op.reference(*args[:place], a, *args[place + 1 :], **options) for a in (x, x[:, heads]))
    return whole.shape == x.shape and torch.equal(some, whole[:, heads])


@EACH
def test_only_ops_whose_reference_reads_values_are_not_traceable(op: Op) -> None:
    args, options = real(op)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) for a in args]
        try:
            op.reference(*fakes, **options)
        except DataDependentOutputException:
            assert not op.traceable
        else:
            assert op.traceable


PAGED = {
    "slot_mapping": torch.tensor([0, 1, 2, 4, 5]),
    "query_start": torch.tensor([0, 3, 5], dtype=torch.int32),
    "seq_lens": torch.tensor([3, 2], dtype=torch.int32),
    "block_tables": torch.tensor([[0], [1]], dtype=torch.int32),
}


@EACH
def test_an_op_writes_to_the_operands_that_it_mutates_and_to_no_other(op: Op) -> None:
    args, options = real(op)
    args = [PAGED.get(name, a) for name, a in zip(op.positions, args, strict=False)]
    before = [a.clone() for a in args]
    op.reference(*args, **options)
    written = [n for n, a, b in zip(op.positions, args, before, strict=False) if not same(a, b)]
    assert tuple(written) == op.mutates


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(
        a.view(torch.uint8) if a.itemsize == 1 else a, b.view(torch.uint8) if b.itemsize == 1 else b
    )


@pytest.mark.parametrize("op", [op for op in RECORDS.values() if op.any_dtype], ids=lambda op: op.name)
def test_an_op_of_any_dtype_rounds_once_in_bfloat16(op: Op) -> None:
    args, options = real(op)
    exact = op.reference(*[a.double() if a.is_floating_point() else a for a in args], **options)
    halves = [a.bfloat16() if a.is_floating_point() else a for a in args]
    exact_of_halves = op.reference(*[a.double() if a.is_floating_point() else a for a in halves], **options)
    out = op.reference(*halves, **options)
    assert out.dtype is torch.bfloat16 and exact.shape == out.shape
    torch.testing.assert_close(out.double(), exact_of_halves, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("op", [op for op in RECORDS.values() if op.packed], ids=lambda op: op.name)
def test_packed_op_does_the_same_on_halves(op: Op) -> None:
    gate, up = torch.randn(2, 5, 32)
    packed = ops.GATED[op.reference]
    torch.testing.assert_close(packed(torch.cat((gate, up), dim=-1)), op.reference(gate, up))
    assert ops.record_of(packed) is not None


@pytest.mark.parametrize("op", [op for op in RECORDS.values() if op.quantized], ids=lambda op: op.name)
@pytest.mark.parametrize("fmt", reference.FORMATS)
def test_quantized_op_does_the_same_and_quantizes(op: Op, fmt: str) -> None:
    assert op.quantized is not None
    args, options = real(op)
    first, *rest = as_tuple(op.reference(*args, **options))
    q, scale, *more = op.quantized(*args, **options, fmt=fmt)
    wanted, wanted_scale = reference.quantize_as(first, fmt)
    assert torch.equal(q.float(), wanted.float()) and torch.equal(scale, wanted_scale)
    assert all(torch.equal(a, b) for a, b in zip(more, rest, strict=True))


@pytest.mark.parametrize(
    "op", [op for op in RECORDS.values() if op.dequantize and not op.linear], ids=lambda op: op.name
)
def test_dequantized_weight_gives_the_product(op: Op) -> None:
    assert op.dequantize is not None
    args, options = real(op)
    named = dict(zip(op.positions, args, strict=False))
    if op.name == "linear_fp8":  # its activations are not rounded
        named["input_scale"], options = None, {"activations": "none"}
    given = {name: op.defaults[name] for name in ("bits", "group_size") if name in op.positions}
    weight = op.dequantize([named[o.name] for o in op.stored], given, 64).double()
    x = named.get("x", named.get("q")).double()
    if op.quantizes_input:
        x = x - (reference.ACTIVATION_ZERO_POINT if named["q"].dtype is torch.uint8 else 0)
        x = (x.unflatten(1, (named["scale"].shape[1], -1)) * named["scale"].double()[..., None]).flatten(1)
    out = op.reference(*named.values(), **options)
    expected = x @ weight.T + named["bias"].double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


# -- arguments of calls ------------------------------------------------------------------------------------


def call(target: Any, *args: Any, **options: Any) -> fx.Node:
    graph = fx.Graph()
    nodes = [graph.placeholder(a) if isinstance(a, str) else a for a in args]
    return graph.call_function(target, tuple(nodes), options)


def test_argument_is_found_by_position_by_keyword_and_by_default() -> None:
    assert ops.argument(call(reference.rms_norm, "x", "w", 1e-5, 1.0), "offset") == 1.0
    assert ops.argument(call(reference.rms_norm, "x", "w", 1e-5, offset=1.0), "offset") == 1.0
    assert ops.argument(call(reference.rms_norm, "x", "w", 1e-5), "offset") == 0.0


@EACH
def test_accessors_find_the_operand_of_the_role(op: Op) -> None:
    node = call(op.reference, *(operand.name for operand in op.tensors))
    names = {operand.role: operand.name for operand in reversed(op.tensors)}
    for role, found in ((Role.WEIGHT, ops.weight(node)), (Role.BIAS, ops.bias(node))):
        assert (found.target if found is not None else None) == names.get(role)
    assert ops.activation(node).target == next(
        (o.name for o in op.tensors if o.role is Role.ACTIVATION), None
    )


def test_accessors_refuse_a_call_of_another_op() -> None:
    with pytest.raises(ValueError, match="no op of the dialect"):
        ops.weight(call(torch.ops.aten.relu.default, "x"))


def test_a_missing_bias_is_none() -> None:
    assert ops.bias(call(reference.linear, "x", "weight")) is None
    assert ops.bias(call(reference.linear, "x", "weight", None)) is None


# What the passes, checkpoints and lowering read, as it was stated in their own tables before.
def test_quantized_linears_are_stored_under_the_names_of_compressed_tensors() -> None:
    stored = {
        op.name: (op.first_weight, tuple(o.stored for o in op.stored))
        for op in ops.QUANTIZED_LINEARS.values()
        if op.linear is None
    }
    assert stored == {
        "linear_w8a8": (2, ("weight", "weight_scale")),
        "linear_w8a16": (1, ("weight", "weight_scale")),
        "linear_w4a8": (2, ("weight_packed", "weight_scale", "weight_minimum")),
        "linear_wna16": (1, ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")),
        "linear_fp8": (1, ("weight", "weight_scale", "input_scale")),
    }


def test_an_op_on_experts_has_the_stored_operands_of_its_linear_op() -> None:
    """Without the order of the input channels, which would be one for all experts."""
    for op in RECORDS.values():
        if op.linear is not None and op.dequantize is not None:
            linear = ops.QUANTIZED_LINEARS[op.linear]
            assert op.stored == tuple(o for o in linear.stored if o.role is not Role.CHANNELS)
            assert op.dequantize is linear.dequantize and ops.OF_EXPERTS[op.linear] is op.reference


@pytest.mark.parametrize("op", [op for op in RECORDS.values() if op.compiled], ids=lambda op: op.name)
def test_an_op_that_a_compiler_generates_is_traceable_and_pure(op: Op) -> None:
    assert op.traceable and not op.mutates
