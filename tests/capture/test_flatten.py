"""A graph without the batch dimension computes what the exported model does, whatever dimension an op works on."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from optkit.capture import boundary
from optkit.capture.export import export
from optkit.capture.flatten import Captured, flatten, shift
from optkit.errors import UnsupportedModel
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.states import KVSpec
from optkit.kernels import reference
from tests.support.graphs import captured, dense, random_ids

aten = torch.ops.aten
VOCABULARY, WIDTH = 32, 8


class Mix(nn.Module):
    """The part under test: x [1, T, 8] and positions [1, T] give [1, T, 8]."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError


class SoftmaxOfHeads(Mix):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x.view(1, -1, 2, 4).transpose(1, 2).softmax(2).transpose(1, 2).contiguous().view(x.shape)


class SplitAndCat(Mix):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        a, b, c = x.split([3, 4, 1], dim=-1)
        return torch.cat((c, b[..., 1:], a, b[..., :1]), dim=2)


class StackAndSum(Mix):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.stack((x, x * 2, -x), dim=2).sum(2) + x.unsqueeze(3).squeeze(3).mean(-1, keepdim=True)


class Largest(Mix):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        values, _ = x.topk(3, dim=-1)
        return x.sort(dim=2)[0] + values.sum(-1, keepdim=True) + x.amax(-1, keepdim=True) + x.cumsum(2)


class ByPosition(Mix):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * positions[..., None].float() + torch.select(x, 2, 1).unsqueeze(2)


class Rotated(Mix):
    """Transposes and dimensions counted from the end."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = x.view(1, -1, 2, 4).transpose(-3, -2)
        return torch.cat((-heads[..., 2:], heads[..., :2]), dim=-1).transpose(1, 2).contiguous().view(x.shape)


class OverTheBatch(Mix):
    """Dimension 0 is gone from the graph: the ops run on the original shapes."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = torch.cat((x, x * 3), dim=0).split(1)
        return x.sum(0, keepdim=True) * second + first


class Products(Mix):
    """Matrix products, which have no rule."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (x.transpose(1, 2) @ x / 50).softmax(-1).matmul(x.transpose(1, 2)).transpose(1, 2)


class KindByPosition(Mix):
    """A buffer with a row for each position, as BERT's token types: the rows of the batch are made of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Buffer(torch.arange(64)[None] % 8, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        kinds = self.kinds.expand(positions.shape[0], -1).gather(1, positions)
        return x + torch.nn.functional.one_hot(kinds, WIDTH)


class Decomposed(Mix):
    """Ops that no graph has, which capture makes of others."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        rolled = torch.roll(x, 3, -1) + torch.nn.functional.glu(torch.cat((x, x), -1))
        return rolled.logsumexp(-1, keepdim=True) + torch.einsum("btc,dc->btd", x, x.new_ones(WIDTH, WIDTH))


class Chain(Mix):
    """One mix after the other: an export takes a second."""

    def __init__(self, *mixes: Mix) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(mixes)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for mix in self.mixes:
            x = torch.tanh(mix(x, positions))
        return x


class Toy(nn.Module):
    """A language model with a ``Mix`` and one attention of two heads."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=VOCABULARY, max_position_embeddings=64)
        self.config._attn_implementation = boundary.NAME
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(VOCABULARY, WIDTH), mix, nn.Linear(WIDTH, VOCABULARY)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **options: Any) -> Any:
        x = self.mix(self.embed(input_ids), position_ids)
        heads = x.view(1, -1, 2, 4).transpose(1, 2)
        x = x + boundary.dense_attention(heads, heads, heads, None, None, 0.5, 0, 0.0, 0, 0).reshape(x.shape)
        return SimpleNamespace(logits=self.head(x[:, logits_to_keep]))


@functools.cache
def flat(*mixes: type[Mix]) -> tuple[Graph, Toy]:
    model = Toy(Chain(*(mix() for mix in mixes)))
    return flatten(Captured(export(model), model, model.config)), model


def expected(model: Toy, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids[None], torch.arange(len(ids))[None], torch.arange(len(ids))).logits[0]


BY_RULE = (SoftmaxOfHeads, SplitAndCat, StackAndSum, Largest, ByPosition, Rotated)
WITHOUT_A_RULE = (OverTheBatch, Products, KindByPosition, Decomposed)


def with_reshapes(graph: Graph) -> Graph:
    """``graph`` with ``reshape`` for ``view``, as canonicalization leaves it: rows of a flat value may lie apart."""
    graph = graph.clone()
    for node in graph.calls(aten.view.default):
        node.target = aten.reshape.default
    return graph


@pytest.mark.parametrize("mixes", [BY_RULE, WITHOUT_A_RULE])
def test_flat_graph_has_the_logits_of_the_model(mixes: tuple[type[Mix], ...]) -> None:
    graph, model = flat(*mixes)
    graph = with_reshapes(graph)
    for ids in random_ids((17, 5), VOCABULARY):
        torch.testing.assert_close(dense(graph, ids), expected(model, ids), atol=1e-5, rtol=1e-5)


def test_ops_with_a_rule_get_no_batch_dimension_back() -> None:
    graph, _ = flat(*BY_RULE)
    assert not [node for node in graph.calls(aten.select.int) if node.args[1:] == (0, 0)]
    assert not [node for node in graph.calls(aten.unsqueeze.default) if node.args[1] == 0]
    assert not list(graph.calls(aten.sym_size.int))
    assert all(node.meta["shape"][:1] != (1,) for node in graph.calls(aten.add.Tensor, aten.mul.Tensor))


def test_graph_knows_the_model_and_its_checkpoint_tensors() -> None:
    graph, model = flat(*WITHOUT_A_RULE)
    assert graph.meta.kv_specs == (KVSpec(0, 2, 4, 4),)
    assert (graph.meta.vocab_size, graph.meta.max_model_len) == (VOCABULARY, 64)
    assert (graph.meta.input_embedding, graph.meta.output_embedding) == ("embed.weight", "head")
    state = model.state_dict()
    assert set(state) <= set(graph.weights)
    for name in state:
        weight = graph.weights[name]
        assert weight.origin is not None and [part.name for part in weight.origin.parts] == [name]
        assert torch.equal(weight.value, state[name])


class HalfOfTheTokens(Mix):
    """Arithmetic on sizes that no view of the flat graph can express."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * (x.shape[1] // 2)


def test_other_arithmetic_on_sizes_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="on sizes"):
        flat(HalfOfTheTokens)


@pytest.mark.parametrize("dim", [1, 2, 3, -1, -2, -3])
def test_shifted_dimension_is_the_same_dimension_of_the_tensor_without_the_first(dim: int) -> None:
    x = torch.randn(1, 3, 4, 5)
    assert torch.equal(x[0].sum(shift(dim, 4)), x.sum(dim)[0])


def test_first_dimension_has_no_place_without_it() -> None:
    assert shift(0, 3) is None and shift(-3, 3) is None
    assert shift([1, -1], 3) == [0, -1] and shift([0, 1], 3) is None


def test_layers_that_share_keys_and_values_read_one_pool() -> None:
    """Gemma 4: layers 2 and 3 attend to K and V of 0 and 1."""
    graph = captured("gemma4_text")
    writers, readers = (list(graph.calls(op)) for op in (reference.attention, reference.paged_attention))
    pools = [[str(ops.argument(n, "k_cache")) for n in nodes] for nodes in (writers, readers)]
    assert pools == [["k_cache_0", "k_cache_1"]] * 2
    assert [ops.argument(n, "k") for n in writers] == [ops.argument(n, "k") for n in readers]
    assert [(s.layer, s.num_kv_heads, s.head_dim, s.window) for s in graph.meta.kv_specs] == [
        (0, 2, 16, 8),
        (1, 1, 32, 0),
    ]


def test_sinks_are_weights_of_the_checkpoint() -> None:
    graph = captured("gpt_oss")
    for layer, node in enumerate(graph.calls(reference.attention)):
        sinks = graph.weight_of(ops.argument(node, "sinks"))
        assert sinks is not None and sinks.origin is not None
        assert [part.name for part in sinks.origin.parts] == [f"model.layers.{layer}.self_attn.sinks"]
