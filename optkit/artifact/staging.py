"""Publication of a directory: written aside, flushed, then renamed. A half-written directory is never visible.

A directory that was there before stays until the new one is complete. On Linux both change places in a single step, so
``out`` is the old or the new artifact whenever the process is killed.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optkit.artifact.manifest import is_artifact
from optkit.errors import FULL, UserError
from optkit.machine.locks import locked

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output path with other content or without write permission, before any work is done.

    Raises:
        UserError: ``out`` exists and ``force`` is false, ``out`` exists and is not an artifact, or the folder of
            ``out`` can't be written.
    """
    if not out.exists() and not out.is_symlink():
        check_folder(out)
        return
    if not out.is_dir() or out.is_symlink() or (any(out.iterdir()) and not is_artifact(out)):
        raise UserError(
            "it exists and is not an optkit artifact, so it will not be replaced",
            where=str(out),
            fix="choose another output directory",
        )
    if any(out.iterdir()) and not force:
        raise UserError("it exists", where=str(out), fix="pass --force to replace this artifact")


def check_folder(out: Path) -> None:
    """Refuse an ``out`` below a file, or below a folder that can't be written.

    Raises:
        UserError: the nearest existing parent of ``out`` is not a folder that can be written.
    """
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "it can't be written" if above.is_dir() else "it is a file, not a directory"
        raise UserError(reason, where=str(above), fix="choose another output directory")


@contextmanager
def staging(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary directory beside ``out``: renamed to ``out`` after success, removed otherwise.

    Raises:
        UserError: ``out`` is refused (``check_output``), or the disk is full.
    """
    check_output(out, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    directory = Path(tempfile.mkdtemp(prefix=staging_prefix(out), dir=out.parent))
    with locked(directory):
        try:
            yield directory
            flush(directory)
            publish(directory, out)
        except OSError as error:
            if error.errno not in FULL:
                raise
            what = f"the artifact was not written: {os.strerror(error.errno)}"
            raise UserError(what, where=str(out), fix="make room and repeat the command") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def staging_prefix(out: Path) -> str:
    return f".{out.name}.optkit-tmp-"


def remove_abandoned(out: Path) -> None:
    """Remove staging directories of killed runs."""
    for left in out.parent.glob(f"{glob.escape(staging_prefix(out))}*"):
        with suppress(FileNotFoundError), locked(left) as held:  # its run may end right now
            if held:
                shutil.rmtree(left, ignore_errors=True)


def flush(directory: Path) -> None:
    """fsync every file and directory: the rename publishes complete data."""
    for root, _, files in os.walk(directory):
        for path in [*(Path(root) / f for f in files), Path(root)]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def publish(directory: Path, out: Path) -> None:
    """Rename into place; what was at ``out`` is then at ``directory``, or gone.

    Where the system can't exchange two directories, a replaced artifact moves aside first and comes back if the rename
    fails. A process that is killed between both renames leaves no ``out`` there.
    """
    directory.chmod(0o755)
    if not out.exists():
        directory.rename(out)
        return
    if exchanged(directory, out):
        return
    aside = Path(tempfile.mkdtemp(prefix=staging_prefix(out), dir=out.parent))
    aside.rmdir()
    out.rename(aside)
    try:
        directory.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def exchanged(one: Path, other: Path) -> bool:
    """Let two directories change places in a single step; False where system or file system can't.

    Source: renameat2(2), Linux 3.15 and glibc 2.28 or musl 1.2.6.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return rename(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0
