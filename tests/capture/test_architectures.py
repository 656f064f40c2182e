"""Every supported architecture: the captured graph against transformers' eager float32."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.dense import dense_logits
from optkit.graph.lower import lower
from tests.architectures import SPECIFIC, tiny_model
from tests.graphs import captured
from tests.ragged import ragged_logits

TOLERANCE = 1e-4


def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", sorted(SPECIFIC))
def test_logits_match_eager(name):
    graph, model = captured(name), tiny_model(name)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (37,), generator=generator)
    torch.testing.assert_close(dense_logits(graph, ids), eager_logits(model, ids), atol=TOLERANCE, rtol=1e-4)

    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (29, 7, 41)]
    for prompt, logits in zip(prompts, ragged_logits(lower(graph), prompts), strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=TOLERANCE, rtol=1e-4)
