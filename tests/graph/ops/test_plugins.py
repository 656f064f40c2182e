"""Ops of plug-ins: their place in graphs and kernel tables, and the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit import kernels, plugins
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops import plugins as op_plugins
from optkit.graph.ops.operands import Kind, Number, value
from optkit.graph.ops.plugins import register, target_of
from optkit.graph.ops.record import Op, Work
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.verify import VerifyError, verify
from optkit.kernels import reference
from optkit.kernels.kernel import Kernel
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS
from optkit.passes.select_logits_rows import is_row_by_row
from optkit.plugins import PlugIn, PlugInError
from tests.support.graphs import captured, dense, random_ids
from tests.support.target import TARGET


def scaled(x: Tensor, factor: float) -> Tensor:
    """The reference."""
    return x * factor


def fast(x: Tensor, factor: float) -> Tensor:
    """The kernel, which counts its calls."""
    CALLS.append(factor)
    return x * factor


def shape(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


CALLS: list[float] = []
OP = Op(
    scaled,
    (value("x", Kind.COMPUTE, "..."), Number("factor", required=True)),
    shape=shape,
    work=Work.POINTWISE,
    row_wise=True,
)
KERNEL = Kernel("scaled", "fast", fast, supports=lambda target: True)


def plug_in(monkeypatch: pytest.MonkeyPatch, name: str = "acme", **module: Any) -> PlugIn:
    """A plug-in of ops whose module has the attributes ``module``."""
    entry = SimpleNamespace(load=lambda: SimpleNamespace(**module), value="acme_ops")
    plugin = PlugIn(plugins.OPS, name, "acme-ops", "1.0", entry)  # type: ignore[arg-type]
    monkeypatch.setattr(plugins, "installed", lambda group: [plugin] if group == plugins.OPS else [])
    return plugin


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tables of ops and kernels, put back afterwards."""
    CALLS.clear()
    for module, name in ((ops, "RECORDS"), (ops, "OPS"), (ops, "NAMES"), (kernels, "_OF_PLUGINS")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr(op_plugins, "registered", {})
    monkeypatch.setattr(op_plugins, "failed", {})
    yield


def with_scaled_logits(factor: float = 2.0) -> Graph:
    """A llama with ``scaled`` behind the output head."""
    graph = captured("llama")
    output = next(node for node in graph.fx.nodes if node.op == "output")
    logits = output.args[0]
    with graph.fx.inserting_before(output):
        node = graph.fx.call_function(scaled, (logits, factor))
    output.replace_input_with(logits, node)
    return graph


def test_a_graph_with_a_plug_in_s_op_is_verified_saved_read_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerifyError):
        verify(with_scaled_logits())
    register(plug_in(monkeypatch, OPS=(OP,), KERNELS={"cpu": (KERNEL,)}))
    graph, ids = with_scaled_logits(), random_ids([9])[0]
    verify(graph)
    text = graph_to_json(graph)
    assert '"op": "acme.scaled"' in text
    again = graph_from_json(text, lambda name, origin, dtype: graph.weights[name].value)
    assert graph_to_json(again) == text
    expected = 2 * dense(captured("llama"), ids, TARGET)
    assert torch.equal(dense(again, ids, TARGET), expected)
    assert CALLS == [2.0]
    assert set(lower(again, TARGET).kernels.values()) >= {"fast"}
    dense(again, ids)  # without a target: the reference
    assert CALLS == [2.0]


def test_reading_a_graph_registers_the_plug_in_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    register(plug_in(monkeypatch, OPS=(OP,)))
    graph = with_scaled_logits()
    text = graph_to_json(graph)
    for table in (ops.RECORDS, ops.OPS):
        del table["acme.scaled"]  # type: ignore[attr-defined]
    op_plugins.registered.clear()
    read = graph_from_json(text, lambda name, origin, dtype: graph.weights[name].value)
    assert any(node.target is scaled for node in read.fx.nodes)
    with pytest.raises(PlugInError, match=r"it has no op 'acme\.other'"):
        target_of("acme.other")


def test_facts_of_the_record_reach_passes_and_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    node = next(n for n in with_scaled_logits().fx.nodes if n.target is scaled)
    assert not is_row_by_row(node)
    register(plug_in(monkeypatch, OPS=(OP,)))
    assert is_row_by_row(node) and ops.op_of(node).name == "acme.scaled"
    assert scaled not in ops.norm_ops() and reference.rms_norm in ops.norm_ops()


def test_operands_are_checked_as_those_of_optkit(monkeypatch: pytest.MonkeyPatch) -> None:
    register(plug_in(monkeypatch, OPS=(OP,)))
    graph = with_scaled_logits(float("inf"))
    with pytest.raises(VerifyError, match="factor"):
        verify(graph)


def test_a_gpu_computes_the_op_in_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    register(plug_in(monkeypatch, OPS=(replace(OP, any_dtype=True),)))
    target = DATASHEETS["cuda-h100"]
    model = lower(with_scaled_logits(), target, device="cpu")
    assert any(node.target is scaled for node in model.module.graph.nodes)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({}, "needs OPS"),
        ({"OPS": (scaled,)}, "needs OPS"),
        ({"OPS": (replace(OP, mutates=("x",)),)}, "'mutates' is for ops of optkit alone"),
        ({"OPS": (replace(OP, work=Work.ATTENTION),)}, "work is one of POINTWISE, GATHER, LINEAR"),
        ({"OPS": (replace(OP, operands=OP.operands[:1]),)}, "operands are not the parameters"),
        ({"OPS": (OP,), "KERNELS": (KERNEL,)}, "KERNELS maps 'cpu' and 'cuda'"),
        ({"OPS": (OP,), "KERNELS": {"tpu": ()}}, "KERNELS maps 'cpu' and 'cuda'"),
        ({"OPS": (OP,), "KERNELS": {"cpu": (replace(KERNEL, op="linear"),)}}, "no Kernel for one of scaled"),
    ],
)
def test_a_module_outside_the_contract_is_refused_and_registers_nothing(
    module: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(ops.OPS), len(kernels.table("cpu"))
    with pytest.raises(PlugInError, match=message):
        register(plug_in(monkeypatch, **module))
    assert (len(ops.OPS), len(kernels.table("cpu"))) == before


@pytest.mark.parametrize("name", ["aten", "a-b", "a.b", "1a"])
def test_a_namespace_is_an_identifier_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlugInError, match="an identifier"):
        register(plug_in(monkeypatch, name, OPS=(OP,)))


def test_names_without_a_namespace_are_those_of_the_closed_list_and_look_for_no_plug_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "installed", lambda group: pytest.fail("a scan of entry points"))
    assert target_of("linear") is reference.linear
    for name in ("nothing", "aten.nothing", "aten.system.default"):
        with pytest.raises(KeyError):
            target_of(name)
