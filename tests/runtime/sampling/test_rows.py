"""Rows of logits: which are taken, the search for the largest, and an engine on a CPU that leaves torch alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from optkit.runtime.sampling import rows as rows_module
from optkit.runtime.sampling import sampler
from optkit.runtime.sampling.rows import largest, on_host, take_rows
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.types import Batch, EngineRequest, SamplingParams
from tests.support.fakes import fake_engine
from tests.support.speculation import Untimed


class Operators(TorchDispatchMode):
    """The operators of torch that computed or copied numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(returned.alias_info is not None for returned in func._schema.returns):  # no view
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def tensors_of(execute: Callable[[Batch], np.ndarray]) -> Callable[[Batch], torch.Tensor]:
    """``execute`` with tensors of the CPU as logits, made unseen by ``Operators``."""

    def execute_unseen(batch: Batch) -> torch.Tensor:
        with _disable_current_modes():
            return torch.from_numpy(execute(batch))

    return execute_unseen


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_no_operator_of_torch_runs_between_the_kernels_of_two_steps(
    count: int, tensors: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's second thread would wait in a busy loop, on the processor of a kernel's thread."""
    if not native:
        monkeypatch.setattr(sampler.native, "available", lambda: False)
    engine = fake_engine(options={"vocab_size": 1 << 15, "script": [1, 2, 3, 4], "max_model_len": 64})
    engine.scheduler.proposer = Untimed(CostModel(), 8, recycles=True)
    engine.scheduler.proposer.costs.seconds = lambda work: 1.0 + 0.01 * work.tokens  # type: ignore[method-assign]
    if tensors:
        monkeypatch.setattr(engine.runner, "execute", tensors_of(engine.runner.execute))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.1},
        {
            "temperature": 0.0,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "repetition_penalty": 1.1,
            "logit_bias": ((5, 1.0),),
        },
    ]
    for number, params in enumerate(kinds[:count]):
        engine.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_ids=(1, 2, 3, 4) * 4,
                sampling=SamplingParams(max_tokens=24, **params),
                arrival=0.0,
            )
        )
    with Operators() as seen:
        while engine.has_work:
            engine.step()
    assert sum(engine.scheduler.proposer.stats.accepted_per_pos) > 8  # steps had rows of guesses
    assert not seen.names


def test_logits_of_the_cpu_are_arrays_of_the_same_memory_and_those_of_a_device_stay() -> None:
    tensor = torch.randn(2, 3)
    array = on_host(tensor)
    assert isinstance(array, np.ndarray) and array.ctypes.data == tensor.data_ptr()
    assert on_host(array) is array
    elsewhere = torch.zeros(2, 3, device="meta")
    assert on_host(elsewhere) is elsewhere


@pytest.mark.parametrize("rows", [[], [0], [2], [1, 2, 3], [0, 2], [0, 1, 4]])
def test_taken_rows_are_those_of_an_index_and_a_view_where_none_lies_between(rows: list[int]) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 7), dtype=np.float32)
    taken = take_rows(logits, rows)
    assert np.array_equal(taken, logits[np.array(rows, dtype=np.int64)])
    in_sequence = rows == list(range(rows[0], rows[0] + len(rows))) if rows else False
    assert not in_sequence or np.shares_memory(taken, logits)
    tensor = torch.from_numpy(logits)
    taken = take_rows(tensor, rows)
    assert torch.equal(taken, tensor[rows])
    assert not in_sequence or taken.data_ptr() == tensor[rows[0]].data_ptr()


@settings(deadline=None)
@given(
    values=st.lists(st.integers(0, 9) | st.just(-np.inf), min_size=1, max_size=80),
    count=st.integers(1, 90),
    height=st.sampled_from([1, 2, 5, 64]),
)
def test_the_largest_are_the_first_of_a_stable_sort(values: list[float], count: int, height: int) -> None:
    """For tables of all shapes, with ties everywhere."""
    logits = np.array(values, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "ROWS", height)
        found = largest(logits, count)
    assert found.tolist() == sorted(range(len(values)), key=lambda i: -values[i])[:count]


@pytest.mark.parametrize("size", [50_257, 128_256])
def test_the_largest_of_a_vocabulary(size: int) -> None:
    logits = np.random.default_rng(1).standard_normal(size, dtype=np.float32)
    logits[[3, size - 1, 700]] = 9.0
    for count in (1, 5, 20, 3000):
        assert largest(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


TORCH_FREE = (
    "optkit.runtime.sampling.counts",
    "optkit.runtime.sampling.logprobs",
    "optkit.runtime.sampling.occurrences",
    "optkit.runtime.sampling.proposer",
    "optkit.runtime.sampling.recycling",
    "optkit.runtime.sampling.rows",
    "optkit.runtime.sampling.tree_speculator",
    "optkit.runtime.scheduling.drafts",
    "optkit.kernels.cpu.sampling",
    "optkit.runtime.sampling.draft_model",
    "optkit.runtime.sampling.sampler",
    "optkit.runtime.sampling.speculative",
)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_modules_of_the_sampler_are_imported_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
