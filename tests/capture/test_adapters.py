"""Merged adapters against the same adapters computed beside the layers, in float64 (``unmerged_logits``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.capture.adapters import merge_adapters
from optkit.checkpoint.adapter import read_adapter
from optkit.errors import UserError
from tests.support.adapters import ALPHA, RANK, linear_update, unmerged_logits, write_adapter
from tests.support.architectures import tiny_model
from tests.support.graphs import random_ids

IDS = random_ids([19], 128)[0]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS[None], use_cache=False).logits[0]


def merged(name: str, directory: Path) -> Any:
    model = tiny_model(name)
    merge_adapters(model, [read_adapter(directory)])
    return model


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, {Q: ALPHA / RANK, DOWN: ALPHA / RANK}),
        ({"use_rslora": True}, {Q: ALPHA / math.sqrt(RANK), DOWN: ALPHA / math.sqrt(RANK)}),
        ({"alpha_pattern": {"layers.1.mlp.down_proj": 6}}, {Q: ALPHA / RANK, DOWN: 6 / RANK}),
        (
            {"alpha_pattern": {"proj": 6, r"^model\.layers\.0\.self_attn\.q_proj$": 2}},
            {Q: 2 / RANK, DOWN: ALPHA / RANK},
        ),
    ],
)
def test_merge_has_the_logits_of_the_unmerged_adapter(
    tmp_path: Path, options: dict[str, Any], scales: dict[str, float]
) -> None:
    torch.manual_seed(1)
    updates = {Q: linear_update(64, 64), DOWN: linear_update(64, 96)}
    model = merged("llama", write_adapter(tmp_path, updates, **options))
    expected = unmerged_logits(tiny_model("llama"), updates, scales, IDS)
    torch.testing.assert_close(logits(model).double(), expected, atol=1e-5, rtol=1e-5)
    assert (expected - logits(tiny_model("llama"))).abs().max() > 0.1


def test_merge_scales_each_module_by_its_rank_when_ranks_differ(tmp_path: Path) -> None:
    torch.manual_seed(1)
    updates = {Q: linear_update(64, 64, rank=2), DOWN: linear_update(64, 96)}
    model = merged("llama", write_adapter(tmp_path, updates, rank_pattern={"q_proj": 2}))
    expected = unmerged_logits(tiny_model("llama"), updates, {Q: ALPHA / 2, DOWN: ALPHA / RANK}, IDS)
    torch.testing.assert_close(logits(model).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "module", "sizes"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn", (192, 64)),  # a Conv1D, stored transposed
        ("phi3", "model.layers.0.mlp.gate_up_proj", (192, 64)),  # gate and up in one weight
    ],
)
def test_merge_fits_weights_of_other_layouts(
    tmp_path: Path, name: str, module: str, sizes: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    updates = {module: linear_update(*sizes)}
    model = merged(name, write_adapter(tmp_path, updates, fan_in_fan_out=name == "gpt2"))
    expected = unmerged_logits(tiny_model(name), updates, {module: ALPHA / RANK}, IDS)
    torch.testing.assert_close(logits(model).double(), expected, atol=1e-5, rtol=1e-5)


def test_merge_scales_rows_to_the_magnitude_when_the_adapter_is_dora(tmp_path: Path) -> None:
    torch.manual_seed(1)
    update, magnitude = linear_update(64, 64), torch.rand(64) + 0.5
    directory = write_adapter(tmp_path, {Q: update | {"lora_magnitude_vector": magnitude}}, use_dora=True)
    weight = tiny_model("llama").get_submodule(Q).weight.double()
    changed = weight + 4 * torch.einsum(
        "nr,rk->nk", update["lora_B.weight"].double(), update["lora_A.weight"].double()
    )
    expected = magnitude[:, None] * changed / changed.square().sum(1, keepdim=True).sqrt()
    given = merged("llama", directory).get_submodule(Q).weight
    torch.testing.assert_close(given.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("target", ["lm_head", "model.embed_tokens"])
def test_merge_leaves_the_other_side_of_a_tied_weight(tmp_path: Path, target: str) -> None:
    torch.manual_seed(1)
    model = tiny_model("llama", tie_word_embeddings=True)
    before = model.lm_head.weight.clone()
    a, b = torch.randn(RANK, 128), torch.randn(64, RANK)
    update = {"lora_A.weight": b.T, "lora_B.weight": a.T} if target == "lm_head" else {
        "lora_embedding_A": a, "lora_embedding_B": b}  # fmt: skip
    merge_adapters(model, [read_adapter(write_adapter(tmp_path, {target: update}))])
    other = model.model.embed_tokens if target == "lm_head" else model.lm_head
    assert torch.equal(other.weight, before)
    expected = before.double() + ALPHA / RANK * (a.T.double() @ b.T.double())
    torch.testing.assert_close(model.get_submodule(target).weight.double(), expected, atol=1e-5, rtol=1e-5)


def test_merge_takes_saved_tensors_in_place_of_the_models(tmp_path: Path) -> None:
    head = torch.randn(128, 64)
    directory = write_adapter(tmp_path, {}, {"lm_head.weight": head.bfloat16()}, modules_to_save=["lm_head"])
    assert torch.equal(merged("llama", directory).lm_head.weight, head.bfloat16().float())


def test_merge_adds_two_adapters_and_names_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one, two = {Q: linear_update(64, 64)}, {Q: linear_update(64, 64)}
    adapters = [read_adapter(write_adapter(tmp_path / name, u)) for name, u in (("one", one), ("two", two))]
    model = tiny_model("llama")
    notes = merge_adapters(model, adapters)
    both = {Q: {"lora_A.weight": torch.cat([one[Q]["lora_A.weight"], two[Q]["lora_A.weight"]]),
                "lora_B.weight": torch.cat([one[Q]["lora_B.weight"], two[Q]["lora_B.weight"]], 1)}}  # fmt: skip
    expected = unmerged_logits(tiny_model("llama"), both, {Q: ALPHA / RANK}, IDS)
    torch.testing.assert_close(logits(model).double(), expected, atol=1e-5, rtol=1e-5)
    assert (
        notes[0].startswith(f"adapter one merged: rank {RANK}, alpha {ALPHA}, 1 layers, sha256 ")
        and len(notes) == 2
    )


@pytest.mark.parametrize(
    ("updates", "saved", "reason"),
    [
        ({"model.layers.7.self_attn.q_proj": linear_update(64, 64)}, {}, "no linear layer"),
        ({"model.layers.0.input_layernorm": linear_update(64, 64)}, {}, "no linear layer"),
        ({Q: linear_update(32, 64)}, {}, r"is \[32, 64\], the model's is \[64, 64\]"),
        ({}, {"lm_head.weight": torch.zeros(130, 64)}, r"is \[130, 64\], the model's is \[128, 64\]"),
        ({}, {"nothing.weight": torch.zeros(4)}, "no linear layer"),
        ({}, {"model.rotary_emb.inv_freq": torch.zeros(8)}, "no linear layer"),
        ({Q: {k: v * 1e30 for k, v in linear_update(64, 64).items()}}, {}, "float32 does not hold"),
        ({}, {"model.norm.weight": torch.full((64,), 1e300, dtype=torch.float64)}, "float32 does not hold"),
    ],
)
def test_merge_names_the_base_model_when_the_adapter_does_not_fit(
    tmp_path: Path, updates: Any, saved: Any, reason: str
) -> None:
    adapter = read_adapter(write_adapter(tmp_path, updates, saved))
    with pytest.raises(UserError, match=reason) as refusal:
        merge_adapters(tiny_model("llama"), [adapter])
    assert "give its base model, org/base" in str(refusal.value) and "\n" not in str(refusal.value)


def test_merge_refuses_two_adapters_that_replace_one_tensor(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, {}, {"lm_head.weight": torch.zeros(128, 64)}))
    with pytest.raises(UserError, match=r"two adapters replace lm_head\.weight"):
        merge_adapters(tiny_model("llama"), [adapter, adapter])
