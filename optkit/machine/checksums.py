"""SHA-256 of files, and ``sums.json``: the list of finished files of a private directory with their hashes.

A file is finished if ``sums.json`` lists the file's present hash. A file counts as absent if a full disk cut the file
short, if the content was damaged later, or if the writer was killed. The owner of the directory then makes the file
again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

SUMS = "sums.json"
CHUNK = 1 << 20


def sha256_file(file: Path) -> str:
    """The SHA-256 of a plain file, as hexadecimal digits. A symbolic link raises OSError."""
    digest = hashlib.sha256()
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def list_finished(directory: Path, *names: str) -> None:
    """Add files of ``directory`` to ``sums.json``, which is replaced in one step."""
    sums = read_sums(directory) | {name: sha256_file(directory / name) for name in names}
    temporary = directory / f"{SUMS}.tmp"
    temporary.write_text(json.dumps(sums), "utf-8")
    temporary.rename(directory / SUMS)


def read_sums(directory: Path) -> dict[str, str]:
    """Names to hashes from ``sums.json``; empty if the list is missing or unreadable."""
    try:
        sums = json.loads((directory / SUMS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return sums if isinstance(sums, dict) else {}


def is_finished(directory: Path, name: str) -> bool:
    """Return True if ``sums.json`` lists the file and the file still has the listed hash."""
    expected = read_sums(directory).get(name)
    try:
        return expected is not None and sha256_file(directory / name) == expected
    except OSError:
        return False
