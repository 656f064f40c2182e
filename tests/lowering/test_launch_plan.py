"""Native stages of a graph as programs: the same bits as calling the kernels one by one, on every architecture."""

from __future__ import annotations

import pytest
import torch

from optkit.cancellation import StepCancelled, cancellable
from optkit.graph.ir import Graph
from optkit.kernels.cpu import call_list, native
from optkit.kernels.cpu.call_list import LOGITS, TOKENS
from optkit.kernels.cpu.program import Program
from optkit.lowering.dense import dense_inputs
from optkit.lowering.launch_plan import PROBES, kind_of_rows
from optkit.lowering.lower import Executable, lower
from tests.support.architectures import SPECIFIC
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def programs(executable: Executable) -> list[Program]:
    return [n.target for n in executable.module.graph.nodes if isinstance(n.target, Program)]


def optimized(name: str, *passes: str, **int8: object) -> Graph:
    graph = captured(name)
    for each in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", *passes):
        apply(graph, each)
    if int8:
        apply(graph, "int8", **int8)
    apply(graph, "flash_attention")
    return graph


def logits(executable: Executable, graph: Graph, lengths: list[int]) -> torch.Tensor:
    ids = torch.randint(3, 128, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    return executable(dense_inputs(lengths, ids, graph.meta.kv_specs))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("name", SPECIFIC)
def test_programs_change_no_bits(name: str, quantize: bool) -> None:
    options = {"group_size": 32, "lm_head": True, "weight_only": ["lm_head"]} if quantize else {}
    graph = optimized(name, **options)
    one_by_one, together = lower(graph, TARGET, programs=False), lower(graph, TARGET)
    assert not programs(one_by_one)
    for lengths in ([20, 10, 7], [1], [33], [1, 1, 2]):
        assert torch.equal(logits(one_by_one, graph, lengths), logits(together, graph, lengths))


def test_a_quantized_llama_is_one_program() -> None:
    graph = optimized("llama", group_size=32, lm_head=True, weight_only=["lm_head"])
    executable = lower(graph, TARGET)
    (program,) = programs(executable)
    # embedding, rope_table, norm; qkv, rope twice, attention, quantize, o, norm, gate_up, gated, down, norm a layer;
    # rows, head
    assert program.num_calls == 3 + 2 * 11 + 2
    others = [
        n.name for n in executable.module.graph.nodes if n.op == "call_function" and n.target is not program
    ]
    assert not [name for name in others if not name.startswith("getitem")]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_a_gated_mlp_in_bfloat16_is_one_call_of_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)  # other CPUs run the same calls
    graph = optimized(name, group_size=32, activations="bfloat16", lm_head=True, weight_only=["lm_head"])
    one_by_one, together = lower(graph, TARGET, programs=False), lower(graph, TARGET)
    (program,) = programs(together)
    calls = [call for _, call in program.made_for]
    assert calls.count("gated_mlp_w8a16") == 2 and "gated" not in calls
    for lengths in ([20, 10, 7], [1], [70], [1, 1, 2]):
        assert torch.equal(logits(one_by_one, graph, lengths), logits(together, graph, lengths))


def test_an_mlp_of_other_layers_keeps_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    options = {"group_size": 32, "activations": "bfloat16"}
    for more in ({"weight_only": ["re:.*down_proj"]}, {"ignore": ["re:.*down_proj"]}):
        graph = optimized("llama", **options, **more)
        found = [call for each in programs(lower(graph, TARGET)) for _, call in each.made_for]
        assert "gated" in found and "gated_mlp_w8a16" not in found


def test_a_pinned_reference_stays_out_of_programs() -> None:
    graph = optimized("llama", group_size=32)
    for node in graph.fx.nodes:
        if node.name.startswith("silu_mul"):
            node.meta["kernel"] = "reference"
    executable = lower(graph, TARGET)
    assert len(programs(executable)) > 1
    names = [n.name for n in executable.module.graph.nodes]
    assert sum(name.startswith("silu_mul") for name in names) == 2


@pytest.mark.parametrize("as_programs", [True, False])
def test_a_step_is_cancelled_between_parts_of_the_model(
    as_programs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_list, "LONG_STEP", 0)
    monkeypatch.setattr(call_list, "CALLS_A_PART", 1)
    graph = optimized("llama", group_size=32)
    executable, checks = lower(graph, TARGET, programs=as_programs), list[int]()
    whole = logits(executable, graph, [20, 10])

    def cancel_third() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise StepCancelled

    with cancellable(cancel_third), pytest.raises(StepCancelled):
        logits(executable, graph, [20, 10])
    assert torch.equal(logits(executable, graph, [20, 10]), whole)


def test_token_ids_are_checked() -> None:
    graph = optimized("llama", group_size=32)
    inputs = dense_inputs([3], torch.tensor([3, 4, 128]), graph.meta.kv_specs)
    with pytest.raises(IndexError):
        lower(graph, TARGET)(inputs)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_dimension_is_rows_only_where_it_follows_the_batch() -> None:
    """A 3 or an 11 of the model is no number of sequences or tokens, and other dimensions stay as they are."""
    first, second = PROBES
    tokens, sequences = (first.tokens, second.tokens), (first.sequences, second.sequences)
    assert kind_of_rows(*(meta(n, 8) for n in tokens)) == TOKENS
    assert kind_of_rows(*(meta(n, 8) for n in sequences)) == LOGITS
    assert kind_of_rows(*((meta(n, 8), meta(1)) for n in tokens)) == TOKENS
    assert kind_of_rows(meta(3, 8), meta(3, 8)) is None and kind_of_rows(meta(11), meta(11)) is None
    assert kind_of_rows(*(meta(3, 1, n, 4) for n in tokens)) is None
    assert kind_of_rows(*(meta(n, n) for n in tokens)) is None
    assert (
        kind_of_rows(meta(), meta()) is None
        and kind_of_rows(None, None) is None
        and kind_of_rows(3, 3) is None
    )
