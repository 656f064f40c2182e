"""Every supported architecture: the captured graph against transformers' eager float32."""

from __future__ import annotations

import pytest
import torch

from optkit.capture import boundary, capture
from optkit.capture.check import check_capture
from optkit.errors import UnsupportedModel
from optkit.kernels import reference
from optkit.lowering.lower import lower
from tests.support.architectures import SPECIFIC, tiny_model
from tests.support.graphs import captured, dense
from tests.support.ragged import ragged_logits

aten = torch.ops.aten
TOLERANCE = 1e-4
# What the idioms of canonicalization consist of: right as it is, but slow, so no test of logits misses them.
PIECES = (aten.linear.default, aten.embedding.default, aten.rsqrt.default, aten.mean.dim, aten.cos.default,
          aten.sin.default, aten.matmul.default, aten.silu.default)  # fmt: skip
OF_ITS_OWN = {"cohere2"}  # rotates neighbours instead of halves, and norms without a bias


def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", sorted(SPECIFIC))
def test_logits_match_eager(name):
    graph, model = captured(name), tiny_model(name)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (37,), generator=generator)
    torch.testing.assert_close(dense(graph, ids), eager_logits(model, ids), atol=TOLERANCE, rtol=1e-4)

    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (29, 7, 41)]
    for prompt, logits in zip(prompts, ragged_logits(lower(graph), prompts), strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=TOLERANCE, rtol=1e-4)


def captured_anew(name, check=True):
    """With the code that transformers has now."""
    boundary.register()
    return capture(tiny_model(name, attention=boundary.NAME), check=check)


def column_by_row(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return positions[..., None].float() * inv_freq


def matrix_product(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    column = inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
    return (column @ positions[:, None, :].float()).transpose(1, 2)


@pytest.mark.parametrize("outer", [column_by_row, matrix_product])
def test_rotary_angles_are_found_however_transformers_writes_them(outer, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def forward(self, x, position_ids):
        angles = outer(self.inv_freq, position_ids)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    graph, model = captured_anew("llama"), tiny_model("llama")
    assert len(list(graph.calls(reference.rope_table))) == 1
    assert not list(graph.calls(aten.cos.default, aten.matmul.default))
    ids = torch.arange(3, 40)
    torch.testing.assert_close(dense(graph, ids), eager_logits(model, ids), atol=TOLERANCE, rtol=1e-4)


def test_angles_that_are_no_outer_product_stay_as_they_are(monkeypatch):
    """The frequencies of the last position for all of them: the same ops, another meaning."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def forward(self, x, position_ids):
        last = position_ids[:, -1:, None].float() * self.inv_freq
        angles = torch.cat((last, last), dim=-1).expand(position_ids.shape[0], position_ids.shape[1], -1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    graph, model = captured_anew("llama", check=False), tiny_model("llama")
    assert not list(graph.calls(reference.rope_table))
    ids = torch.arange(3, 40)
    torch.testing.assert_close(dense(graph, ids), eager_logits(model, ids), atol=TOLERANCE, rtol=1e-4)
    with pytest.raises(
        UnsupportedModel, match=r"logits differ.* in batches of chunks"
    ):  # another last position
        check_capture(graph, model)
