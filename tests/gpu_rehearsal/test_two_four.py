"""2:4 sparse layers on a GPU: chosen by their zeros, packed, multiplied by the vendor's library, as the dense ones."""

from __future__ import annotations

import pytest
import torch

from optkit import kernels
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.target import get_target
from tests.gpu_rehearsal.machine import rehearsal
from tests.gpu_rehearsal.tensors import GPUError
from tests.support.graphs import apply, captured, random_ids

triton = pytest.importorskip("optkit.kernels.triton")
if not triton.available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels.triton import two_four  # noqa: E402


@pytest.mark.parametrize("tokens", [1, 8, 13])
def test_logits_are_those_of_dense_layers(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("qwen2", intermediate_size=128)  # with biases
    apply(graph, "prune_2_4", method="magnitude")
    (ids,) = random_ids([tokens])
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    logits = []
    for rows in ((), two_four.KERNELS):  # the other kernels would take the interpreter minutes
        monkeypatch.setattr(kernels, "table", lambda kind="cpu", rows=rows: rows)
        with rehearsal():
            model = lower(graph, get_target("cuda-h100"))
            chosen = [node for node, kernel in model.kernels.items() if kernel == "cusparselt"]
            assert bool(chosen) == bool(rows)
            inputs = {n: value.to("cuda") for n, value in dense_inputs([tokens], ids, model.states).items()}
            logits.append(model(inputs).cpu())
    torch.testing.assert_close(logits[1], logits[0], atol=2e-2, rtol=2e-2)


def test_what_the_library_refuses() -> None:
    with rehearsal(), pytest.raises(GPUError, match="multiples of 16"):
        torch._cslt_compress(torch.zeros(24, 64, dtype=torch.bfloat16, device="cuda"))
    with rehearsal():
        packed = torch._cslt_compress(torch.zeros(32, 64, dtype=torch.bfloat16, device="cuda"))
        with pytest.raises(GPUError, match="multiple of 8"):
            torch._cslt_sparse_mm(packed, torch.zeros(64, 3, dtype=torch.bfloat16, device="cuda"))
