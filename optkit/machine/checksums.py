"""sha256 of files, and ``sums.json``: which files of a private directory are finished, and what they must be.

A file that is listed there and hashes to the same is whole. One that was cut short by a full disk, damaged later, or
not finished when its writer was killed is as good as absent: whoever keeps something makes it again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

SUMS = "sums.json"
CHUNK = 1 << 20


def sha256_file(file: Path) -> str:
    """The hash of a plain file, which is not reached through a link."""
    digest = hashlib.sha256()
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def list_finished(directory: Path, *names: str) -> None:
    """Add files of ``directory`` to its ``sums.json``, which is replaced in one step."""
    sums = read_sums(directory) | {name: sha256_file(directory / name) for name in names}
    temporary = directory / f"{SUMS}.tmp"
    temporary.write_text(json.dumps(sums), "utf-8")
    temporary.rename(directory / SUMS)


def read_sums(directory: Path) -> dict[str, str]:
    """Names to hashes; empty where there is no list, or none that can be read."""
    try:
        sums = json.loads((directory / SUMS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return sums if isinstance(sums, dict) else {}


def is_finished(directory: Path, name: str) -> bool:
    """Whether a file of ``directory`` is listed as finished and is still what it was."""
    expected = read_sums(directory).get(name)
    try:
        return expected is not None and sha256_file(directory / name) == expected
    except OSError:
        return False
