"""A runtime that forgets, against transformers with a mask."""

from __future__ import annotations

import pytest
import torch

from bench.long import evicting
from bench.long.evicting import EvictingLogits
from optkit.lowering.lower import lower
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids

BLOCK, WINDOW, CHUNK = 4, 8, 6


def test_logits_are_those_of_a_mask_over_first_block_and_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicting, "CHUNK", CHUNK)
    window = random_ids([47])[0].tolist()
    source = EvictingLogits(lower(captured("llama")), WINDOW, BLOCK)
    rows = source.rows(window, range(len(window)))
    queries, keys = torch.arange(len(window))[:, None], torch.arange(len(window))[None]
    first_kept = (queries // CHUNK * CHUNK - WINDOW) // BLOCK * BLOCK  # of a chunk, in whole blocks
    seen = ((keys < BLOCK) | (keys >= first_kept)) & (keys <= queries)
    assert not seen[-1].all()
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    model = tiny_model("llama")
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([window]), attention_mask=mask, use_cache=False).logits[0]
    torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
