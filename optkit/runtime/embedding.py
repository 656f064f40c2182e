"""Embeddings: the hidden states in front of a model's output head, pooled to a vector for each text.

The graph without the head is lowered at the first use, over the packed weights of the engine: memory holds a single
copy. Texts lie one after another in the flattened token batch of a step, without
padding, in a small KV pool apart from the pool of requests. A long text takes several steps. The model is causal: the
state of the last token has seen the whole text, and the state of the first token only itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from optkit.checkpoint.insertion import activation_of
from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.states import recurrent_of
from optkit.kernels import reference
from optkit.lowering.compiled.plan import PLAN
from optkit.runtime.pooling import Pooling, grouped
from optkit.runtime.runner import ModelRunner, ServableModel
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest

HEADS = (reference.linear, *ops.QUANTIZED_LINEARS)


def hidden_graph(graph: Graph) -> Graph:
    """``graph`` with the input of its output head as output: [L, hidden size], rows by ``logits_index``.

    Raises:
        UserError: the graph ends with something else than a linear layer and ops on its result.
    """
    hidden = graph.clone()
    hidden.annotations.pop(PLAN, None)  # compiled layers may hold parts of the head
    output = next(node for node in hidden.fx.nodes if node.op == "output")
    output.args = (activation_of(head_of(output.args[0])),)
    hidden.fx.eliminate_dead_code()
    hidden.prune()
    return hidden


def head_of(node: fx.Node) -> fx.Node:
    """The output head behind ``node``, the logits: behind ops such as a soft cap, and the variant for many tokens.

    Raises:
        UserError: there is none.
    """
    while node.target not in HEADS:
        if node.target is reference.by_tokens:
            node = ops.argument(node, "many")
            continue
        before = [n for n in node.all_input_nodes if n.op == "call_function"]
        if len(before) != 1:
            raise UserError(f"the output head can't be found behind {node.name}", where="graph.json")
        (node,) = before
    return node


@dataclass
class Embedder:
    """Pooled hidden states of ``model``, a lowered ``hidden_graph``.

    Attributes:
        max_tokens: of a step.
        runner: the model on its KV pool, which grows to what a call needs.
    """

    model: ServableModel
    block_size: int
    max_tokens: int
    runner: ModelRunner | None = None

    def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
        """Vectors [prompts, hidden size] float32, on the CPU.

        Args:
            prompts: token ids, at least one each.
            pooling: the state of the ``last`` token, the ``mean`` of all, or that of the first token (``cls``).
        """
        found: list[Tensor] = []
        for group in grouped(prompts, self.max_tokens):
            found += self.embed_group(group, pooling)
        return torch.stack(found)

    def embed_group(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> list[Tensor]:
        requests, every = self.requests(prompts), pooling != "last"
        runner = self.pool(sum(len(r.block_tables[0]) for r in requests), len(requests))
        parts: list[list[Tensor]] = [[] for _ in requests]
        while pending := [(i, r) for i, r in enumerate(requests) if r.num_computed < len(r.token_ids)]:
            items = [
                ScheduledRequest(r, min(r.num_pending, self.max_tokens), all_logits=every) for _, r in pending
            ]
            rows = runner.execute(Batch(tuple(items))).float().cpu()
            pieces = rows.split([item.num_logits for item in items])
            for (index, request), item, piece in zip(pending, items, pieces, strict=True):
                parts[index].append(piece)
                request.num_computed += item.num_new
        return [pooled(torch.cat(found), pooling) for found in parts]

    def requests(self, prompts: Sequence[Sequence[int]]) -> list[Request]:
        """A request for each prompt, with blocks and a slot for a recurrent state of its own."""
        found, first = [], 0
        for slot, prompt in enumerate(prompts):
            received = EngineRequest(
                request_id="", prompt_ids=(), sampling=SamplingParams(max_tokens=1), arrival=0.0
            )
            count = -(-len(prompt) // self.block_size)
            tables = [list(range(first, first + count))]
            found.append(Request(received, list(prompt), block_tables=tables, state_slot=slot))
            first += count
        return found

    def pool(self, num_blocks: int, num_sequences: int) -> ModelRunner:
        """The model on a pool of at least ``num_blocks`` blocks, with states for ``num_sequences`` sequences."""
        slots = num_sequences if recurrent_of(self.model.states) else 0
        runner = self.runner
        if runner is None or runner.num_blocks < num_blocks or runner.num_slots < slots:
            self.runner = runner = ModelRunner(self.model, num_blocks, self.block_size, num_slots=slots)
        return runner


def pooled(rows: Tensor, pooling: Pooling) -> Tensor:
    """The vector [hidden size] of the states [T, hidden size] of a text."""
    if pooling == "mean":
        return rows.double().mean(0).float()
    return rows[-1] if pooling == "last" else rows[0]


MakeEmbedder = Callable[[], Embedder]  # at the first use
