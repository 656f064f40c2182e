"""Cancellation of a step: the check runs between parts, and only inside its block."""

from __future__ import annotations

import threading

import pytest

from optkit.cancellation import StepCancelled, cancellable, check_cancelled


def cancel() -> None:
    raise StepCancelled


def test_check_cancelled_does_nothing_without_a_check() -> None:
    check_cancelled()


def test_check_cancelled_calls_the_innermost_check() -> None:
    calls: list[str] = []
    with cancellable(lambda: calls.append("outer")):
        with cancellable(lambda: calls.append("inner")):
            check_cancelled()
        check_cancelled()
    check_cancelled()
    assert calls == ["inner", "outer"]


def test_cancellable_drops_the_check_when_the_step_was_cancelled() -> None:
    with pytest.raises(StepCancelled), cancellable(cancel):
        check_cancelled()
    check_cancelled()


def test_step_cancelled_passes_handlers_of_exceptions() -> None:
    with pytest.raises(StepCancelled), cancellable(cancel):
        try:
            check_cancelled()
        except Exception as error:  # noqa: BLE001 - the handler of a failed batch
            pytest.fail(f"caught {error!r}")


def test_check_cancelled_does_nothing_in_another_thread() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            check_cancelled()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    with cancellable(cancel):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert raised == []
