"""The check of a capture: the graph against the model in transformers' own eager attention and masks.

The two sides share the weights; all steps of the capture are on the side of the graph alone. Three runs are compared:

- a whole prompt, of another length than the export's and longer than every window and chunk;
- two prompts in ragged batches over paged KV, in chunks and then token by token: a graph that mixes the tokens of a
  call (a shift, a sum, a top-k over the tokens) has other logits there than for a whole prompt;
- a prompt at the last positions of the model: scales and angles that depend on the position. Frequencies that depend
  on the length of the sequence are fixed in the other runs (``rope``), and chosen by transformers here.

A long window or chunk is made short for the check, on both sides: in the attention nodes of the graph, and in the
model's configuration, from which transformers makes the eager masks. A window of the graph that no configuration has is
refused. So the comparison covers the layers with a window or a chunk, the tokens inside the window and the length of
the window, besides scale, softcap, RoPE, grouping of heads and every part of the model around attention.

The check compares numbers: a difference of logits below ``TOLERANCE`` is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from optkit.capture import boundary, building
from optkit.capture.loading import refusals
from optkit.capture.rope import RopeChoice, fixed_rope
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower
from optkit.runtime.logits import RuntimeLogits

TOLERANCE = 2e-4  # of the largest logit; what float32 rounding changes is below 1e-5 of it
TOKENS = (37, 17)  # of the two prompts
SHORT = 7  # tokens of the shortest window or chunk that a longer one is made into
SPANS = ("sliding_window", "attention_chunk_size")  # lengths of windows and chunks in configurations


def check_capture(
    graph: Graph,
    model: Any,
    tolerance: float = TOLERANCE,
    *,
    rope: RopeChoice | None = None,
    counted: bool = False,
    own_attention: bool = False,
) -> None:
    """Compare ``graph`` with ``model`` in eager attention, as described at the head of the module.

    ``counted``: the model derives positions from the length of its cache. ``own_attention``: windows were read from
    the model's own masks at all positions (``scores``), and keep their lengths.

    Raises:
        UnsupportedModel: the logits differ, or nothing can be compared, by a window or the model's attention.
    """
    short = {} if own_attention else short_spans(model)
    executable = lower(graph if own_attention else with_short_windows(graph, short))
    limit = tolerance, graph.meta.model_type
    first, second = prompts = [random_ids(graph, tokens) for tokens in TOKENS]
    last = graph.meta.max_model_len - len(second)
    # transformers' cache has no length without a layer of attention
    cached = any(True for _ in graph.calls(reference.attention, reference.paged_attention))
    with eager(model), short_configuration(model, short), fixed_rope(model, rope):
        expected = eager_logits(model, first)
        refuse_not_finite(model, expected, graph.meta.model_type)
        if own_attention:
            check_implementations(model, first, expected)
        compare("in a whole prompt", whole(executable, first), expected, *limit)
        paged = RuntimeLogits(executable, block_size=4, chunk=15, decode=4).logits(
            [p.tolist() for p in prompts]
        )
        for given, ids in zip(paged, prompts, strict=True):
            compare("in batches of chunks", given, eager_logits(model, ids, use_cache=cached), *limit)
    with eager(model), short_configuration(model, short):
        cache: dict[str, Any] = {"past_key_values": LongCache(last)} if counted else {}
        far = eager_logits(model, second, position_ids=positions(second, last)[None], **cache)
        compare(f"from position {last} on", whole(executable, second, last), far, *limit)


def refuse_not_finite(model: Any, logits: Tensor, model_type: str) -> None:
    """Refuse a model whose own logits are NaN or infinite, and name the first weight that is.

    Raises:
        UnsupportedModel: a logit is not finite.
    """
    if bool(logits.isfinite().all()):
        return
    for name, weight in model.named_parameters():
        building.refuse_not_finite(name, weight.data, model_type)
    what = "its logits in transformers are NaN or infinite, so there is nothing to compare with"
    raise UnsupportedModel(what, where=model_type)


def check_implementations(model: Any, ids: Tensor, expected: Tensor) -> None:
    """Refuse a model whose eager attention gives other logits than its SDPA attention, transformers' default.

    ALiBi of Falcon differs so in transformers 5.23: eager attention adds the biases twice.
    """
    if not type(model)._supports_sdpa:
        return
    with changed([(config, name, "sdpa") for config, name, _ in settings(model, "_attn_implementation")]):
        error = (eager_logits(model, ids) - expected).abs().max().item()
    if not error <= TOLERANCE * expected.abs().max().item():
        what = "its eager and its SDPA attention differ in transformers, so there is nothing to compare with"
        raise UnsupportedModel(what, where=model.config.model_type)


def compare(case: str, given: Tensor, expected: Tensor, tolerance: float, model_type: str) -> None:
    error, largest = (given - expected).abs().max().item(), expected.abs().max().item()
    if not error <= tolerance * largest:
        raise UnsupportedModel(
            f"the captured graph's logits differ from those of transformers' eager attention by {error:.2e} "
            f"(allowed {tolerance * largest:.0e}) {case}",
            where=model_type,
        )


def random_ids(graph: Graph, tokens: int) -> Tensor:
    """Any ids of the vocabulary, as many as the model has positions for."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(graph.meta.vocab_size, (min(tokens, graph.meta.max_model_len),), generator=generator)


def positions(ids: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + len(ids))


def whole(executable: Executable, ids: Tensor, first: int = 0) -> Tensor:
    """Logits [T, V] of the graph, for a sequence with positions from ``first`` on."""
    inputs = dense_inputs([len(ids)], ids, executable.states)
    return executable(inputs | {"positions": positions(ids, first)})


def eager_logits(model: Any, ids: Tensor, *, use_cache: bool = False, **options: Any) -> Tensor:
    """Logits [T, V] of the model, for a sequence.

    Raises:
        UnsupportedModel: the model's own code fails.
    """
    case = "with a KV cache" if use_cache else f"on {len(ids)} tokens"
    with (
        refusals(model.config.model_type, f"transformers' own code fails {case}", typed=True),
        torch.no_grad(),
    ):
        return model(input_ids=ids[None], use_cache=use_cache, **options).logits[0]


class LongCache(DynamicCache):
    """An empty cache that reports ``length`` tokens to layers, and none to masks."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return query_length, 0


# -- the model in eager attention ------------------------------------------------------------------------


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """The family's eager attention and loop over experts inside; a call of optkit's own attention is refused."""
    names = ("_attn_implementation", "_experts_implementation")
    with changed([(config, name, "eager") for config, name, _ in settings(model, *names)]):
        AttentionInterface.register(boundary.NAME, not_eager)
        try:
            yield
        finally:
            boundary.register()


def not_eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedModel(
        f"{type(module).__name__} keeps to the attention that it was built with, so there is nothing to compare with"
    )


Setting = tuple[Any, str, Any]  # a configuration, the name of an attribute, its value


def settings(model: Any, *names: str) -> list[Setting]:
    """The attributes ``names`` in all configurations read by modules of the model, outer modules first."""
    found = [config for m in model.modules() if (config := getattr(m, "config", None)) is not None]
    configurations = {id(config): config for config in found}.values()
    return [(c, name, getattr(c, name)) for c in configurations for name in names if hasattr(c, name)]


@contextmanager
def changed(new: Sequence[Setting]) -> Iterator[None]:
    """Apply the settings ``new`` inside the block, and the former values after the block."""
    old = [(config, name, getattr(config, name)) for config, name, _ in new]
    try:
        for setting in new:
            setattr(*setting)
        yield
    finally:
        for setting in old:
            setattr(*setting)


# -- windows and chunks ----------------------------------------------------------------------------------


def short_spans(model: Any) -> dict[int, int]:
    """A short length for each length of a window or chunk in the model's configuration, in the same order."""
    lengths = {value for _, _, value in settings(model, *SPANS) if type(value) is int and value > SHORT}
    return {length: SHORT + i for i, length in enumerate(sorted(lengths), start=1)}


def with_short_windows(graph: Graph, short: Mapping[int, int]) -> Graph:
    """The graph with windows and chunks replaced by the lengths of ``short``.

    Raises:
        UnsupportedModel: a window or chunk is none of the configuration's.
    """
    graph = graph.clone()
    for node in graph.calls(reference.attention, reference.paged_attention):
        spans = {name: node.kwargs[name] for name in ("window", "chunk") if name in node.kwargs}
        for name, length in spans.items():
            if length > SHORT and length not in short:
                what = f"a layer has a {name} of {length} tokens, which its configuration does not name"
                raise UnsupportedModel(what, where=graph.meta.model_type)
        node.kwargs = {**node.kwargs, **{name: short.get(length, length) for name, length in spans.items()}}
    return graph


def short_configuration(model: Any, short: Mapping[int, int]) -> Any:
    """A context in which the model's configuration has the windows and chunks of ``short``."""
    return changed([(c, name, short[v]) for c, name, v in settings(model, *SPANS) if v in short])
