"""Attention that a model computes itself becomes the op with the same logits, or the model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.gptj import modeling_gptj

from optkit.capture import boundary, capture, export
from optkit.capture.directory import capture_directory
from optkit.errors import UnsupportedModel
from optkit.graph.ops.attention import ATTENTION
from optkit.kernels import reference
from optkit.lowering.lower import lower
from tests.support.architectures import OWN_ATTENTION, tiny_model
from tests.support.ragged import ragged_logits

aten = torch.ops.aten
# The slopes of the papers: 2^(-8 h / H) for a power of two; of 6 heads, mpt takes every other of 8 first.
SLOPES = {
    "bloom": [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8],
    "mpt": [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3],
}
SCALES = {"gpt_neo": 1.0, "xglm": 1.0}  # xglm scales queries
WINDOWS = {"gpt_neo": [0, 20]}
KV_HEADS = {"falcon": 1, "mpt": 6}


def on_the_boundary(name: str, **options: Any) -> Any:
    boundary.register()
    return boundary.built(lambda attention: tiny_model(name, attention, **options))


@pytest.mark.parametrize("name", sorted(OWN_ATTENTION))
def test_graph_has_the_logits_of_eager_attention(name: str) -> None:
    graph, model = capture(on_the_boundary(name), check=False), tiny_model(name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (29, 7, 41)]
    for prompt, logits in zip(prompts, ragged_logits(lower(graph), prompts), strict=True):
        with torch.no_grad():
            expected = model(input_ids=prompt[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    nodes = list(graph.calls(*ATTENTION))
    assert [node.kwargs["scale"] for node in nodes] == [SCALES.get(name, 0.25)] * 2
    assert [node.kwargs["window"] for node in nodes] == WINDOWS.get(name, [0, 0])
    assert {spec.num_kv_heads for spec in graph.meta.kv_specs} == {KV_HEADS.get(name, 4)}
    given = [[graph.weights[str(a.target)].value.tolist() for a in n.args if is_weight(a)] for n in nodes]
    assert given == [[SLOPES[name]] if name in SLOPES else []] * 2
    assert not list(graph.calls(aten.matmul.default, aten.bmm.default, aten.softmax.int, aten.linear.default))


@pytest.mark.parametrize("name", ["gptj", "mamba", "llama"])
def test_model_is_exported_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No export through the boundary for a model that can't reach it."""
    given: list[str] = []

    def counted(model: Any) -> Any:
        given.append(model.config._attn_implementation)
        return made(model)

    made = export.export
    monkeypatch.setattr(export, "export", counted)
    capture(on_the_boundary(name), check=False)
    assert given == ["eager" if name == "gptj" else boundary.NAME]


def is_weight(argument: Any) -> bool:
    return getattr(argument, "op", None) == "get_attr"


def test_mpt_context_is_that_of_its_configuration() -> None:
    graph = capture(on_the_boundary("mpt", max_seq_len=128, max_position_embeddings=0), check=False)
    assert graph.meta.max_model_len == 128


@pytest.mark.parametrize("weights", [True, False])
def test_a_directory_is_captured(weights: bool, tmp_path: Path) -> None:
    tiny_model("gptj").save_pretrained(tmp_path)
    graph = capture_directory(tmp_path, weights=weights)
    assert len(list(graph.calls(reference.attention))) == 2 and graph.is_meta is not weights


def test_a_mask_in_a_buffer_needs_the_weights(tmp_path: Path) -> None:
    tiny_model("gpt_neo").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="gpt_neo: its attention mask is a tensor of the model"):
        capture_directory(tmp_path, weights=False)


def test_falcon_with_alibi_has_two_results_in_transformers() -> None:
    with pytest.raises(UnsupportedModel, match="its eager and its SDPA attention differ"):
        capture(on_the_boundary("falcon", alibi=True))


# -- other scores ----------------------------------------------------------------------------------------


def attention_with(change: Any) -> Any:
    """GPT-J's attention, with ``change(scores, hidden states)`` before the softmax."""

    def attend(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        scores = query @ key.transpose(-1, -2) / self.scale_attn
        weights = change(scores, attention_mask, query).softmax(-1)
        return weights @ value, weights

    return attend


def replace_attention(monkeypatch: Any, change: Any) -> None:
    """Give GPT-J ``attention_with(change)``, and a ``forward`` of its own, so that it is exported again."""
    module, forward = modeling_gptj.GPTJAttention, modeling_gptj.GPTJAttention.forward
    monkeypatch.setattr(module, "forward", lambda self, *args, **options: forward(self, *args, **options))
    monkeypatch.setattr(module, "_attn", attention_with(change))


def position(scores: Any) -> Any:
    return torch.arange(scores.shape[-1])


CHANGES: dict[str, tuple[Any, str]] = {
    "a bidirectional mask": (lambda s, mask, q: s + mask * 0, "mask is not causal"),
    "a prefix": (lambda s, mask, q: torch.where(position(s) < 3, s, s + mask), "mask is not causal"),
    "every other token": (
        lambda s, mask, q: s.masked_fill((position(s)[None] - position(s)[:, None]) % 2 == 1, -1e30) + mask,
        "mask is not causal, or has no window",
    ),
    "a strict mask": (lambda s, mask, q: s + mask.roll(-1, 2), "mask is not causal"),
    "a square of the distance": (
        lambda s, mask, q: s + mask - 0.01 * (position(s)[None] - position(s)[:, None]) ** 2,
        "biases are not linear",
    ),
    "a soft cap": (lambda s, mask, q: torch.tanh(s / 30) * 30 + mask, "no multiple of the products"),
    "a negative scale": (lambda s, mask, q: mask - s, "no multiple of the products"),
    "a gate": (
        lambda s, mask, q: s * q.mean().sigmoid() + mask,
        "more than queries, keys and positions|products",
    ),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_scores_of_another_form_are_refused(name: str, monkeypatch: Any) -> None:
    change, reason = CHANGES[name]
    replace_attention(monkeypatch, change)
    with pytest.raises(UnsupportedModel, match=f"gptj: .*({reason})"):
        capture(on_the_boundary("gptj", n_layer=1), check=False)


def test_biases_beyond_the_short_run_are_read(monkeypatch: Any) -> None:
    """Linear up to 60 tokens, then constant: the short run alone would take it for ALiBi."""
    slopes = modeling_bloom._get_alibi_slopes

    def capped(scores: Any, mask: Any, query: Any) -> Any:
        distance = position(scores)[None] - position(scores)[:, None]
        return scores + mask + slopes(4, scores.device)[:, None, None] * distance.clamp(min=-60)

    replace_attention(monkeypatch, capped)
    with pytest.raises(UnsupportedModel, match="biases are not linear"):
        capture(on_the_boundary("gptj", n_layer=1), check=False)


def test_a_change_of_the_scale_is_seen_by_the_check(monkeypatch: Any) -> None:
    """The graph is compared with the model: another scale in the graph is refused."""
    from optkit.capture import own_attention, scores

    def halved(*arguments: Any) -> Any:
        form = scores.read_form(*arguments)
        return scores.Form(form.scale / 2, form.window, form.slopes)

    monkeypatch.setattr(own_attention, "read_form", halved)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        capture(on_the_boundary("bloom", n_layer=1))


@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_the_check_passes_on_the_whole(name: str) -> None:
    """A window longer than a configuration's ``sliding_window`` keeps its length on both sides."""
    assert len(list(capture(on_the_boundary(name)).calls(reference.attention))) == 2
