"""Attention at the boundary computes what transformers' eager attention does; everything else is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss import modeling_gpt_oss

from optkit.capture import boundary
from optkit.capture.boundary import attention_forward, built, layer_mask, refuse_unknown
from optkit.capture.masks import Mask
from optkit.errors import UnsupportedModel

T, D = 11, 8
CAUSAL = Mask(causal=True)


def layer(**changes: Any) -> Any:
    given = {"layer_idx": 3, "is_causal": True, "num_key_value_groups": 2, "head_dim": D, "training": False}
    return SimpleNamespace(**given | changes)


def mask_tensor(window: int) -> Tensor:
    """0 where a token sees another, else minus infinity: [1, 1, T, T]."""
    query, key = torch.arange(T)[:, None], torch.arange(T)[None]
    seen = (key <= query) & ((query - key < window) if window else True)
    return torch.where(seen, 0.0, float("-inf"))[None, None]


@pytest.mark.parametrize("scaling", [None, 0.4])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [0, 4])
def test_attention_is_that_of_transformers(window: int, softcap: float | None, scaling: float | None) -> None:
    q, k, v = torch.randn(1, 4, T, D) * 3, torch.randn(1, 2, T, D), torch.randn(1, 2, T, 6)
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
    mask = Mask(causal=True, window=window)
    out, weights = attention_forward(layer(), q, k, v, mask, sliding_window=window or None, **options)
    expected, _ = eager_attention_forward(layer(), q, k, v, mask_tensor(window), **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert out.shape == (1, T, 4, 6) and weights is None


def test_traced_attention_has_the_shape_of_the_values() -> None:
    q, k, v = (torch.empty(1, heads, T, dim, device="meta") for heads, dim in ((4, D), (2, D), (2, 6)))
    assert boundary.dense_attention(q, k, v, None, None, 1.0, 0, 0.0, 0, 0).shape == (1, T, 4, 6)


@pytest.mark.parametrize("window", [0, 4])
def test_sinks_are_those_of_transformers(window: int) -> None:
    q, k, v = torch.randn(1, 4, T, D) * 3, torch.randn(1, 2, T, D), torch.randn(1, 2, T, 6)
    sinks = torch.randn(4) * 3
    out, _ = attention_forward(layer(), q, k, v, Mask(causal=True, window=window), scaling=0.3, s_aux=sinks)
    expected, _ = modeling_gpt_oss.eager_attention_forward(
        layer(sinks=sinks), q, k, v, mask_tensor(window), scaling=0.3
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mask", "sliding_window", "reason"),
    [
        (None, None, "takes no mask"),
        (torch.zeros(1, 1, T, T), None, "a mask of its own"),
        (Mask(), None, "its attention mask is not causal"),
        (CAUSAL, 8, "a window of 8 tokens, its mask one of any number"),
        (Mask(causal=True, window=4), 8, "a window of 8 tokens, its mask one of 4"),
    ],
)
def test_other_masks_are_refused(mask: Any, sliding_window: int | None, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        layer_mask(mask, sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_window_is_that_of_the_mask(sliding_window: int | None) -> None:
    assert layer_mask(Mask(causal=True, window=4), sliding_window).window == 4


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (layer(), {"head_mask": 1, "alibi": 2, "use_cache": False}, "takes alibi, head_mask, which"),
        (layer(), {"is_causal": False}, "is not causal"),
        (layer(is_causal=False), {}, "is not causal"),
    ],
)
def test_arguments_that_may_change_the_result_are_refused(
    module: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        refuse_unknown(module, options)


def test_known_and_absent_arguments_pass() -> None:
    refuse_unknown(layer(), {"use_cache": False, "position_ids": 1, "head_mask": None, "is_causal": True})


def test_built_falls_back_to_eager_where_a_table_of_classes_has_no_entry() -> None:
    assert built(lambda attention: attention) == boundary.NAME
    assert built(lambda attention: {"eager": 3}[attention]) == 3
    with pytest.raises(KeyError, match="other"):
        built(lambda attention: {}["other"])


def test_register_makes_the_entry_known_to_transformers() -> None:
    boundary.register()
    boundary.register()
    assert AttentionInterface()[boundary.NAME] is attention_forward
