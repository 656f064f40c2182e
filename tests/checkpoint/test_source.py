"""Quantized checkpoints run as they are: the graph's logits are those of the float model that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.capture import capture_directory
from optkit.checkpoint.source import open_source
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.lower import lower
from optkit.passes.rewriting.stack import site_name
from tests.support.graphs import dense, random_ids
from tests.support.packers import AWQ, GPTQ, awq, checkpoint, gptq
from tests.support.target import TARGET

(IDS,) = random_ids([21])


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[None], use_cache=False).logits[0]


def agree(directory: Path, model: Any, ops: tuple[Any, ...] = (reference.linear_wna16,)) -> Graph:
    """Capture; the reference and this machine's kernels give the model's logits."""
    graph = capture_directory(directory)
    verify(graph)
    assert len(list(graph.calls(*ops))) >= 2 * 4
    left = {site_name(graph, node) for node in graph.calls(reference.linear)}
    assert left == {graph.meta.output_embedding}
    expected = logits_of(model)
    size = expected.abs().max().item()
    torch.testing.assert_close(dense(graph, IDS), expected, atol=2e-5 * size, rtol=1e-4)
    torch.testing.assert_close(dense(graph, IDS, TARGET), expected, atol=1e-3 * size, rtol=1e-3)
    return graph


@pytest.mark.parametrize(
    ("architecture", "pack", "config", "options"),
    [
        ("llama", gptq, GPTQ | {"desc_act": True, "sym": False}, {"act_order": True, "symmetric": False}),
        ("llama", awq, AWQ, {"symmetric": False}),
        ("qwen2", gptq, GPTQ | {"bits": 8}, {"bits": 8, "symmetric": False, "dtype": torch.float32}),
        ("gpt2", gptq, GPTQ | {"group_size": -1}, {"group": 0}),
    ],
)
def test_whole_models(
    tmp_path: Path, architecture: str, pack: Any, config: dict[str, Any], options: dict[str, Any]
) -> None:
    agree(tmp_path, checkpoint(tmp_path, pack, config, architecture=architecture, **options))


def test_a_graph_of_packed_layers_is_saved_and_read_back(tmp_path: Path) -> None:
    checkpoint(tmp_path, gptq, GPTQ | {"desc_act": True}, act_order=True, symmetric=False)
    graph, source = capture_directory(tmp_path), open_source(tmp_path)
    text = graph_to_json(graph)

    def load(name: str, origin: Any, dtype: torch.dtype) -> torch.Tensor:
        return source[origin.parts[0].name].to(dtype) if origin else graph.weights[name].value

    again = graph_from_json(text, load)
    assert torch.equal(dense(again, IDS), dense(graph, IDS))
    assert any(kernel == "native" for kernel in lower(again, TARGET).kernels.values())


def test_bytes_in_memory_are_those_of_the_codes(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, gptq, GPTQ, group=32)
    graph = capture_directory(tmp_path)
    linear = sum(m.weight.numel() for n, m in model.named_modules() if "proj" in n)
    floats = sum(p.numel() * 4 for n, p in model.named_parameters() if "proj" not in n)
    assert graph.num_bytes() - floats < linear * (0.5 + 2 / 32) + 1000
