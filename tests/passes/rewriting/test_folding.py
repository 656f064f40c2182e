"""Scales folded into the producers of activations leave the model as it is, and reasons name what can't be folded."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.verify import verify
from optkit.passes.rewriting.folding import fold, norm_of, private, readers, why_not_foldable
from tests.support.graphs import apply, assert_same_logits, captured


@pytest.mark.parametrize("fusions", [(), ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm")])
@pytest.mark.parametrize("model", ["llama", "qwen2", "gemma2"])
def test_fold_keeps_the_logits_for_every_foldable_activation(model: str, fusions: tuple[str, ...]) -> None:
    graph = captured(model)
    before = graph.clone()
    for name in fusions:
        apply(graph, name)
    generator, folded = torch.Generator().manual_seed(2), 0
    for x, linears in readers(graph).items():
        if why_not_foldable(graph, x, linears) is None:
            channels = graph.linear_weight(linears[0]).shape[1]
            fold(graph, x, linears, torch.rand(channels, generator=generator) * 3 + 0.2)
            folded += 1
    assert folded >= 2 * 3
    verify(graph)
    assert_same_logits(before, graph)


def test_why_not_foldable_names_a_weight_tied_to_the_embedding() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    found = {why_not_foldable(graph, x, linears) for x, linears in readers(graph).items()}
    assert "its weight is tied to the embedding" in found
    assert "no norm weight or up projection to fold the scale into" in found


def test_private_is_false_for_a_weight_with_two_readers() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    head = list(graph.linears())[-1]
    norm = norm_of(next(iter(readers(graph))))
    assert not private(graph, head.args[1]) and private(graph, norm.args[1])
