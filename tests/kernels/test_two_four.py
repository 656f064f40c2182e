"""The 2:4 pattern, and the choice of the vendor's kernel by it."""

from __future__ import annotations

import pytest
import torch

from optkit import kernels
from optkit.kernels.two_four import FIRST_ROWS, is_two_four


def test_the_pattern() -> None:
    weight = torch.zeros(FIRST_ROWS + 2, 8)
    weight[:, [0, 3, 5]] = 1.0
    assert is_two_four(weight)
    weight[-1, 6] = 2.0
    assert is_two_four(weight)
    weight[-1, 7] = -1.0
    assert not is_two_four(weight)
    weight[-1, 7], weight[0, :3] = 0.0, 1.0
    assert not is_two_four(weight)
    assert not is_two_four(torch.zeros(4, 6)) and not is_two_four(torch.zeros(4))


def test_without_the_library_the_dense_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("optkit.kernels.triton")
    if not triton.available():
        pytest.skip("Triton is not installed")
    from optkit.machine.target import get_target

    target, weight = get_target("cuda-h100"), torch.zeros(32, 64, dtype=torch.bfloat16)
    for available in (False, True):  # and a weight that is not on the GPU
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda given=available: given)
        chosen = kernels.select("linear", target, weights={1: weight})
        assert chosen is not None and chosen.name == "triton"
