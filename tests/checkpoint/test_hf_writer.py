"""The Hugging Face directory of a graph: config.json says what the tensors are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.checkpoint.hf_writer import write_model
from optkit.graph.ir import Graph, Origin, Part, Weight
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, dense, random_ids

(IDS,) = random_ids([17])


def saved(directory: Path, **options: Any) -> Path:
    tiny_model("llama", **options).save_pretrained(directory)
    return directory


def transformers_logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model.eval()(IDS[None], use_cache=False).logits[0]


def with_own_head(graph: Graph) -> Graph:
    """The head gets twice the embedding as a float weight of its own."""
    head = list(graph.linears())[-1]
    name = f"{graph.meta.output_embedding}.weight"
    value = 2 * graph.linear_weight(head)
    graph.weights[name] = Weight(value, Origin((Part(name, len(value)),)))
    head.args = (head.args[0], graph.weight_node(name, head), *head.args[2:])
    return graph


@pytest.mark.parametrize("explicit", [True, False])
def test_tied_head_is_untied_in_the_config_when_it_has_a_float_weight_of_its_own(
    tmp_path: Path, explicit: bool
) -> None:
    source = saved(tmp_path / "source", tie_word_embeddings=True)
    config = json.loads((source / "config.json").read_text())
    if not explicit:  # as in configs of architectures that tie by default
        config.pop("tie_word_embeddings", None)
        (source / "config.json").write_text(json.dumps(config))
    graph = with_own_head(captured("llama", tie_word_embeddings=True))
    (tmp_path / "out").mkdir()
    write_model(graph, source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(transformers_logits(tmp_path / "out"), dense(graph, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_config_stays_as_it_is_when_the_head_does(tmp_path: Path, tied: bool) -> None:
    source = saved(tmp_path / "source", tie_word_embeddings=tied)
    (tmp_path / "out").mkdir()
    write_model(captured("llama", tie_word_embeddings=tied), source, tmp_path / "out")
    configs = [json.loads((place / "config.json").read_text()) for place in (source, tmp_path / "out")]
    assert configs[0] == configs[1]
