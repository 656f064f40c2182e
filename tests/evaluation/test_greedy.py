"""Greedy continuations: of transformers' generate and of the runtime, and the tokens until they differ."""

from __future__ import annotations

import pytest
import torch

from optkit.evaluation.greedy import PROMPTS, GreedyReport, compare_greedy, equal_tokens, prompts_of
from optkit.evaluation.quality import ModuleLogits
from optkit.lowering.lower import lower
from optkit.runtime.logits import RuntimeLogits
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, random_ids

COUNT = 24


def prompts(count: int = 5, length: int = 19) -> list[list[int]]:
    return [ids.tolist() for ids in random_ids((length,) * count)]


def generated(given: list[list[int]]) -> list[list[int]]:
    """The continuations by transformers' own generation, a prompt a call."""
    model = tiny_model("llama")
    options = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        rows = [model.generate(torch.tensor([prompt]), **options)[0] for prompt in given]
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, given, strict=True)]


def test_both_sources_continue_as_transformers_generate_does() -> None:
    given, expected = prompts(), generated(prompts())
    assert ModuleLogits(tiny_model("llama")).greedy(given, COUNT) == expected
    source = RuntimeLogits(lower(captured("llama")), block_size=4, chunk=13)
    assert source.greedy(given, COUNT) == expected


def test_a_model_without_a_cache_of_that_name_begins_again() -> None:
    class Plain(torch.nn.Module):
        def forward(self, ids: torch.Tensor, **_: object) -> object:
            logits = torch.nn.functional.one_hot((ids.cumsum(1) * 3 + 1) % 7, 7).float()
            return type("Output", (), {"logits": logits})

    (found,) = ModuleLogits(Plain()).greedy([[1, 2]], 3)
    assert found == [(3 * 3 + 1) % 7, (3 * 6 + 1) % 7, (3 * 11 + 1) % 7]


def test_a_coarsely_quantized_model_parts_from_its_source_and_an_equal_one_does_not() -> None:
    graph = captured("llama")
    apply(graph, "rtn", scheme="W4A16", group_size=32)
    reference = RuntimeLogits(lower(captured("llama")))
    candidates = {"same": RuntimeLogits(lower(captured("llama"))), "four bits": RuntimeLogits(lower(graph))}
    found = compare_greedy(reference, candidates, prompts(), COUNT)
    assert found["same"].lengths == (COUNT,) * 5 and found["same"].unchanged == 5
    assert found["four bits"].median < COUNT and found["four bits"].unchanged < 5


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2], [3, 2], 0), ([], [], 0)],
)
def test_equal_tokens(first: list[int], second: list[int], length: int) -> None:
    assert equal_tokens(first, second) == length


def test_prompts_come_from_all_over_the_text() -> None:
    found = prompts_of([[512 * i + j for j in range(512)] for i in range(40)])
    assert len(found) == PROMPTS and all(len(prompt) == 64 for prompt in found)
    assert found[0] == list(range(64)) and found[-1][0] >= 512 * 37
    few = prompts_of([list(range(512)), list(range(512, 1024))])
    assert [prompt[0] for prompt in few] == [0, 128, 256, 384, 512, 640, 768, 896]
    assert prompts_of([[7] * 48]) == [[7] * 24]


def test_a_report_says_median_and_unchanged() -> None:
    report = GreedyReport(64, 8, (8, 2, 5))
    assert report.line() == "median 5 of 8, 1 of 3 without a difference"
    assert report.to_dict() == {
        "prompt_tokens": 64,
        "tokens": 8,
        "lengths": [8, 2, 5],
        "median": 5.0,
        "unchanged": 1,
    }
