"""Decomposition node by node, against ``ExportedProgram.run_decompositions`` of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from optkit.capture import boundary
from optkit.capture import export as export_module
from optkit.capture.check import eager
from optkit.capture.decomposed import decompose, is_beyond
from optkit.capture.export import decompositions, export
from tests.support.architectures import SPECIFIC, tiny_model

aten = torch.ops.aten
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
WRITING = {"deepseek_v2", "deepseek_v3", "gemma3n_text", "gemma4_text", "llama4_text", "mixtral"}


def tensors(program: Any) -> list[fx.Node]:
    """The nodes with a tensor; torch writes assertions and sizes, which no graph has, in another order."""
    return [n for n in program.graph.nodes if n.op != "output" and isinstance(n.meta.get("val"), Tensor)]


def described(program: Any) -> list[str]:
    """Target, arguments, shape, dtype and strides of each node with a tensor; a number in place of a node's name."""
    number = {node: f"#{index}" for index, node in enumerate(tensors(program))}

    def argument(node: fx.Node) -> str:
        return number.get(node) or str(node.meta["val"])

    found = []
    for node in number:
        target = node.target if node.op == "placeholder" else (node.target, node.args, node.kwargs)
        value = node.meta["val"]
        found.append(f"{fx.map_arg(target, argument)} {value.shape} {value.dtype} {value.stride()}")
    return found


def compared(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[bool]:
    """Export ``model``; True for a program that was decomposed without torch, to the same nodes as by torch."""
    alone = []

    def both(program: Any, table: Any) -> Any:
        alone.append(not any(map(is_beyond, program.graph.nodes)))
        expected = program.run_decompositions(dict(table))
        result = decompose(program, table)
        assert (result is program) == alone[-1]
        assert described(result) == described(expected)
        result.graph.lint()
        outputs = [node.name for node in result.graph.output_node().args[0]]
        assert list(result.graph_signature.user_outputs) == outputs
        return result

    monkeypatch.setattr(export_module, "decompose", both)
    export(model)
    return alone


@pytest.mark.parametrize("name", sorted(SPECIFIC))
def test_nodes_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    boundary.register()
    assert compared(monkeypatch, tiny_model(name, boundary.NAME).eval()) == [name not in WRITING]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "phi3"])
def test_nodes_are_those_of_torch_with_attention_of_transformers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = tiny_model(name).eval()
    with eager(model):
        alone = compared(monkeypatch, model)
    assert (
        alone == [True] or torch.__version__ < "2.13"
    )  # earlier exports have aten.detach_, which torch decomposes


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def exported(function: Callable[..., Any]) -> Any:
    tokens = {1: torch.export.Dim("T", min=2, max=64)}
    return torch.export.export(Function(function), (X,), dynamic_shapes=((tokens),))


def several(x: Tensor) -> tuple[Tensor, ...]:
    """Ops with several results, an output that is an input, an op on one tensor twice, and one on two tensors."""
    a, b = x.chunk(2, dim=-1)
    values, places = torch.max(a, dim=-1)
    same = nn.functional.dropout(x, training=False)
    return same, torch.einsum("btc,bsc->bts", a, a), places, b @ a.mT + values.mean()


def layers(x: Tensor) -> Tensor:
    x = nn.functional.glu(torch.roll(x, 1, -1)).logsumexp(1) + x.var(dim=(1, 2))[:, None]
    return torch.addmm(torch.ones(3), x, x.new_ones(4, 3)).to(torch.float64).type_as(x).softmax(-1)


@pytest.mark.parametrize("function", [several, layers])
def test_programs_are_those_of_torch(function: Callable[..., Any]) -> None:
    program = exported(function)
    expected = program.run_decompositions(dict(decompositions()))
    result = decompose(program, decompositions())
    assert result is program
    assert described(result) == described(expected)
    for longer in (X, X.repeat(1, 3, 1)):
        torch.testing.assert_close(result.module()(longer), function(longer))


def test_layers_of_one_kind_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    table = {aten.sin.default: lambda x: count.append(1) or aten.cos.default(x)}
    program = exported(lambda x: (x.sin() + 1).sin() * x[0].sin())
    targets = [node.target for node in decompose(program, table).graph.nodes]
    assert targets.count(aten.cos.default) == 3 and aten.sin.default not in targets
    assert len(count) == 2


def written(x: Tensor) -> Tensor:
    return x.clone().add_(1)


def test_torch_decomposes_a_program_that_writes_into_a_tensor() -> None:
    result = decompose(exported(written), {})
    assert not any(map(is_beyond, result.graph.nodes))
    assert torch.equal(result.module()(X), X + 1)


def test_torch_decomposes_a_program_whose_decomposition_writes_into_a_tensor() -> None:
    program = exported(lambda x: x.sin() * 2)
    result = decompose(program, {aten.sin.default: lambda x: aten.add_.Tensor(aten.clone.default(x), 1)})
    assert result is not program and not any(map(is_beyond, result.graph.nodes))
    assert torch.equal(result.module()(X), (X + 1) * 2)
