"""A float graph as a differentiable function of windows of token ids, with low-rank adapters on its linear layers.

Ops run by their references, plain tensor functions; attention, which the reference computes through the paged cache,
runs as causal attention of each window. The weight of a linear layer W becomes ``W + B A``, A [r, K] and B [N, r]
(LoRA, arXiv 2106.09685); A and B are trained and W is not, so a backward pass needs no gradient of W. ``merged`` gives
the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.ops.record import Work
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs

TRAINED = (Work.POINTWISE, Work.GATHER, Work.LINEAR, Work.ATTENTION)
PLAIN_SCORES = {"sinks": None, "slopes": None, "softcap": 0.0, "chunk": 0}
Adapter = tuple[Tensor, Tensor]  # A [r, K], B [N, r]


def why_not(graph: Graph) -> str | None:
    """The reason against training ``graph``, or None."""
    for node in graph.fx.nodes:
        op = ops.record_of(node.target) if node.op == "call_function" else None
        if op is None:
            continue
        if op.work not in TRAINED or (op.stored and op.work is not Work.ATTENTION):
            return f"{node.name} ({ops.op_name(node.target)}) is not trained, only float layers are"
        if op.work is Work.ATTENTION and (node.target is not reference.attention or not is_plain(node)):
            return f"{node.name} has scores that are not trained"
    if any(spec.latent for spec in graph.meta.kv_specs):
        return "latent KV is not trained"
    return None


def is_plain(attention: fx.Node) -> bool:
    """True for causal attention, with or without a window."""
    return all(ops.argument(attention, name) == value for name, value in PLAIN_SCORES.items())


class Differentiable:
    """``graph`` as a function with adapters.

    Args:
        rank: r of the adapters.

    Attributes:
        adapters: by the name of the linear layer's node; B begins at zero, so the function begins as the graph.
    """

    def __init__(self, graph: Graph, rank: int, seed: int = 0) -> None:
        self.graph = graph
        self.weights = {name: plain(weight.value) for name, weight in graph.weights.items()}
        self.adapters: dict[str, Adapter] = {}
        generator = torch.Generator().manual_seed(seed)
        for node in trained_linears(graph):
            n, k = graph.linear_shape(node)
            a = torch.randn(rank, k, generator=generator) / math.sqrt(k)
            self.adapters[node.name] = (a.requires_grad_(), torch.zeros(n, rank, requires_grad=True))

    def parameters(self) -> list[Tensor]:
        """All A and B, in order."""
        return [tensor for pair in self.adapters.values() for tensor in pair]

    def logits(self, ids: Tensor) -> Tensor:
        """Logits [B * L, V] of windows ``ids`` [B, L] int64."""
        count, length = ids.shape
        inputs = dense_inputs([length] * count, ids.flatten(), ())
        env: dict[fx.Node, Any] = {}
        for node in self.graph.fx.nodes:
            if node.op == "placeholder":
                env[node] = inputs.get(str(node.target))
            elif node.op == "get_attr":
                env[node] = self.weights[str(node.target)]
            elif node.op == "output":
                return self.value(node.args[0], env)
            else:
                env[node] = self.call(node, env, count)
        raise ValueError("the graph has no output")

    def value(self, argument: Any, env: Mapping[fx.Node, Any]) -> Any:
        return fx.map_arg(argument, env.__getitem__)

    def call(self, node: fx.Node, env: Mapping[fx.Node, Any], count: int) -> Any:
        """The result of a call, for ``count`` windows."""
        args, kwargs = self.value(node.args, env), self.value(node.kwargs, env)
        if node.target in ATTENTION:
            q, k, v = args[:3]
            return causal(q, k, v, count, ops.argument(node, "scale"), ops.argument(node, "window"))
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if node.name in self.adapters:
            a, b = self.adapters[node.name]
            result = result + F.linear(F.linear(args[0], a), b)
        return result

    @torch.no_grad()
    def merged(self, node: fx.Node) -> Tensor:
        """The weight [N, K] of linear layer ``node`` with its adapter."""
        a, b = self.adapters[node.name]
        return self.weights[str(ops.weight(node).target)] + b @ a


def trained_linears(graph: Graph) -> list[fx.Node]:
    """The float linear layers with an own checkpoint weight, without the output head."""
    found = []
    for node in graph.linears():
        weight = graph.weight_of(ops.weight(node))
        own = weight is not None and weight.origin is not None and len(ops.weight(node).users) == 1
        name = str(ops.weight(node).target)
        head = name in (graph.meta.input_embedding, f"{graph.meta.output_embedding}.weight")
        if own and not head:
            found.append(node)
    return found


def plain(value: Tensor) -> Tensor:
    """``value``, copied where it was made in inference mode and autograd would refuse it."""
    return value.clone() if value.is_inference() else value


def causal(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float, window: int) -> Tensor:
    """Causal attention [T, H, Dv] of ``count`` windows of text of equal length; q [T, H, D], k and v [T, Hkv, ...]."""
    q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    length = q.shape[2]
    mask = None
    if 0 < window < length:
        places = torch.arange(length)
        apart = places[:, None] - places
        mask = (apart >= 0) & (apart < window)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)
