"""The fact of a whole prompt holds inside of its block, in its own thread, and no longer."""

from __future__ import annotations

import threading

import pytest

from optkit.kernels.whole_prompt import WholePrompt, current_whole_prompt, whole_prompt


def test_prompt_is_current_inside_of_the_block_and_the_outer_one_afterwards() -> None:
    outer, inner = WholePrompt(), WholePrompt()
    with whole_prompt(outer):
        with whole_prompt(inner):
            assert current_whole_prompt() is inner
        with whole_prompt(None):
            assert current_whole_prompt() is None
        assert current_whole_prompt() is outer
    assert current_whole_prompt() is None


def test_prompt_is_forgotten_when_the_step_fails() -> None:
    with pytest.raises(RuntimeError), whole_prompt(WholePrompt()):
        raise RuntimeError
    assert current_whole_prompt() is None


def test_another_thread_does_not_see_the_prompt() -> None:
    seen: list[WholePrompt | None] = []
    with whole_prompt(WholePrompt()):
        thread = threading.Thread(target=lambda: seen.append(current_whole_prompt()))
        thread.start()
        thread.join()
    assert seen == [None]
