"""Operands of the records against the references; operands of a wrong dtype, shape or origin are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from optkit.graph.ir import BATCH_INPUTS, Graph, GraphMeta, Weight
from optkit.graph.operand_check import check_call, check_origins
from optkit.graph.ops import OPS, RECORDS, shape_rule
from optkit.graph.ops.operands import Choice, Number, Source, TensorOperand
from optkit.graph.states import PROMPT_LENS, STATE_SLOTS
from optkit.graph.verify import VerifyError, verify
from tests.support.op_calls import BATCH, SPEC, meta, sound_call

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)
U8, I8, I32, F8 = torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn
IDS, POSITIONS, INDEX = BATCH["input_ids"], BATCH["positions"], BATCH["logits_index"]
SEQUENCES = (BATCH["query_start"], BATCH["seq_lens"], BATCH["block_tables"])
QKV = (meta(5, 4, 8), meta(5, 2, 8), meta(5, 2, 8))
POOLS = (BATCH["k_cache_0"], BATCH["v_cache_0"])
ANGLES = (meta(5, 8), meta(5, 8))
X, VECTOR, ROWS, GATES = meta(5, 64), meta(64), meta(5, 64), meta(5, 32)
Q8, SCALE = meta(5, 64, dtype=U8), meta(5, 2)
W8 = (meta(16, 64, dtype=I8), meta(16, 2), meta(16))
CODES, CHOSEN = meta(16, 8, dtype=I32), meta(5, 2, dtype=torch.int64)
# Sound calls, written by hand: what the records are compared with.
WRITTEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "embedding": ((meta(9, 64), IDS), {}),
    "linear": ((X, meta(16, 64), meta(16)), {}),
    "rms_norm": ((X, VECTOR, 1e-5), {"offset": 1.0}),
    "add_rms_norm": ((X, ROWS, VECTOR, 1e-5), {}),
    "layer_norm": ((X, VECTOR, VECTOR, 1e-5), {}),
    "rope_table": ((POSITIONS, meta(4)), {"scale": 1.0}),
    "rope": ((meta(5, 4, 8), *ANGLES), {}),
    "silu_mul": ((GATES, GATES), {}),
    "gelu_mul": ((GATES, GATES), {"approximate": "tanh"}),
    "silu_mul_packed": ((X,), {}),
    "gelu_mul_packed": ((X,), {"approximate": "none"}),
    "select_rows": ((X, INDEX), {}),
    "by_tokens": ((X, ROWS, POSITIONS, 4), {}),
    "expert_linear": ((X, meta(16, 64), meta(16), CHOSEN), {"num_experts": 4}),
    "expert_w8a8": ((Q8, SCALE, *W8, CHOSEN), {"num_experts": 4}),
    "expert_w8a16": ((meta(5, 2, 64), *W8, CHOSEN), {"num_experts": 4}),
    "expert_w4a8": (
        (Q8, SCALE, CODES, meta(16, 2), meta(16, 2), meta(16), CHOSEN),
        {"num_experts": 4},
    ),
    "expert_wna16": (
        (X, CODES, meta(16, 2), meta(16, 2, dtype=U8), meta(16), CHOSEN),
        {"num_experts": 4, "bits": 4, "group_size": 32},
    ),
    "weighted_sum": ((meta(5, 2, 16), meta(5, 2)), {}),
    "quantize_per_token": ((X,), {"group_size": 32}),
    "quantize_fp8_per_token": ((X,), {}),
    "rms_norm_quantize": ((X, VECTOR, 1e-5), {"fmt": "fp8"}),
    "add_rms_norm_quantize": ((X, ROWS, VECTOR, 1e-5), {"fmt": "int8"}),
    "silu_mul_quantize": ((X,), {"fmt": "int8"}),
    "gelu_mul_quantize": ((X,), {"approximate": "tanh"}),
    "linear_w8a8": ((Q8, SCALE, *W8), {}),
    "linear_w4a8": ((Q8, SCALE, CODES, meta(16, 2), meta(16, 2), meta(16)), {}),
    "linear_w8a16": ((X, *W8), {}),
    "linear_wna16": (
        (X, CODES, meta(16, 2), meta(16, 2, dtype=U8), meta(64, dtype=I32), meta(16)),
        {"bits": 4, "group_size": 32},
    ),
    "linear_fp8": (
        (X, meta(16, 64, dtype=F8), meta(16, 2), meta(1), meta(16)),
        {"activations": "tensor"},
    ),
    "linear_fp8_rowwise": (
        (meta(5, 64, dtype=F8), meta(5, 1), meta(16, 64, dtype=F8), meta(16, 1), meta(16)),
        {},
    ),
    "attention": (
        (*QKV, *POOLS, BATCH["slot_mapping"], *SEQUENCES, meta(4), meta(4), BATCH["positions"]),
        {"scale": 0.5, "window": 4, "chunk": 8},
    ),
    "rope_kv_write": ((*QKV, *ANGLES, *POOLS, BATCH["slot_mapping"]), {}),
    "paged_attention": (
        (*QKV, *POOLS, *SEQUENCES, meta(4), meta(4), BATCH["positions"]),
        {"scale": 0.5, "softcap": 30.0},
    ),
}
CALLS = {name: WRITTEN.get(name) or sound_call(op) for name, op in RECORDS.items()}


def tensors(op: str) -> list[tuple[int, TensorOperand]]:
    return list(enumerate(RECORDS[op].tensors))


def is_free(op: str, operand: TensorOperand) -> bool:
    """True where no other operand has one of the sizes: another size is another sound call."""
    others = {symbol.partition("+")[0] for _, each in tensors(op) if each != operand for symbol in each.shape}
    own = {symbol.partition("+")[0] for symbol in operand.shape}
    return not any(symbol in others or symbol.isdigit() for symbol in own)


def each_tensor() -> Iterator[tuple[str, int, TensorOperand]]:
    for op in RECORDS:
        yield from ((op, i, operand) for i, operand in tensors(op))


def named(case: Any) -> str:
    return case.name if isinstance(case, TensorOperand) else str(case)


EACH = list(each_tensor())


def refused(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\b") as caught:
        check_call(op, args, kwargs, half=False)
        shape_rule(OPS[op])(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_every_op_has_a_row_with_the_parameters_of_its_reference() -> None:
    assert set(WRITTEN) <= set(RECORDS)
    for name, op in RECORDS.items():
        assert list(op.positions) == list(inspect.signature(op.reference).parameters), name


@pytest.mark.parametrize("op", RECORDS)
@pytest.mark.parametrize("calls", ["written", "from the record"])
def test_a_sound_call_passes(op: str, calls: str) -> None:
    args, kwargs = CALLS[op] if calls == "written" else sound_call(RECORDS[op])
    check_call(op, args, kwargs, half=False)
    OPS[op](*args, **kwargs)


@pytest.mark.parametrize(("op", "position", "operand"), EACH, ids=named)
def test_every_operand_of_a_wrong_dtype_is_refused(op: str, position: int, operand: TensorOperand) -> None:
    args, kwargs = CALLS[op]
    wrong = [dtype for dtype in DTYPES if not operand.kind.accepts(dtype, half=False)]
    assert wrong
    for dtype in wrong:
        changed = (*args[:position], args[position].to(dtype), *args[position + 1 :])
        refused(op, changed, kwargs, operand.name)


@pytest.mark.parametrize(("op", "position", "operand"), EACH, ids=named)
def test_every_operand_of_a_wrong_shape_is_refused(op: str, position: int, operand: TensorOperand) -> None:
    args, kwargs = CALLS[op]
    tensor = args[position]
    empty = tensor.new_empty((0, *tensor.shape[1:]))
    wrong = (
        [empty]
        if "..." in operand.shape
        else [empty, tensor.new_empty((2, 3, *tensor.shape)), tensor.new_empty(())]
    )
    for other in wrong:
        refused(op, (*args[:position], other, *args[position + 1 :]), kwargs, operand.name)


@pytest.mark.parametrize(("op", "position", "operand"), EACH, ids=named)
def test_every_size_that_must_agree_with_another_operand_does(
    op: str, position: int, operand: TensorOperand
) -> None:
    if len(tensors(op)) == 1:
        return
    args, kwargs = CALLS[op]
    sizes = args[position].shape
    failed = 0
    for dim in range(len(sizes)):
        other = args[position].new_empty((*sizes[:dim], sizes[dim] + 1, *sizes[dim + 1 :]))
        try:
            check_call(op, (*args[:position], other, *args[position + 1 :]), kwargs, half=False)
        except ValueError:
            failed += 1
    assert bool(failed) != is_free(op, operand)


@pytest.mark.parametrize("op", RECORDS)
def test_numbers_and_choices_out_of_range_are_refused(op: str) -> None:
    args, kwargs = CALLS[op]
    for position, operand in enumerate(RECORDS[op].operands):
        if isinstance(operand, TensorOperand):
            continue
        wrong: list[Any] = ["no such", None, [], True, args[0]]
        wrong += [float("nan"), float("inf"), 10**400, 1e300] if isinstance(operand, Number) else [4.0, -1]
        for value in wrong:
            if position < len(args):
                refused(op, (*args[:position], value, *args[position + 1 :]), kwargs, operand.name)
            else:
                refused(op, args, {**kwargs, operand.name: value}, operand.name)


@pytest.mark.parametrize("op", RECORDS)
def test_tensors_by_keyword_missing_ones_and_unknown_ones_are_refused(op: str) -> None:
    args, kwargs = CALLS[op]
    last, operand = tensors(op)[-1]
    refused(op, args[:last], {**kwargs, operand.name: args[last]}, operand.name)
    refused(op, args, {**kwargs, "evil": 1}, "evil")
    first = RECORDS[op].operands[0].name
    refused(op, (), {}, first)
    refused(op, (None, *args[1:]), kwargs, first)


# -- origins ---------------------------------------------------------------------------------------------


def call(op: str, replaced: int | None = None, by: str = "") -> fx.Node:
    """A node of ``op`` whose arguments come from where they should, but for one: a ``by`` of the table below."""
    graph = fx.Graph()
    args: list[Any] = list(CALLS[op][0])
    made = {
        "weight": lambda: graph.get_attr("weights.w"),
        "value": lambda: graph.call_function(torch.ops.aten.clone.default, (graph.placeholder("input_ids"),)),
        "batch": lambda: graph.placeholder("seq_lens"),
        "named": lambda: graph.get_attr("k_cache_0"),
    }
    for i, operand in tensors(op):
        match operand.source:
            case Source.VALUE:
                args[i] = made["value"]()
            case Source.WEIGHT | Source.ANY:
                args[i] = made["weight"]()
            case Source.BATCH:
                args[i] = graph.placeholder(RECORDS[op].inputs.get(operand.name, operand.name))
            case Source.POOL:
                args[i] = graph.placeholder(f"{operand.name}_0")
    if replaced is not None:
        args[replaced] = made[by]()
    return graph.call_function(OPS[op], tuple(args), CALLS[op][1])


WRONG_SOURCES = {
    Source.VALUE: ("weight",),
    Source.WEIGHT: ("value", "batch"),
    Source.ANY: (),
    Source.BATCH: ("value", "weight", "named"),
    Source.POOL: ("value", "weight", "batch", "named"),
}
SOURCED = [(op, i, operand, by) for op, i, operand in EACH for by in WRONG_SOURCES[operand.source]]


@pytest.mark.parametrize("op", RECORDS)
def test_arguments_from_where_they_should_come_pass(op: str) -> None:
    check_origins(call(op))


@pytest.mark.parametrize(("op", "position", "operand", "by"), SOURCED, ids=named)
def test_every_operand_from_elsewhere_is_refused(
    op: str, position: int, operand: TensorOperand, by: str
) -> None:
    with pytest.raises(ValueError, match=f"operand {operand.name} is"):
        check_origins(call(op, position, by))


def test_what_only_lowering_sets_is_refused_in_a_stored_graph() -> None:
    for op, record in RECORDS.items():
        if any(isinstance(operand, Choice) and not operand.stored for operand in record.operands):
            node = call(op)
            node.kwargs = {**node.kwargs, "dtype": "float32"}
            with pytest.raises(ValueError, match="lowering"):
                check_origins(node)


# -- in a whole graph ------------------------------------------------------------------------------------


def graph_of(op: str) -> Graph:
    """A graph with one call of ``op``, unfit for anything but the verifier's first look."""
    node = call(op)
    node.graph.output(node)
    weights = {str(n.target): Weight(torch.zeros(1), None) for n in node.graph.nodes if n.op == "get_attr"}
    return Graph(node.graph, weights, GraphMeta("llama", 8, 8, (replace(SPEC, bounds=False),), "w", "head"))


def test_the_verifier_names_node_and_operand() -> None:
    graph = graph_of("attention")
    with pytest.raises(
        VerifyError, match=r"^attention: operand q is int64 \[5\], it must be float32 \[T, H, D\]"
    ):
        verify(graph)


def test_batch_names_are_inputs() -> None:
    for op, i, operand in EACH:
        if operand.source is Source.BATCH:
            name = RECORDS[op].inputs.get(operand.name, operand.name)
            assert name in (*BATCH_INPUTS, PROMPT_LENS, STATE_SLOTS), (op, i)
