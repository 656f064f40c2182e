"""Locks between processes of the same user, by flock(2): the kernel releases the locks of an ended process.

The lock NAME is the file ``.lock-NAME`` beside the protected files. The holder removes the lock file before releasing
the lock, so a process with a descriptor of the removed file opens the new file.
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
    """Lock the file or directory ``path`` and return a descriptor; closing the descriptor releases the lock.

    The result is None if another process holds the lock and ``wait`` is False, or if ``path`` was removed or replaced
    meanwhile.

    Raises:
        FileNotFoundError: the path does not exist.
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
    """Hold ``directory`` while the block runs or the process lives. Yield False if another process holds the directory.

    A lock shows more than a process id: in a container the next run may have the same id.
    """
    try:
        descriptor = hold(directory)
    except UserError:  # without locks the directory may still be in use
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def modified(path: Path) -> float:
    """Time of the last write or use of a cache entry, in seconds; 0 if another process has removed the entry."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


class Locks:
    """The held locks of a directory, by name. Taking a held lock again succeeds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: dict[str, int] = {}

    def take(self, name: str, *, wait: bool = False) -> bool:
        """Take the lock ``name``; return False if another process holds the lock and ``wait`` is False."""
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
        """Release the lock ``name`` and remove the lock file."""
        descriptor = self.held.pop(name)
        self.file(name).unlink(missing_ok=True)
        os.close(descriptor)

    @contextmanager
    def holding(self, name: str, busy: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock ``name`` while the block runs. ``busy`` is called before waiting for another process."""
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
        """Release all locks."""
        for name in list(self.held):
            self.release(name)
