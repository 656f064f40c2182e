"""Logits computed as a server computes them, against transformers' eager forward of each window."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.states import PROMPT_LENS
from optkit.lowering.lower import lower
from optkit.runtime.logits import RuntimeLogits
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids


@pytest.mark.parametrize("lengths", [(37,), (29, 41), (5, 60, 23)])
def test_logits_of_windows_are_those_of_the_model(lengths: tuple[int, ...]) -> None:
    windows = [ids.tolist() for ids in random_ids(lengths)]
    source = RuntimeLogits(lower(captured("llama")), block_size=4, chunk=13, decode=3)
    found = list(source.logits(windows))
    assert [len(logits) for logits in found] == list(lengths)
    model = tiny_model("llama")
    for window, logits in zip(windows, found, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([window]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_branches_of_a_context_run_its_tokens_once_and_their_ends_in_single_steps() -> None:
    model, sizes = lower(captured("llama")), []

    class Counted:
        states, vocab_size, max_model_len = model.states, model.vocab_size, model.max_model_len

        def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            sizes.append(inputs["query_start"].diff().tolist())
            return model(inputs)

    context, first, second = (ids.tolist() for ids in random_ids((37, 6, 4)))
    found = list(RuntimeLogits(Counted(), block_size=4).branches(context, [(first, 2), (second, 4)]))
    assert sizes == [[37], [4], *[[1]] * 6]
    for tokens, logits in zip((first, second), found, strict=True):
        with torch.no_grad():
            whole = tiny_model("llama")(input_ids=torch.tensor([context + tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, whole[-len(logits) :], atol=1e-4, rtol=1e-4)


def test_windows_of_a_pair_run_in_ragged_chunks_and_end_in_single_steps() -> None:
    sizes, prompts = [], []

    class Model:
        states, vocab_size, max_model_len = (), 7, 64

        def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            sizes.append(inputs["query_start"].diff().tolist())
            prompts.append(inputs[PROMPT_LENS].tolist())
            return torch.nn.functional.one_hot(inputs["input_ids"], self.vocab_size).float()

    windows = [[i % 7 for i in range(40)], [(i + 2) % 7 for i in range(9)]]
    source = RuntimeLogits(Model(), block_size=4, chunk=16, decode=3)
    found = list(source.logits(windows))
    assert [logits.argmax(-1).tolist() for logits in found] == windows
    assert sizes == [[16, 5], [16, 1], [5, 1], [1, 1], [1, 1], [1]]
    assert prompts == [[37, 6]] * 5 + [[37]]
    assert source.max_length == 64
