"""RoPE types whose frequencies depend on the length: the fixed choice has the logits of transformers' own choice.

transformers chooses in the forward pass, by the last position of a call. The other side of each comparison is an
unchanged model, at lengths for which transformers takes the same frequencies.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.capture import boundary, capture, capture_directory
from optkit.capture.rope import choose_rope, depends_on_length
from optkit.errors import UnsupportedModel, UserError
from optkit.graph.ir import Graph
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from tests.support.architectures import tiny_config, tiny_model
from tests.support.graphs import random_ids

ORIGINAL, LIMIT = 48, 192
FACTORS = [1.0 + 0.1 * i for i in range(8)]
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": LIMIT,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": FACTORS,
        "long_factor": [3.0 * factor for factor in FACTORS],
    },
}
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


def captured(name: str, options: dict[str, Any], served: int | None) -> Graph:
    boundary.register()
    return capture(tiny_model(name, attention=boundary.NAME, **options), max_model_len=served)


def graph_logits(graph: Graph, ids: Tensor, positions: Tensor) -> Tensor:
    model = lower(graph)
    return model(dense_inputs([len(ids)], ids, model.kv_specs) | {"positions": positions})


def eager_logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("name", "options", "served", "first", "tokens"),
    [
        ("phi3", LONGROPE, ORIGINAL, 0, ORIGINAL),
        ("phi3", LONGROPE, None, 0, LIMIT),
        ("phi3", LONGROPE, LIMIT - 1, ORIGINAL - 3, 20),
        ("llama", LONGROPE, ORIGINAL - 1, 0, ORIGINAL),
        ("llama", DYNAMIC, None, 0, ORIGINAL),
    ],
)
def test_capture_has_the_logits_of_transformers_when_both_choose_the_same_frequencies(
    name: str, options: dict[str, Any], served: int | None, first: int, tokens: int
) -> None:
    graph, model = captured(name, options, served), tiny_model(name, **options)
    ids, positions = random_ids([tokens], 128)[0], torch.arange(first, first + tokens)
    expected = eager_logits(model, ids, positions)
    torch.testing.assert_close(graph_logits(graph, ids, positions), expected, atol=1e-4, rtol=1e-4)


def test_capture_differs_from_transformers_when_short_prompts_have_the_long_factors() -> None:
    """The known difference of engines that choose once: transformers takes the short factors for short prompts."""
    graph, model = captured("phi3", LONGROPE, None), tiny_model("phi3", **LONGROPE)
    ids, positions = random_ids([30], 128)[0], torch.arange(30)
    difference = graph_logits(graph, ids, positions) - eager_logits(model, ids, positions)
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("served", "length"), [(None, LIMIT), (ORIGINAL + 1, LIMIT), (ORIGINAL, ORIGINAL), (9, ORIGINAL)]
)
def test_capture_bounds_the_context_when_factors_are_fixed(served: int | None, length: int) -> None:
    graph = captured("phi3", LONGROPE, served)
    (note,) = graph.notes
    assert graph.meta.max_model_len == length
    assert f"{'long' if length == LIMIT else 'short'} factors" in note and f"up to {length} tokens" in note


def test_capture_refuses_a_graph_when_transformers_computes_other_angles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last run of the check is against the choice of transformers, not against the fixed frequencies."""
    from optkit.capture import rope

    monkeypatch.setattr(rope, "frequencies", lambda config, layer, choice: torch.full((8,), 0.1))
    with pytest.raises(UnsupportedModel, match=r"logits differ.*from position"):
        captured("phi3", LONGROPE, None)


def test_capture_leaves_the_model_as_it_was() -> None:
    model = tiny_model("phi3", attention=boundary.NAME, **LONGROPE)
    before = model.model.rotary_emb.inv_freq
    values = before.clone()
    boundary.register()
    capture(model, check=False)
    after = model.model.rotary_emb
    assert after.rope_type == "longrope" and after.inv_freq is before and torch.equal(before, values)


def test_choose_rope_refuses_a_served_length_beyond_the_model() -> None:
    with pytest.raises(UserError, match=f"context is {LIMIT} tokens, 4096 were asked for"):
        choose_rope(tiny_config("phi3", **LONGROPE), 4096)


@pytest.mark.parametrize("missing", ["short_factor", "long_factor"])
def test_choose_rope_names_missing_factors(missing: str) -> None:
    config = tiny_config("phi3", **copy.deepcopy(LONGROPE))
    del config.rope_parameters[missing]
    with pytest.raises(UnsupportedModel, match=missing):
        choose_rope(config)


def test_capture_directory_refuses_a_configuration_without_factors(tmp_path: Path) -> None:
    tiny_model("phi3", **LONGROPE).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]["long_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="long_factor"):
        capture_directory(tmp_path)


def test_capture_refuses_a_rope_type_without_a_rotary_module() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="rotary embedding is not that of transformers"):
        capture(model)


def test_depends_on_length_reads_config_files_of_old_and_new_form() -> None:
    old = {"rope_scaling": {"type": "su", "long_factor": [1.0]}}
    nested = {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}}
    assert depends_on_length(old) and depends_on_length(nested)
    assert not depends_on_length({"rope_scaling": None}) and not depends_on_length(
        tiny_config("gemma3_text").to_dict()
    )
