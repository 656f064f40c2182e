"""The exceptions of optkit, printed as one line each.

A ``UserError`` is a mistake that a user can make: a missing file, an unknown recipe key, a port in use. The error
carries the problem, the place and the remedy. The CLI prints a panel and exits with code 2. An ``EngineError`` is a
failure of a loaded model. Any other exception is a bug in optkit and exits with code 1.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable

REFUSALS = {  # of the operating system: a full disk, a path without permission
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EMFILE, errno.ENFILE),
}
FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    **dict.fromkeys(FULL, "make room on the disks of the output and of the cache (OPTKIT_CACHE)"),
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or take a file system with larger files",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
# torch's allocators raise a RuntimeError, and mmap one with the text of the operating system
NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|DefaultCPUAllocator|out of memory", re.I
)
CODE_IN_TEXT = re.compile(r"\(os error (\d+)\)")


class OptkitError(Exception):
    """The base of the exceptions of optkit."""


class EngineError(OptkitError):
    """The engine process ended, or the model failed on a request."""


class UserError(OptkitError):
    """A mistake the user can fix.

    Args:
        what: the problem, in one sentence without a trailing period.
        where: file, key or argument with the problem.
        fix: the remedy.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = printable(what)
        self.where = None if where is None else printable(where)
        self.fix = None if fix is None else printable(fix)
        super().__init__(self.line())

    def line(self) -> str:
        """The whole message on one line: ``where: what. fix.``"""
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.fix:
            parts.append(self.fix)
        line = ". ".join(part.rstrip(".") for part in parts)
        return line if line.endswith("?") else f"{line}."


def refusal(error: Exception) -> UserError | None:
    """The user error for a refusal by the operating system, such as a full disk; None for any other error.

    safetensors raises another exception, with the error's number in the text.
    """
    if is_out_of_memory(error):
        fix = "close other programs, or take a machine with more memory or a smaller model"
        return UserError(f"not enough memory: {memory_text(error)}", fix=fix)
    found = CODE_IN_TEXT.search(str(error))
    code = error.errno if isinstance(error, OSError) else found and int(found[1])
    if code not in REFUSALS:
        return None
    path = getattr(error, "filename", None)
    return UserError(os.strerror(code), where=None if path is None else str(path), fix=REMEDIES.get(code))


def is_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation, by Python, torch or the operating system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None
    )


def memory_text(error: BaseException) -> str:
    """The text of an allocator, without the place in the C++ code."""
    text = first_line(error).removeprefix("MemoryError")
    return text.rpartition("DefaultCPUAllocator: ")[2] or "an allocation failed"


def printable(text: str) -> str:
    """``text`` with control characters and line ends spelled out, since names of files and tensors are untrusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class UnsupportedModel(UserError):
    """A model that optkit refuses, with the reason."""


class CollectiveFailed(RuntimeError):
    """A rank of a model in several processes did not answer."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first non-empty line of an error's text, up to ``limit`` characters; without a text the error's type.

    A line that ends with a colon is followed by the next line, the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = lines[: 2 if lines and lines[0].endswith(":") else 1] or [type(error).__name__]
    return " ".join(kept)[:limit]


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest known word, else the list of all known words."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean '{close[0]}'?" if close else "known: " + ", ".join(words)
