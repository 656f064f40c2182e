"""Calls under ``with_stack_room`` stay within a chunk of CPython's stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from optkit.machine.stack_room import OF_A_PROCESS, OF_A_STEP, with_stack_room

CALLS = 200


def inner() -> None:
    """A frame that may not fit the current chunk."""


def faults_of_calls(function: Callable[[], None] = inner) -> int:
    """Page faults of ``CALLS`` calls of ``function``: one or more for each new chunk."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, function: Callable[[], int]) -> int:
    return function() if depth == 0 else at_depth(depth - 1, function)


def most_faults(function: Callable[[], int]) -> int:
    """Of all depths of the stack within some chunks."""
    return max(at_depth(depth, function) for depth in range(400))


@pytest.mark.skipif(sys.version_info < (3, 11) or os.name != "posix", reason="no chunks")
def test_no_call_maps_a_chunk_of_the_stack() -> None:
    if most_faults(faults_of_calls) < CALLS:
        pytest.skip("this Python keeps its chunks")
    for room in (OF_A_PROCESS, OF_A_STEP):
        assert most_faults(with_stack_room(room)(faults_of_calls)) < CALLS // 2


@pytest.mark.skipif(sys.version_info < (3, 11) or os.name != "posix", reason="no chunks")
def test_a_step_under_the_room_of_a_process_maps_nothing() -> None:
    step = with_stack_room(OF_A_STEP)(inner)
    if faults_of_calls(step) < CALLS:
        pytest.skip("this Python keeps its chunks")
    assert with_stack_room(OF_A_PROCESS)(faults_of_calls)(step) < CALLS // 2


def test_a_function_keeps_its_name_arguments_result_and_exceptions() -> None:
    def divided(a: float, *, by: float) -> float:
        """``a`` by ``by``."""
        return a / by

    roomy = with_stack_room(OF_A_STEP)(divided)
    assert (roomy.__name__, roomy.__doc__) == ("divided", divided.__doc__)
    assert roomy(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        roomy(1, by=0)


def test_methods_are_methods() -> None:
    class Counter:
        count = 0

        @with_stack_room(OF_A_STEP)
        def add(self, number: int) -> int:
            self.count += number
            return self.count

    assert Counter().add(2) == 2


def test_recursion_under_it_still_has_its_limit() -> None:
    @with_stack_room(OF_A_STEP)
    def deeper() -> None:
        deeper()

    with pytest.raises(RecursionError):
        deeper()
