"""The kernels' pool of threads: equal bits from any number of threads, callers and processes, and idle between calls.

The numbers of threads are larger than the machine, so the system decides which thread computes what.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optkit.kernels.cpu import int8, native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
ROOT = Path(__file__).parents[2]
ROWS, INNER, OUT = 37, 128, 2048  # tasks enough for eight threads


@pytest.fixture(autouse=True)
def torchs_own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operands(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantized activations with scales, and a weight with scales."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randint(1, 255, (ROWS, INNER), dtype=torch.uint8, generator=random)
    weight = torch.randint(-127, 128, (OUT, INNER), dtype=torch.int8, generator=random)
    return q, torch.rand(ROWS, 1, generator=random), weight, torch.rand(OUT, 1, generator=random)


def in_float64(q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return (q.double() - 128) @ weight.double().T * scale.double() * weight_scale.double().T


def product(packed: dict[int, Tensor], q: Tensor, scale: Tensor) -> Tensor:
    return int8.linear_w8a8(q, scale, *packed.values())


def packed_weight(weight: Tensor, weight_scale: Tensor) -> dict[int, Tensor]:
    return int8.pack({2: weight, 3: weight_scale})


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 33])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    q, scale, weight, weight_scale = operands()
    torch.set_num_threads(1)
    packed = packed_weight(weight, weight_scale)
    alone = product(packed, q, scale)
    torch.testing.assert_close(
        alone.double(), in_float64(q, scale, weight, weight_scale), rtol=1e-6, atol=1e-6
    )
    torch.set_num_threads(threads)
    for _ in range(50):
        assert torch.equal(product(packed_weight(weight, weight_scale), q, scale), alone)


def test_callers_at_once_get_their_own_results() -> None:
    """One caller has the pool, the others compute alone."""
    torch.set_num_threads(4)
    cases = [operands(seed) for seed in range(6)]
    wrong: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(4)
        q, scale, weight, weight_scale = cases[number]
        packed, expected = packed_weight(weight, weight_scale), in_float64(*cases[number])
        for _ in range(40):
            if not torch.allclose(product(packed, q, scale).double(), expected):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(cases))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.skipif(
    native.library_file().stem == "thread", reason="ThreadSanitizer allows no threads in the child of a fork"
)
def test_the_child_of_a_fork_has_a_pool_of_its_own() -> None:
    torch.set_num_threads(4)
    q, scale, weight, weight_scale = operands()
    packed = packed_weight(weight, weight_scale)
    expected = product(packed, q, scale).numpy().tobytes()
    child = os.fork()
    if child == 0:  # torch's own parallel ops do not survive a fork, so bytes are compared
        equal = all(product(packed, q, scale).numpy().tobytes() == expected for _ in range(20))
        os._exit(0 if equal else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert product(packed, q, scale).numpy().tobytes() == expected


SHARING = """
import os, time
from tests.kernels.test_threads import operands, packed_weight, product
import torch

cores = os.sched_getaffinity(0)
core = min(cores)
torch.set_num_threads(2)
q, scale, *weight = operands()
packed = packed_weight(*weight)
product(packed, q, scale)
workers = [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]


def together(allowed):
    '''Runs loops with the caller and each worker on one core; the caller may leave it for `allowed`.'''
    for thread in workers:
        os.sched_setaffinity(thread, {core})
    os.sched_setaffinity(0, {core})
    os.sched_setaffinity(0, allowed)
    for _ in range(20):
        product(packed, q, scale)
    return [os.sched_getaffinity(thread) for thread in workers]


end = time.monotonic() + 30
while cores - {core} not in (left := together(cores)):  # the system may move the caller at any time
    assert time.monotonic() < end, left
for _ in range(20):
    assert together({core}) == [{core}] * len(workers)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_a_worker_leaves_the_core_of_its_caller_and_no_other_limit() -> None:
    """Two threads on one core take turns, however many cores are idle; a limit of the process holds for both."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    subprocess.run([sys.executable, "-c", SHARING], cwd=ROOT, check=True, timeout=60)


def test_the_pool_sleeps_between_calls() -> None:
    torch.set_num_threads(4)
    q, scale, weight, weight_scale = operands()
    product(packed_weight(weight, weight_scale), q, scale)
    time.sleep(0.05)  # the workers fall asleep after microseconds
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.1
