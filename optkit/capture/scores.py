"""The form of attention scores, read from a model's own computation.

A model with attention of its own adds mask and biases to ``q @ k.T`` in its own way: sums, ``where``, ``masked_fill``,
buffers. All of these are a function of the product ``P`` [H, T, T] and of positions. So the function is evaluated, on
products of known numbers, in place of a list of patterns. Scores of the form

    ``scale * P + slope[h] * (key position - query position) + any number for each query``

where a token sees itself and the earlier tokens, all or those of a window, and a very small number elsewhere, are what
the attention op computes. Scale and slopes are measured, the mask is compared at as many tokens as the model's
context has, as far as the scores of a layer fit in ``LARGEST`` numbers. Any other function is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from optkit.errors import UnsupportedModel
from optkit.graph.ops.aten import PLACEMENT
from optkit.kernels import reference

aten = torch.ops.aten
CONTRACTIONS = (aten.matmul.default, aten.bmm.default)
SHORT = 40  # tokens of the run that measures the scale
LARGEST = 1 << 26  # scores of a layer in a run
HIDDEN = -1e7  # scores below have no share in the softmax; biases are far above
ROUNDING = 1e-6  # of the largest bias or score, in float32


@dataclass(frozen=True)
class Form:
    """The scores of the attention op: ``slopes`` [H] are None without biases, ``window`` is 0 for all tokens."""

    scale: float
    window: int
    slopes: Tensor | None


class ScoreFunction:
    """Softmax's input ``scores`` as a function of the only product inside, in the graph of an exported ``program``.

    Raises:
        UnsupportedModel: the scores are computed from more than a product and positions.
    """

    def __init__(self, program: torch.export.ExportedProgram, scores: fx.Node) -> None:
        signature = program.graph_signature
        self.learned = set(signature.inputs_to_parameters)
        self.buffers = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        self.values = {**program.constants, **program.state_dict}
        inputs = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in signature.user_inputs]
        self.ids, self.positions = inputs[:2]
        self.tokens = str(self.ids.meta["val"].shape[1])
        self.scores = scores
        self.cone = self.dependencies()
        products = [node for node in self.cone if node.target in CONTRACTIONS]
        if len(products) != 1:
            raise UnsupportedModel(f"its attention scores are computed from {len(products)} products")
        self.product = products[0]

    def dependencies(self) -> list[fx.Node]:
        """The nodes behind the scores, in the graph's order, up to products."""
        found, left = set[fx.Node](), [self.scores]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [] if node.target in CONTRACTIONS or self.is_count(node) else node.all_input_nodes
        for node in found:
            if node is self.ids or node.name in self.learned:
                raise UnsupportedModel("its attention scores depend on more than queries, keys and positions")
        return [node for node in self.scores.graph.nodes if node in found]

    def is_count(self, node: fx.Node) -> bool:
        """True for the number of tokens, read from any tensor."""
        return node.target is aten.sym_size.int and str(node.meta["val"]) == self.tokens

    @property
    def key(self) -> str:
        """The computation in words; functions with equal words are equal."""
        number = {node: i for i, node in enumerate(self.cone)}
        words: list[Any] = []
        for node in self.cone:
            if node is self.product:
                words.append(("product", tuple(node.meta["val"].shape)))
            elif self.is_count(node):
                words.append("tokens")
            elif node.op == "placeholder":
                words.append(node.name)
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
                words.append((str(node.target), args, kwargs))
        return repr(words)

    @property
    def heads(self) -> int:
        return int(self.product.meta["val"].shape[-3])

    def __call__(self, product: Tensor) -> Tensor:
        """Scores [H or 1, T, T] for a product [H or 1, T, T]."""
        tokens = product.shape[-1]
        known: dict[fx.Node, Any] = {}
        last = {source: node for node in self.cone for source in node.all_input_nodes}
        for node in self.cone:
            known[node] = self.value(node, product, tokens, known)
            for source in node.all_input_nodes:
                if last[source] is node:
                    known.pop(source, None)
        scores: Tensor = known[self.scores]
        return scores.to(torch.float32).reshape(-1, tokens, tokens)

    def value(self, node: fx.Node, product: Tensor, tokens: int, known: dict[fx.Node, Any]) -> Any:
        if node is self.product:
            return product if node.meta["val"].ndim == 3 else product[None]
        if self.is_count(node):
            return tokens
        if node is self.positions:
            return torch.arange(tokens)[None]
        if node.op == "placeholder":
            return self.buffer(node)
        if node.target is aten._assert_tensor_metadata.default:
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        placement = {"device": "cpu"} if "device" in kwargs else {}
        kept = {key: value for key, value in kwargs.items() if key not in PLACEMENT}
        return node.target(*args, **kept, **placement)

    def buffer(self, node: fx.Node) -> Tensor:
        value = self.values.get(self.buffers.get(node.name, ""))
        if not isinstance(value, Tensor) or value.device.type == "meta":
            raise UnsupportedModel(
                "its attention mask is a tensor of the model, which was built without tensors"
            )
        return value.detach().cpu()


def read_form(function: ScoreFunction, width: int, longest: int) -> Form:
    """The form of ``function``, for heads of ``width`` channels and a context of ``longest`` tokens.

    Raises:
        UnsupportedModel: the scores have another form.
    """
    short = min(SHORT, longest)
    rest = function(torch.zeros(function.heads, short, short))
    scale = scale_of(function, rest)
    slopes = slopes_of(rest, window_of(rest))
    for heads in (1, function.heads):
        tokens = min(longest, math.isqrt(LARGEST // max(heads, len(rest) if slopes.any() else 1)))
        try:
            rest = function(torch.zeros(heads, tokens, tokens))
        except RuntimeError as error:  # one head: the function has views with the number of heads
            if heads == function.heads:
                raise UnsupportedModel(f"its attention can't be computed for {tokens} tokens") from error
            continue
        break
    window = window_of(rest)
    exact = slopes_of(rest, window)
    if not torch.allclose(exact, slopes, rtol=1e-4, atol=1e-9):
        raise UnsupportedModel("its attention biases depend on the number of tokens")
    return Form(nice(scale, width), window, exact.expand(function.heads).clone() if exact.any() else None)


def scale_of(function: ScoreFunction, rest: Tensor) -> float:
    """The factor of the product, where ``rest`` [H, T, T] are the scores of a product of zeros."""
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(function.heads, *rest.shape[1:], generator=generator) * 1024
    scores = function(product)
    seen = (rest > HIDDEN).expand_as(scores)
    change, given = (scores - rest)[seen].double(), product[seen].double()
    scale = float(change @ given / (given @ given))
    largest = max(float(scores[seen].abs().max()), float(rest.expand_as(seen)[seen].abs().max()))
    linear = float((change - scale * given).abs().max()) <= 4 * ROUNDING * largest
    if not (linear and scale > 0 and bool((scores[~seen] < HIDDEN).all())):
        raise UnsupportedModel("its attention scores are no multiple of the products of queries and keys")
    return scale


def nice(scale: float, width: int) -> float:
    """The usual scale within rounding of a measured one."""
    usual: Iterator[float] = (value for value in (1.0, width**-0.5) if abs(scale / value - 1) < ROUNDING)
    return next(usual, scale)


def window_of(rest: Tensor) -> int:
    """The window of a mask, 0 for all earlier tokens, from the scores [H, T, T] of a product of zeros."""
    tokens = rest.shape[-1]
    seen = rest > HIDDEN
    window = int(seen[0, -1].sum())
    mask = reference.causal_mask(tokens, tokens, window, rest.device)
    if not bool((seen == mask).all()):
        raise UnsupportedModel("its attention mask is not causal, or has no window of a fixed length")
    return window if window < tokens else 0


def slopes_of(rest: Tensor, window: int) -> Tensor:
    """The slopes [H] of biases, from the scores [H, T, T] of a product of zeros."""
    tokens = rest.shape[-1]
    seen = reference.causal_mask(tokens, tokens, window, rest.device)
    span = (window or tokens) - 1
    relative = rest - rest.diagonal(dim1=1, dim2=2)[..., None]
    slopes = relative[:, -1, tokens - 1 - span] / -max(span, 1)
    position = torch.arange(tokens)
    distances = position[None] - position[:, None]
    error = (relative - slopes[:, None, None] * distances).masked_fill_(~seen, 0).abs().max()
    largest = rest.masked_fill(~seen, 0).abs().max()
    if not float(error) <= ROUNDING * float(largest):
        raise UnsupportedModel("its attention biases are not linear in the distance")
    return slopes
