"""The scorer: the first layers of a model on a whole prompt, in steps, and the tokens of the prompt to keep.

Prompts are scored in turn, in a KV pool of the first layers alone. Scores do not depend on the cut of the prompt into
steps, as far as the model's kernels do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.runtime.runner import ModelRunner, ServableModel
from optkit.runtime.specprefill.graph import ScoredLayer
from optkit.runtime.specprefill.positions import Positions
from optkit.runtime.specprefill.scoring import Scoring
from optkit.runtime.specprefill.selection import QUERIES, attention_to, importance, kept_positions
from optkit.runtime.types import Batch, Request, ScheduledRequest


class PromptScorer:
    """The first layers of a model.

    Args:
        model: a lowered ``scoring_graph``.
        layers: the columns of the output.
        max_tokens: of a step.
    """

    def __init__(
        self, model: ServableModel, layers: Sequence[ScoredLayer], block_size: int, max_tokens: int
    ) -> None:
        self.model, self.layers, self.block_size, self.max_tokens = (
            model,
            tuple(layers),
            block_size,
            max_tokens,
        )
        self._runner: ModelRunner | None = None
        self._last: tuple[list[int], int, Positions] | None = None  # prompt, count, result

    def release(self) -> None:
        """Free the KV pool, which the next prompt allocates again."""
        self._runner = None

    @torch.inference_mode()
    def advance(self, scoring: Scoring, limit: int) -> Positions | None:
        """Run the first layers on up to ``limit`` tokens; the positions to keep, with the last of the tokens.

        The result of the last prompt is remembered for the next choices of a request.
        """
        part = scoring.part
        if self._last is not None and self._last[:2] == (part.token_ids, scoring.count):
            return self._last[2]
        num_new = min(part.num_pending, max(1, min(limit, self.max_tokens)))
        runner = self._prepared(part)
        rows = runner.execute(Batch((ScheduledRequest(part, num_new, all_logits=True),)))
        self._collect(scoring, torch.from_numpy(rows))
        part.num_computed += num_new
        if part.num_pending:
            return None
        positions = Positions.of(
            kept_positions(importance(self._attention(scoring)), scoring.count), part.token_ids
        )
        self._last = part.token_ids, scoring.count, positions
        return positions

    def _prepared(self, part: Request) -> ModelRunner:
        """The runner, with a pool for the whole of ``part``, whose blocks lie in order."""
        blocks = -(-len(part.token_ids) // self.block_size)
        part.block_tables = [list(range(blocks))]
        if self._runner is None or self._runner.num_blocks < blocks:
            self._runner = ModelRunner(self.model, blocks, self.block_size)
        return self._runner

    def _collect(self, scoring: Scoring, rows: Tensor) -> None:
        """Keep the keys of ``rows`` [n, columns], and the queries of the last tokens."""
        sizes = [size for layer in self.layers for size in layer.sizes]
        columns = rows.split(sizes, dim=1)
        before = scoring.queries or [rows.new_empty(0, size) for size in sizes[::2]]
        pairs = zip(before, columns[::2], strict=True)
        scoring.queries = [torch.cat((old, new[-QUERIES:]))[-QUERIES:] for old, new in pairs]
        scoring.keys.append([keys.clone() for keys in columns[1::2]])

    def _attention(self, scoring: Scoring) -> list[Tensor]:
        """The attention of the last queries to each token, [T] of each layer."""
        found = []
        for number, layer in enumerate(self.layers):
            queries = scoring.queries[number].unflatten(1, (layer.heads, -1))
            keys = torch.cat([step[number] for step in scoring.keys]).unflatten(1, (layer.kv_heads, -1))
            found.append(attention_to(queries, keys, layer.scores))
        return found
