"""The private cache directory, for files optkit can make again.

``OPTKIT_CACHE`` overrides the default ``$XDG_CACHE_HOME/optkit``. The directory may hold compiled code. So the
directory must belong to the calling user (mode 0700), and a symlink is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from optkit.errors import FULL, UserError


def cache_root() -> Path:
    """The cache directory, created with mode 0700 when missing.

    Raises:
        UserError: the directory is a symlink, belongs to another user, or is writable by other users.
    """
    override = os.environ.get("OPTKIT_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optkit"
    return private_dir(Path(override) if override else default)


def cache_dir(name: str) -> Path:
    """The subdirectory ``name`` of the cache, created when missing."""
    return private_dir(cache_root() / name)


def private_dir(path: Path) -> Path:
    """Create ``path`` with mode 0700, or check the owner and the mode of an existing directory.

    Raises:
        UserError: the directory can't be made, is a symlink, belongs to another user, or is writable by other users.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # a file of the name, a place without permission, a full disk
        raise UserError(
            f"the cache directory can't be made: {error.strerror or error}",
            where=str(path),
            fix="set OPTKIT_CACHE to a directory that you can write, on a disk with room",
        ) from error
    info = path.lstat()
    problem = None
    if stat.S_ISLNK(info.st_mode):
        problem = "is a symlink"
    elif info.st_uid != os.getuid():
        problem = f"belongs to uid {info.st_uid}, not to you"
    elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be written by other users"
    if problem:
        raise UserError(
            f"the cache directory {problem}",
            where=str(path),
            fix="set OPTKIT_CACHE to a directory that only you can write (chmod 700)",
        )
    return path


def replace_text(file: Path, text: str) -> None:
    """Write ``text`` (UTF-8) into ``file`` by a rename: readers see the old or the new content, whole.

    A link stays a link to the new content. A device or a pipe is written in place.

    Raises:
        OSError: ``file`` can't be written; the old content is unchanged.
    """
    target = file.resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, "utf-8")
        return
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_text(file: Path, text: str) -> None:
    """Write a result into ``file`` as ``replace_text`` does, and create missing directories.

    Raises:
        UserError: the file can't be written, for example on a full disk.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    except OSError as error:
        fix = "make room on the disk, or give another file" if error.errno in FULL else "give another file"
        raise UserError(f"can't be written: {error.strerror or error}", where=str(file), fix=fix) from error


def check_place(file: Path) -> None:
    """Refuse a file that can't be written, before the work of which it holds the result.

    Raises:
        UserError: a directory, or a place without permission.
    """
    place = next((path for path in (file, *file.absolute().parents) if path.exists()), file)
    if file.is_dir():
        raise UserError("a directory, not a file", where=str(file), fix="give the name of a file")
    if place != file and not place.is_dir():
        raise UserError(f"{place} is no directory", where=str(file), fix="give another file")
    if not os.access(place, os.W_OK):
        raise UserError("no permission to write", where=str(file), fix="give another file")
