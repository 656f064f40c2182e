"""Idioms of models become ops of the dialect; what only looks like one stays, and nothing changes a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.activations import NewGELUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.pytorch_utils import Conv1D

from optkit.capture import boundary, capture
from optkit.capture.canonicalize import canonicalize, fold_constants
from optkit.capture.check import check_capture
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph, GraphMeta, Origin, Part, Weight
from optkit.graph.ops import op_name
from optkit.kernels import reference
from tests.support.architectures import tiny_model
from tests.support.graphs import dense

aten = torch.ops.aten
META = GraphMeta("llama", 8, 64, (), "e", "h")


class Calls(nn.Module):
    """A function on modules as a module."""

    def __init__(self, function: Callable[..., Tensor], modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.function, self.of = function, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.of, *inputs)


TOKENS = 7  # no other size is 7: a 7 in a shape is a size of the batch


def traced(function: Callable[..., Tensor], *modules: nn.Module, **inputs: Tensor) -> Graph:
    """The ops of ``function`` on ``modules`` and ``inputs``, with casts as ``torch.export`` writes casts."""
    module = Calls(function, modules).eval()
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def call(*values: Tensor) -> Tensor:
        given = dict(zip(parameters, values, strict=False))
        return torch.func.functional_call(module, given, values[len(parameters) :])

    tracing = make_fx(call, tracing_mode="fake", pre_dispatch=True)
    program = tracing(*parameters.values(), *inputs.values()).graph
    graph, copies, names = fx.Graph(), dict[fx.Node, Any](), iter([*parameters, *inputs])
    for node in program.nodes:
        if node.op == "output":
            graph.output(copies[node.args[0]])
            continue
        if node.op == "placeholder":
            name = next(names)
            kind = "get_attr" if name in parameters else "placeholder"
            copies[node] = graph.create_node(kind, name, name=name.replace(".", "_"))
        elif node.target is aten.to.dtype:
            cast = {"dtype": node.args[1]}
            copies[node] = graph.call_function(aten._to_copy.default, (copies[node.args[0]],), cast)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        value = node.meta["val"]
        if isinstance(value, Tensor):
            shape = tuple(None if size == TOKENS else size for size in value.shape)
            copies[node].meta = {"shape": shape, "dtype": value.dtype}
    weights = {n: Weight(value, Origin((Part(n, len(value)),))) for n, value in parameters.items()}
    return Graph(graph, weights, META)


def run(graph: Graph, inputs: Mapping[str, Tensor]) -> Tensor:
    values: dict[fx.Node, Any] = {}
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            values[node] = inputs[str(node.target)]
        elif node.op == "get_attr":
            values[node] = graph.weights[str(node.target)].value
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        else:
            return values[node.args[0]]
    raise AssertionError("the graph has no output")


def raised(function: Callable[..., Tensor], *modules: nn.Module, **inputs: Tensor) -> tuple[Graph, list[str]]:
    """The canonical graph, with the values of the function, and the names of its ops."""
    graph = canonicalize(traced(function, *modules, **inputs))
    with torch.no_grad():
        expected = function(*modules, *inputs.values())
        torch.testing.assert_close(run(graph, inputs), expected, atol=1e-5, rtol=1e-5)
    calls = [node for node in graph.fx.nodes if node.op == "call_function"]
    return graph, [str(op_name(node.target)) for node in calls]


def rows(width: int = 8, *more: int) -> Tensor:
    return torch.randn(TOKENS, width, *more, generator=torch.Generator().manual_seed(1))


def norm_of(kind: type[nn.Module]) -> nn.Module:
    norm = kind(8, eps=1e-3)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    return norm


@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_rms_norm_takes_its_weight_and_the_one_that_gemma_adds(kind: type[nn.Module], offset: float) -> None:
    graph, ops = raised(lambda norm, x: norm(x), norm_of(kind), x=rows())
    assert ops == ["rms_norm"]
    (node,) = graph.calls(reference.rms_norm)
    assert node.args[2] == 1e-3 and node.kwargs.get("offset", 0.0) == offset


def test_rms_norm_without_a_weight_ends_before_the_next_op() -> None:
    _, ops = raised(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * x, x=rows())
    assert ops == ["rms_norm", "aten.mul.Tensor"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5),
        lambda x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5),
        lambda x: 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        lambda x: x.tanh() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    ],
    ids=["over tokens", "of cubes", "of twice", "of another"],
)
def test_what_is_no_rms_norm_stays(function: Callable[[Tensor], Tensor]) -> None:
    assert "rms_norm" not in raised(function, x=rows())[1]


def test_linear_layers_have_their_weight_by_output_channel() -> None:
    conv, linear = Conv1D(5, 8), nn.Linear(5, 3)
    graph, ops = raised(lambda first, second, x: second(first(x)), conv, linear, x=rows())
    assert [op for op in ops if op != "aten.reshape.default"] == ["linear", "linear"]
    shapes = {name: tuple(weight.value.shape) for name, weight in graph.weights.items()}
    assert shapes["of.0.weight"] == (5, 8) and shapes["of.1.weight"] == (3, 5)
    origin = graph.weights["of.0.weight"].origin
    assert origin is not None and origin.transposed
    stored = conv.state_dict()["weight"]
    assert torch.equal(origin.build({"of.0.weight": stored}), stored.T)


def test_layer_norm_and_embedding_become_ops_of_the_dialect() -> None:
    norm, embed = nn.LayerNorm(8), nn.Embedding(9, 8)
    _, ops = raised(lambda norm, embed, ids: norm(embed(ids)), norm, embed, ids=torch.arange(TOKENS))
    assert ops == ["embedding", "layer_norm"]


def test_gelu_written_out_is_the_tanh_approximation() -> None:
    graph, ops = raised(lambda gelu, x: gelu(x), NewGELUActivation(), x=rows())
    assert ops == ["aten.gelu.default"]
    assert next(graph.calls(aten.gelu.default)).kwargs == {"approximate": "tanh"}
    _, ops = raised(lambda x: 0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * x.pow(3)))), x=rows())
    assert "aten.gelu.default" not in ops


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x, y: nn.functional.silu(x) * y, "silu_mul"),
        (lambda x, y: y * nn.functional.silu(x), "silu_mul"),
        (lambda x, y: nn.functional.gelu(x, approximate="tanh") * y, "gelu_mul"),
    ],
)
def test_gated_activation_is_one_op(function: Callable[..., Tensor], op: str) -> None:
    assert raised(function, x=rows(), y=rows() + 1)[1] == [op]


def test_activation_with_two_readers_stays() -> None:
    def twice(x: Tensor, y: Tensor) -> Tensor:
        activated = nn.functional.silu(x)
        return activated * y + activated

    assert "silu_mul" not in raised(twice, x=rows(), y=rows())[1]


def test_rotation_of_halves_works_on_rows_of_tokens() -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, _ = apply_rotary_pos_emb(x.transpose(0, 1), x.transpose(0, 1), cos, sin, unsqueeze_dim=0)
        return q.transpose(0, 1)

    cos, sin = rows(8), rows(8) * 2
    assert raised(rotated, x=rows(3, 8), cos=cos, sin=sin)[1] == ["rope"]


def test_rotation_of_neighbours_stays() -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos.unsqueeze(0) + turned * sin.unsqueeze(0)

    assert "rope" not in raised(rotated, x=rows(3, 8), cos=rows(8), sin=rows(8))[1]


def test_rotation_of_one_half_twice_stays() -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        turned = torch.cat((-x[..., 4:], x[..., 4:]), dim=-1)
        return x * cos.unsqueeze(0) + turned * sin.unsqueeze(0)

    assert "rope" not in raised(rotated, x=rows(3, 8), cos=rows(8), sin=rows(8))[1]


def test_transposes_around_a_norm_are_gone() -> None:
    def turned(norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.transpose(0, 1)).transpose(0, 1)

    assert raised(turned, norm_of(LlamaRMSNorm), x=rows(3, 8))[1] == ["rms_norm"]


def test_rows_of_logits_are_selected_by_their_index_alone() -> None:
    index = torch.tensor([5, 0, 2, 2, 1, 4, 6])
    assert raised(lambda x, logits_index: x[logits_index], x=rows(), logits_index=index)[1] == ["select_rows"]
    assert "select_rows" not in raised(lambda x, other: x[other], x=rows(), other=index)[1]


def test_copies_casts_and_double_transposes_are_gone() -> None:
    def padded(x: Tensor) -> Tensor:
        same = x.to(torch.float32).clone().type_as(x)
        return same.transpose(0, 1).transpose(0, 1).reshape(-1, 2, 4).reshape(-1, 8) + x.clone()

    assert raised(padded, x=rows())[1] == ["aten.add.Tensor"]
    assert raised(lambda x: x.double() * 3, x=rows())[1][0] == "aten._to_copy.default"


def test_equal_expressions_are_computed_once() -> None:
    assert raised(lambda x: torch.exp(x * 2) + torch.exp(x * 2), x=rows())[1].count("aten.exp.default") == 1
    assert raised(lambda x: torch.exp(x * 2) + torch.exp(x * 3), x=rows())[1].count("aten.exp.default") == 2


def test_expression_of_weights_alone_is_a_constant_unless_it_is_large() -> None:
    def shifted(linear: nn.Linear, x: Tensor) -> Tensor:
        return x * (linear.weight.exp() + linear.bias[:, None]).sum(0)

    graph, ops = raised(shifted, nn.Linear(8, 8), x=rows())
    assert ops == ["aten.mul.Tensor"]
    (weight,) = graph.weights.values()
    assert weight.origin is None
    large = traced(shifted, nn.Linear(8, 8), x=rows())
    assert fold_constants(large, largest=8) < 5 and list(large.calls(aten.exp.default))


# -- rotary angles of whole models -------------------------------------------------------------------------


def eager_logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


def captured_anew(name, check=True):
    """With the code that transformers has now."""
    boundary.register()
    return capture(tiny_model(name, attention=boundary.NAME), check=check)


def column_by_row(inv_freq: Tensor, positions: Tensor) -> Tensor:
    return positions[..., None].float() * inv_freq


def matrix_product(inv_freq: Tensor, positions: Tensor) -> Tensor:
    column = inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
    return (column @ positions[:, None, :].float()).transpose(1, 2)


@pytest.mark.parametrize("outer", [column_by_row, matrix_product])
def test_rotary_angles_are_found_however_transformers_writes_them(outer, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def forward(self, x, position_ids):
        angles = outer(self.inv_freq, position_ids)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    graph, model = captured_anew("llama"), tiny_model("llama")
    assert len(list(graph.calls(reference.rope_table))) == 1
    assert not list(graph.calls(aten.cos.default, aten.matmul.default))
    ids = torch.arange(3, 40)
    torch.testing.assert_close(dense(graph, ids), eager_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_angles_that_are_no_outer_product_stay_as_they_are(monkeypatch):
    """The frequencies of the last position for all of them: the same ops, another meaning."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def forward(self, x, position_ids):
        last = position_ids[:, -1:, None].float() * self.inv_freq
        angles = torch.cat((last, last), dim=-1).expand(position_ids.shape[0], position_ids.shape[1], -1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    graph, model = captured_anew("llama", check=False), tiny_model("llama")
    assert not list(graph.calls(reference.rope_table))
    ids = torch.arange(3, 40)
    torch.testing.assert_close(dense(graph, ids), eager_logits(model, ids), atol=1e-4, rtol=1e-4)
    with pytest.raises(
        UnsupportedModel, match=r"logits differ.* in batches of chunks"
    ):  # another last position
        check_capture(graph, model)


# -- softplus ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"beta": 2.0}, {"threshold": 4.0}])
def test_softplus_of_another_shape_stays(options: dict[str, float]) -> None:
    _, ops = raised(lambda x: nn.functional.softplus(x, **options), x=rows())
    assert ops == ["aten.softplus.default"]


def test_softplus_takes_no_vector_that_is_read_by_others() -> None:
    def steps(linear: nn.Module, x: Tensor) -> Tensor:
        shifted = x + linear.bias
        return nn.functional.softplus(shifted) * shifted

    graph, ops = raised(steps, nn.Linear(8, 8), x=rows())
    assert sorted(ops) == ["aten.add.Tensor", "aten.mul.Tensor", "softplus"]
    (node,) = graph.calls(reference.softplus)
    assert node.args[1] is None
