"""User errors: one printable line with place, problem and remedy."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from optkit.errors import UserError, first_line, nearest, printable, refusal


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("no such file"), "no such file."),
        (UserError("no such file", where="a.yaml:3"), "a.yaml:3: no such file."),
        (UserError("no such file.", fix="look again."), "no such file. look again."),
        (UserError("unknown key", where="r", fix="did you mean 'x'?"), "r: unknown key. did you mean 'x'?"),
    ],
)
def test_line_joins_place_problem_and_remedy(error: UserError, line: str) -> None:
    assert error.line() == line == str(error)


def test_user_error_is_a_single_printable_line_when_a_name_has_control_characters() -> None:
    line = UserError("bad\nname", where="\x1b[31mred", fix="rename\tit").line()
    assert line == "\\x1b[31mred: bad\\nname. rename\\tit."


def test_printable_keeps_letters_of_any_language() -> None:
    assert printable("größe 模型") == "größe 模型"


def test_nearest_suggests_a_close_word_and_lists_all_words_otherwise() -> None:
    assert nearest("ttft-cp", ["edge-cpu", "ttft-cpu"]) == "did you mean 'ttft-cpu'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


ROOM = "make room on the disks of the output and of the cache (OPTKIT_CACHE)"
ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)
MEMORY = "close other programs, or take a machine with more memory or a smaller model"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError(f"{ALLOCATOR} to allocate 8 bytes"),
            "can't allocate memory: you tried to allocate 8 bytes",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
            "CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (MemoryError(), "an allocation failed"),
        (MemoryError("Unable to allocate 8 GiB"), "Unable to allocate 8 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_refusal_says_that_memory_is_missing(error: Exception, line: str) -> None:
    found = refusal(error)
    assert found is not None and found.line() == f"not enough memory: {line}. {MEMORY}."


def test_refusal_of_torch_for_an_allocation_that_is_too_large() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.int8)
    assert str(refusal(error.value)).startswith("not enough memory: ")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "full", "a/b"), f"a/b: No space left on device. {ROOM}."),
        (OSError(errno.ENOSPC, "full"), f"No space left on device. {ROOM}."),
        (
            OSError(errno.EMFILE, "many", "a"),
            "a: Too many open files. raise the limit on open files (ulimit -n).",
        ),
        (OSError(errno.EROFS, "read-only", Path("a")), "a: Read-only file system."),
        (RuntimeError("serializing: I/O error: full (os error 28)"), f"No space left on device. {ROOM}."),
    ],
)
def test_refusal_names_path_and_reason_when_the_operating_system_refuses(error: Exception, line: str) -> None:
    found = refusal(error)
    assert isinstance(found, UserError) and found.line() == line


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "missing", "a"), OSError("no number"), RuntimeError("(os error 2)"), KeyError(28)],
)
def test_refusal_is_none_when_the_error_may_be_a_bug(error: Exception) -> None:
    assert refusal(error) is None


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n  a size of 3\nand more"), "a size of 3"),
        (ValueError("rope:\n\n   no theta\n   no type"), "rope: no theta"),
        (ValueError("rope:"), "rope:"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_first_line_is_the_cause_in_one_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
