"""Publication of a directory: written aside, flushed, then renamed. A half-written directory is never visible."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optkit.artifact.manifest import is_artifact
from optkit.errors import UserError
from optkit.machine.locks import locked


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
    """A temporary directory beside ``out``: renamed to ``out`` after success, removed otherwise."""
    check_output(out, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    directory = Path(tempfile.mkdtemp(prefix=staging_prefix(out), dir=out.parent))
    with locked(directory):
        try:
            yield directory
            flush(directory)
            publish(directory, out)
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
    """Rename into place. A replaced artifact moves aside first and comes back if the rename fails."""
    directory.chmod(0o755)
    if not out.exists():
        directory.rename(out)
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
