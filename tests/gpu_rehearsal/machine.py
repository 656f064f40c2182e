"""A GPU to rehearse with: ``torch.cuda`` and Triton's launches over the tensors of ``tests.gpu_rehearsal.tensors``.

Capture follows PyTorch's own ``torch.cuda.graph``, so that it is called as it wants to be; what it calls below is
here. Kernels run by Triton's interpreter where tensors have numbers; where they have none, a launch is only looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench.gpu.interpreter import repaired
from tests.gpu_rehearsal.tensors import CAPACITY, CUDA, GPUError, Machine, OnGPU, Tape

CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", multi_processor_count=132, total_memory=CAPACITY, major=9, minor=0
)
Launch = tuple[str, tuple[int, ...], dict[str, Any]]


class Stream:
    """A stream; all of them run at once what they are given."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        synchronize()


class Event:
    """An event; time goes by a millisecond from one that is recorded to the next."""

    now = 0

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing, self.at = enable_timing, 0

    def record(self, stream: Stream | None = None) -> None:
        Event.now += 1
        self.at = Event.now

    def synchronize(self) -> None:
        if not self.at:
            raise GPUError("the event was never recorded")
        synchronize()

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing and self.at and end.at):
            raise GPUError("events that were not recorded, or that take no times")
        return float(end.at - self.at)


class CUDAGraph:
    """A graph: ``begin`` to ``end`` is written down, ``replay`` does it again."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: Tape | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **newer: Any) -> None:
        machine = Machine.now()
        if machine.tape is not None:
            raise GPUError("a capture within a capture")
        if current.stream is DEFAULT:
            raise GPUError("a capture on the default stream")
        machine.tape = Tape()

    def capture_end(self) -> None:
        self.tape, Machine.now().tape = Machine.now().tape, None

    def replay(self) -> None:
        if self.tape is None or Machine.now().tape is not None:
            raise GPUError("a replay of nothing, or in a capture")
        self.tape.replay()


DEFAULT = Stream()
current = SimpleNamespace(stream=DEFAULT)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    before, current.stream = current.stream, chosen or current.stream
    try:
        yield
    finally:
        current.stream = before


def synchronize(device: Any = None) -> None:
    if Machine.now().tape is not None:
        raise GPUError("the host waits, in a capture")


class Generator(torch.Generator):
    """Random numbers of the CPU, whatever the device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


class WithoutDriver(TorchFunctionMode):
    """What a PyTorch that was built without CUDA asks a driver for, before it asks who computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = tuple(map(indexed, args))
        kwargs = {key: indexed(value) for key, value in (kwargs or {}).items()}
        if func is Tensor.tolist and isinstance(args[0], OnGPU):
            return args[0].cpu().tolist()
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda) and isinstance(args[0], OnGPU):
            return moved(func, args, kwargs)
        if func is SDPA and isinstance(args[0], OnGPU):
            return Machine.now().attend(args, kwargs)
        if func in INDEXING and isinstance(args[0], OnGPU):
            return Machine.now().index(INDEXING[func], args, func is Tensor.__setitem__)
        if func is torch.tensor and kwargs.get("device") == CUDA:
            return func(*args, **{**kwargs, "device": None}).to(CUDA)
        return func(*args, **kwargs)


def moved(func: Any, args: Any, kwargs: Any) -> Tensor:
    """``x.to(...)``, as if PyTorch knew where ``x`` is."""
    x, *options = args
    quick = {"non_blocking": True} if kwargs.get("non_blocking") else {}
    named = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func, kwargs.get("device"))
    like = next((o for o in options if isinstance(o, Tensor)), x)
    places = [o for o in (named, *options) if isinstance(o, str | torch.device)]
    dtypes = [o for o in (kwargs.get("dtype"), *options, like.dtype) if isinstance(o, torch.dtype)]
    to, dtype = torch.device(places[0] if places else like.device), dtypes[0]
    if to.type == "cuda" and dtype == x.dtype and not kwargs.get("copy"):
        return x
    return torch.ops.aten._to_copy.default(x, dtype=dtype, device=indexed(str(to)), **quick)


SDPA = torch.nn.functional.scaled_dot_product_attention
INDEXING = {Tensor.__getitem__: operator.getitem, Tensor.__setitem__: operator.setitem}


def indexed(value: Any) -> Any:
    if isinstance(value, torch.device | str) and str(value) == "cuda":
        return CUDA
    return value


def torch_cuda(machine: Machine) -> dict[str, Any]:
    """The functions of ``torch.cuda`` that optkit calls."""

    def free() -> tuple[int, int]:
        return machine.capacity - machine.allocated, machine.capacity

    def reset_peak(device: Any = None) -> None:
        machine.peak = machine.allocated

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: PROPERTIES,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: free(),
        "memory_allocated": lambda device=None: machine.allocated,
        "max_memory_allocated": lambda device=None: machine.peak,
        "reset_peak_memory_stats": reset_peak,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: current.stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "stream": stream,
    }


@contextmanager
def rehearsal(inside: str = "cpu", capacity: int = CAPACITY) -> Iterator[tuple[Machine, list[Launch]]]:
    """Within it there is a GPU, with numbers (``cpu``) or without (``meta``); and the list of what is launched."""
    machine, launches = Machine(inside, capacity), list[Launch]()
    with ExitStack() as stack:
        for name, value in torch_cuda(machine).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch._C, "_host_emptyCache", lambda: None, create=True))
        stack.enter_context(patch.object(torch, "Generator", Generator))
        stack.enter_context(WithoutDriver())
        stack.enter_context(repaired())
        stack.enter_context(watched_launches(machine, launches))
        stack.enter_context(forgotten())
        yield stack.enter_context(machine.running()), launches


@contextmanager
def forgotten() -> Iterator[None]:
    """What optkit remembers of the GPU does not outlive the rehearsal, nor come from before it."""
    from optkit.kernels.triton import attention, common

    remembered = (common.architecture_of, attention.multiprocessors)
    try:
        for each in remembered:
            each.cache_clear()
        yield
    finally:
        for each in remembered:
            each.cache_clear()


@contextmanager
def watched_launches(machine: Machine, launches: list[Launch]) -> Iterator[None]:
    """Triton's launches: every tensor must be on the GPU; they run where there are numbers."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        bound = [*args, *options.values()]
        strangers = [x for x in bound if isinstance(x, Tensor) and not isinstance(x, OnGPU)]
        if strangers:
            raise GPUError(f"{self.fn.__name__}: {[(tuple(x.shape), x.dtype, x.device) for x in strangers]}")
        if not all(isinstance(n, int) and n >= 1 for n in grid) or any(n > 65535 for n in grid[1:]):
            raise GPUError(f"{self.fn.__name__}: the grid is {grid}")
        launches.append((self.fn.__name__, tuple(grid), dict(options)))
        if machine.inside.type == "meta":
            return
        inner = [machine.unwrap(x) for x in args]

        def again() -> None:
            run(self, *inner, grid=grid, warmup=warmup, **options)

        again()
        if machine.tape is not None:
            machine.tape.steps.append(again)

    with patch.object(InterpretedFunction, "run", launch):
        yield


__all__ = ["CUDA", "GPUError", "Machine", "OnGPU", "rehearsal"]
