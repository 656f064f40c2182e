"""Locks between processes of one user, by flock(2): the kernel releases them when their process ends.

A name of a lock is a file ``.lock-NAME`` beside what it protects. The holder removes the file before it releases the
lock, so a process that waited for a removed file opens the new one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from optkit.errors import UserError

PREFIX = ".lock-"


def hold(path: Path, flags: int = 0, *, shared: bool = False, wait: bool = False) -> int | None:
    """A descriptor that locks the file or directory ``path`` until it is closed.

    None where another process holds the lock and ``wait`` is False, or where ``path`` was removed or replaced
    meanwhile.

    Raises:
        FileNotFoundError: there is no such path.
        UserError: the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags, 0o600)
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, mode if wait else mode | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        fix = "set OPTKIT_CACHE to a directory on a local disk"
        raise UserError("the file system has no locks (flock)", where=str(path), fix=fix) from error
    except BaseException:  # Ctrl-C while waiting
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold a directory as long as the block runs, or the process lives; False where another process holds it.

    Not the process id says who is alive: in a container the next run has the same one.
    """
    try:
        descriptor = hold(directory)
    except UserError:  # without locks nobody can say that it is abandoned
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def modified(path: Path) -> float:
    """The time at which an entry of a cache was written or used last; 0 where another process has removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


class Locks:
    """The named locks of one directory that this object holds. A lock that it holds already can be taken again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: dict[str, int] = {}

    def take(self, name: str, *, wait: bool = False) -> bool:
        """Take the lock ``name``; False where another process holds it and ``wait`` is False."""
        if name in self.held:
            return True
        while True:
            descriptor = hold(self.file(name), os.O_CREAT, wait=wait)
            if descriptor is not None:
                self.held[name] = descriptor
                return True
            if not wait:
                return False

    def release(self, name: str) -> None:
        """Give the lock ``name`` back and remove its file."""
        descriptor = self.held.pop(name)
        self.file(name).unlink(missing_ok=True)
        os.close(descriptor)

    @contextmanager
    def holding(self, name: str, busy: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock ``name`` as long as the block runs. ``busy`` is called before a wait for another process."""
        if name in self.held:
            yield
            return
        if not self.take(name):
            busy()
            self.take(name, wait=True)
        try:
            yield
        finally:
            self.release(name)

    def file(self, name: str) -> Path:
        return self.root / f"{PREFIX}{name}"

    def close(self) -> None:
        """Give back every lock."""
        for name in list(self.held):
            self.release(name)
