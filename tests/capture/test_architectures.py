"""Every supported architecture: the captured graph against transformers' eager float32."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.verify import verify
from optkit.lowering.lower import lower
from tests.support.architectures import SPECIFIC, tiny_model
from tests.support.graphs import captured, dense
from tests.support.ragged import ragged_logits

aten = torch.ops.aten
TOLERANCE = 1e-4
# Pieces of the idioms of canonicalization. A graph with a piece left is correct and slow: logits do not show the piece.
PIECES = (aten.linear.default, aten.embedding.default, aten.rsqrt.default, aten.mean.dim, aten.cos.default,
          aten.sin.default, aten.matmul.default, aten.silu.default)  # fmt: skip
# Rotate neighbours, or from tables of half the width; cohere2 norms without a bias; gemma3n_text mixes streams.
OF_ITS_OWN = {"cohere2", "deepseek_v2", "deepseek_v3", "gemma3n_text", "gpt_oss", "llama4_text"}


def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", sorted(SPECIFIC))
def test_logits_match_eager(name):
    graph, model = captured(name), tiny_model(name)
    verify(graph)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (37,), generator=generator)
    torch.testing.assert_close(dense(graph, ids), eager_logits(model, ids), atol=TOLERANCE, rtol=1e-4)

    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (29, 7, 41)]
    for prompt, logits in zip(prompts, ragged_logits(lower(graph), prompts), strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=TOLERANCE, rtol=1e-4)
    pieces = {node.name for node in graph.calls(*PIECES)}
    assert not pieces or name in OF_ITS_OWN
