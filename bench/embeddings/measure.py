"""Vectors of an engine against transformers, and the time of texts together and separately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.runtime.engine import Engine
from optkit.runtime.pooling import POOLINGS, Pooling
from optkit.text.corpora import load_text
from optkit.text.tokenizer import Tokenizer

BATCH = 64  # texts
MIXED = (8, 16, 24, 32, 48, 64)  # tokens of a text, in turn
LENGTHS = (2, 4, 8, 16, 32, 64)  # of all texts of a measurement of speed


def texts(tokenizer: Tokenizer, lengths: Sequence[int] = MIXED) -> list[list[int]]:
    """Token ids of ``BATCH`` pieces of the evaluation text, of ``lengths`` in turn."""
    ids = tokenizer.encode(load_text("evaluation")[: 1000 * BATCH])
    found, at = [], 0
    for index in range(BATCH):
        length = lengths[index % len(lengths)]
        found.append(ids[at : at + length])
        at += length
    return found


def is_quantized(graph: Graph) -> bool:
    """True if a linear layer of ``graph`` has integer weights."""
    return any(node.target in ops.QUANTIZED_LINEARS for node in graph.fx.nodes)


def fidelity(
    engine: Engine, prompts: Sequence[Sequence[int]], model: Path, quantized: bool
) -> dict[str, Any]:
    """The smallest cosine of the engine's vectors with transformers in ``model``, for each pooling."""
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    states = []
    for prompt in prompts:
        with torch.inference_mode():
            states.append(reference(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0].double())
    result: dict[str, Any] = {}
    kind = "quantized" if quantized else "float"
    for pooling in POOLINGS:
        expected = torch.stack([pooled(rows, pooling) for rows in states])
        found = torch.from_numpy(engine.embed(prompts, pooling)).double()
        cosines = torch.nn.functional.cosine_similarity(found, expected)
        result[f"{kind}, {pooling}: min cosine"] = float(cosines.min())
    return result


def pooled(rows: torch.Tensor, pooling: str) -> torch.Tensor:
    """The vector of the states [T, hidden size] of transformers."""
    return {"last": rows[-1], "mean": rows.mean(0), "cls": rows[0]}[pooling]


def speed(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int, quantized: bool) -> dict[str, Any]:
    """Seconds of all texts in a message each and in a single message, alternating, and equality of the vectors' bits.

    Args:
        prompts: of the same length, which stands in the names of the results.
        quantized: the layers are native. PyTorch computes float layers, and the last bits may depend on the batch.
    """
    pooling: Pooling = "last"

    def alone() -> np.ndarray:
        return np.concatenate([engine.embed([prompt], pooling) for prompt in prompts])

    def together() -> np.ndarray:
        return engine.embed(prompts, pooling)

    same = bool(np.array_equal(alone(), together()))  # and the warm-up
    times = [(_seconds(alone), _seconds(together)) for _ in range(rounds)]
    one_by_one, batch = (statistics.median(side) for side in zip(*times, strict=True))
    name = f"{len(prompts[0])} tokens"
    return {
        f"{'quantized' if quantized else 'float'}, {name}: batch differs": 0 if same else 1,
        f"{name}: one by one, ms": 1e3 * one_by_one / len(prompts),
        f"{name}: batch, ms": 1e3 * batch / len(prompts),
        f"{name}: gain": one_by_one / batch,
        f"{name}: rounds, s": times,
    }


def first_call(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    """Seconds of the first text, for which the model without the head is prepared."""
    return {"first call, ms": 1e3 * _seconds(lambda: engine.embed([prompt], "last"))}


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
