"""The rehearsed GPU refuses what a real one would, and replays what it has captured."""

from __future__ import annotations

import pytest
import torch

from optkit.runtime.cuda.device import CudaDevice
from tests.gpu_rehearsal.machine import CUDA, GPUError, rehearsal


def test_two_devices_do_not_meet() -> None:
    with rehearsal():
        x = torch.ones(3, device="cuda")
        with pytest.raises(GPUError, match="several devices"):
            x + torch.ones(3)
        assert (x + 1.0).device == CUDA


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_a_capture_does_not_wait(wait) -> None:
    with rehearsal():
        x = torch.ones(3, device="cuda")
        wait(x)
        with pytest.raises(GPUError, match="in a capture"):
            CudaDevice().capture(lambda: Captured.once(wait, x))


class Captured:
    """Lets warm-ups pass and waits in the capture itself."""

    @staticmethod
    def once(wait, x: torch.Tensor) -> torch.Tensor:
        from tests.gpu_rehearsal.tensors import Machine

        if Machine.now().tape is not None:
            try:
                wait(x)
            finally:
                Machine.now().tape = None
        return x


def test_a_replay_sees_new_inputs_at_the_old_place() -> None:
    with rehearsal():
        buffer = torch.zeros(16, dtype=torch.uint8, device="cuda")
        numbers = buffer[:16].view(torch.int64)
        total = torch.zeros(2, dtype=torch.int64, device="cuda")

        def step() -> torch.Tensor:
            total.add_(numbers)
            return numbers * 2

        replay = CudaDevice().capture(step)
        total.zero_()
        buffer.copy_(torch.tensor([3, 4]).view(torch.uint8))
        replay()
        replay()
        assert replay.output.tolist() == [6, 8] and total.tolist() == [6, 8]


def test_the_memory_of_a_gpu_is_counted() -> None:
    with rehearsal("meta") as (machine, _):
        device = CudaDevice()
        assert device.peak_bytes(lambda: torch.zeros(1 << 30, device="cuda") + 1) == 8 << 30
        assert machine.allocated == 0 and device.free_memory()[0] == machine.capacity
        with pytest.raises(GPUError, match="out of memory"):
            torch.zeros(200 << 30, dtype=torch.uint8, device="cuda")


def test_the_vendors_conditions() -> None:
    with rehearsal("meta"):
        q = torch.zeros(32, 64, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.ones(32, 1, device="cuda")
        with pytest.raises(GPUError, match="column-major"):
            torch._scaled_mm(q, q.t().contiguous(), scale, scale.t(), out_dtype=torch.bfloat16)
        with pytest.raises(GPUError, match="16 rows"):
            torch._int_mm(*(torch.zeros(16, 16, dtype=torch.int8, device="cuda") for _ in range(2)))
