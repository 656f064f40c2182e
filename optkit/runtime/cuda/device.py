"""The operations of a GPU for the runner: capture and replay, pinned memory, events, free memory.

``CudaDevice`` is the GPU; the methods hold no decisions, because only a GPU can run the class. ``HostDevice`` does the
same on a CPU: a captured step is a function, which is called again and writes to the same tensor. So all decisions
(buckets, padding, feedback, memory plan) are the same code on both, and are tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Step = Callable[[], Tensor]
WARM_UPS = 2  # runs before a capture: the first compiles kernels and makes library handles


class Replay(Protocol):
    """A captured step. ``output`` is the tensor written by every replay."""

    output: Tensor

    def __call__(self) -> None: ...


class Event(Protocol):
    """A point in the stream of work."""

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""
        ...


class Device(Protocol):
    """The device of the runner's tensors and steps."""

    torch_device: torch.device

    def capture(self, step: Step) -> Replay:
        """Run ``step`` until warm, then record it. Inputs must be static; captures share memory."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Zeroed host memory [num_bytes] uint8 for copies to and from the device without waiting."""
        ...

    def mark(self) -> Event:
        """A point after all work queued so far."""
        ...

    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        """Peak of the bytes allocated by ``step``, beyond the bytes allocated before."""
        ...

    def seconds(self, replay: Callable[[], None], repeats: int) -> float:
        """Seconds of a call, over ``repeats`` in a row."""
        ...

    def num_compilations(self) -> int:
        """Kernels compiled in the process so far."""
        ...


class CudaDevice:
    """A GPU, by PyTorch. Captures share one memory pool and run on a separate stream."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._compilations = CompilationCounter()

    def capture(self, step: Step) -> Replay:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = step()
        return CudaReplay(graph, output)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def free_memory(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def seconds(self, replay: Callable[[], None], repeats: int) -> float:
        replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def num_compilations(self) -> int:
        return self._compilations.count


class CudaReplay:
    """A ``torch.cuda.CUDAGraph`` and the output."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.graph, self.output = graph, output

    def __call__(self) -> None:
        self.graph.replay()


class CompilationCounter:
    """Counts kernels compiled by Triton or loaded from Triton's cache; 0 without Triton."""

    def __init__(self) -> None:
        self.count = 0
        try:
            from triton import knobs
        except ImportError:
            return
        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self

    def __call__(self, **details: Any) -> Any:
        self.count += 1
        return self._before(**details) if self._before is not None else None


class HostDevice:
    """The CPU in the place of a GPU, for tests.

    Args:
        memory: the (free, total) bytes to report.
    """

    def __init__(self, memory: tuple[int, int] = (1 << 30, 1 << 30)) -> None:
        self.torch_device = torch.device("cpu")
        self.memory = memory

    def capture(self, step: Step) -> Replay:
        return HostReplay(step)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark(self) -> Event:
        return Done()

    def free_memory(self) -> tuple[int, int]:
        return self.memory

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        step()
        return 0

    def seconds(self, replay: Callable[[], None], repeats: int) -> float:
        import time

        start = time.perf_counter()
        for _ in range(repeats):
            replay()
        return (time.perf_counter() - start) / repeats

    def num_compilations(self) -> int:
        return 0


class HostReplay:
    """Calls the step again and copies the result into the first output."""

    def __init__(self, step: Step) -> None:
        self.step, self.output = step, step()

    @torch.inference_mode()
    def __call__(self) -> None:
        self.output.copy_(self.step())


class Done:
    """An event of a device without a queue."""

    def synchronize(self) -> None:
        pass
