"""The code tier: compiled layers on disk, and the rules for running compiled layers.

A directory holds ``code.json`` and, for each variant, a shared object and the names of the variant's operators.
Artifacts (``optkit/native/``) and the private cache, where ``optkit rebuild`` writes, have the same layout.

Opening a shared object runs code, so a directory is only used under three conditions:

1. **Own work**: ``code.json`` carries the seal of the user and the machine (``optkit.machine.seals``), or
   the user passed ``--trust-artifact-code``.
2. **Fit**: the same torch, optkit and processor, and a layer with the same digest (``optkit.lowering.compiled.plan``).
3. **Integrity**: every file has the sha256 of the record. The hashed bytes are written to the private cache and opened
   there, so the opened bytes are the hashed bytes.

Otherwise the uncompiled model runs, and the log holds the reason. Nothing is compiled here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optkit.errors import first_line
from optkit.graph.ir import Graph
from optkit.lowering.compiled.aot import LIBRARY, OPERATORS, load
from optkit.lowering.compiled.plan import PLAN, CompiledCode, RegionSource, region_source
from optkit.lowering.compiled.region import Variant
from optkit.machine.locks import Locks, hold, locked, modified
from optkit.machine.paths import cache_dir
from optkit.machine.seals import is_sealed, seal
from optkit.machine.target import Target, cpu_model
from optkit.version import VERSION

log = logging.getLogger(__name__)

RECORD = "code.json"
KEEP = 16  # directories in the cache; the oldest beyond these are removed
WRITING = ".tmp-"  # directories that are being written begin with this
ABANDONED_SECONDS = 86400.0
IN_USE: dict[Path, int] = {}  # directories that this process holds until it ends, and the descriptors that do
MAX_FILE = 1 << 28


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fit(_Model):
    """The conditions under which code was made; the code runs only where all conditions are equal."""

    torch: str
    optkit: str
    processor: str
    isa: tuple[str, ...] = Field(strict=False)
    layer: str


class CodeFile(_Model):
    """A variant: the range of step sizes, the files by sha256, and the measured times."""

    first: Annotated[int, Field(ge=1)]
    last: Annotated[int, Field(ge=1)] | None
    files: dict[Annotated[str, Field(pattern=r"^(tokens-\d{1,8}|tail)\.(so|json)$")], str]
    seconds: float
    uncompiled_seconds: float

    @property
    def stem(self) -> str:
        return file_stem(self.last)


class CodeRecord(_Model):
    """``code.json``."""

    fit: Fit
    variants: tuple[CodeFile, ...] = Field(strict=False)
    seal: str = ""

    def sealed_text(self) -> str:
        """The text under the seal: all fields but the seal."""
        return self.model_copy(update={"seal": ""}).model_dump_json()


@dataclass(frozen=True)
class CodeTier:
    """A directory of compiled code and the record, without any code loaded."""

    directory: Path
    record: CodeRecord

    @staticmethod
    def read(directory: Path) -> CodeTier | None:
        """The code in ``directory``, None without a readable record."""
        try:
            data = read_file(directory / RECORD)
            return CodeTier(directory, CodeRecord.model_validate_json(data))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, ValueError) as error:
            log.warning("%s can't be read (%s); the model runs uncompiled", RECORD, type(error).__name__)
            return None

    @property
    def is_ours(self) -> bool:
        """True where the seal of the user on the machine is valid."""
        return is_sealed(self.record.sealed_text(), self.record.seal)

    def misfit(self, fit: Fit) -> str | None:
        """The first condition of ``Fit`` with another value here, in words."""
        for name, here in fit.model_dump().items():
            there = getattr(self.record.fit, name)
            if there != here:
                shown = "another layer" if name == "layer" else f"{name} {there}, not {here}"
                return f"it was made for {shown}"
        return None

    def files(self) -> Iterator[tuple[str, str]]:
        """Names and sha256 of all code files."""
        for variant in self.record.variants:
            yield from variant.files.items()

    def problems(self) -> Iterator[str]:
        """Differences between the files and the record."""
        for name, digest in self.files():
            try:
                if hashlib.sha256(read_file(self.directory / name)).hexdigest() != digest:
                    yield f"{name} was changed (sha256 differs from {RECORD})"
            except OSError as error:
                yield f"{name} can't be read: {error.strerror}"


def read_file(path: Path) -> bytes:
    """A plain file, links not followed, at most ``MAX_FILE`` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        data = stream.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"{path.name} is larger than {MAX_FILE} bytes")
    return data


def file_stem(last: int | None) -> str:
    return "tail" if last is None else f"tokens-{last}"


def fit_of(source: RegionSource, target: Target) -> Fit:
    """The conditions here and now for code of ``source``."""
    import torch

    return Fit(
        torch=torch.__version__,
        optkit=VERSION,
        processor=cpu_model(),
        isa=target.isa,
        layer=source.digest,
    )


# -- finding and loading ---------------------------------------------------------------------------------


def cached(fit: Fit, plan: object) -> Path:
    """The directory in the private cache for code of ``fit`` and a compile plan."""
    text = f"{fit.model_dump_json()} {plan}"
    return cache_dir("code") / hashlib.sha256(text.encode()).hexdigest()[:32]


def find_code(
    graph: Graph, target: Target, native: Path | None = None, *, trust: bool = False
) -> CompiledCode | None:
    """The compiled code for ``graph``: the artifact's (in ``native``), else the cache's, else None.

    The log holds the reason for unused code. A graph without a compile plan is answered at once.
    """
    if PLAN not in graph.annotations:
        return None
    source = region_source(graph, target)
    fit = fit_of(source, target)
    shipped = CodeTier.read(native) if native else None
    reason = "there is none" if shipped is None else refusal(shipped, fit, trust)
    if shipped is not None and reason is None:
        return loaded(shipped, source)
    rebuilt = cached_code(fit, graph.annotations[PLAN])
    if rebuilt is not None and refusal(rebuilt, fit) is None:
        return loaded(rebuilt, source)
    log.warning(
        "compiled code is not used: %s. The model runs uncompiled; optkit rebuild compiles it here", reason
    )
    return None


def cached_tier(graph: Graph, target: Target) -> CodeTier | None:
    """The code made for ``graph`` on the same machine, from the private cache."""
    if PLAN not in graph.annotations:
        return None
    tier = cached_code(fit_of(region_source(graph, target), target), graph.annotations[PLAN])
    return tier if tier and tier.is_ours else None


def cached_code(fit: Fit, plan: object) -> CodeTier | None:
    """The code for ``fit`` and a compile plan in the private cache, which no other process removes from here on."""
    place = cached(fit, plan)
    with Locks(place.parent).holding(place.name):
        use(place)
        return CodeTier.read(place)


def use(place: Path) -> None:
    """Mark a directory of the cache as used until the process ends; ``remove_oldest`` keeps marked directories."""
    with suppress(FileNotFoundError):
        descriptor = hold(place, shared=True)
        if place in IN_USE:
            os.close(IN_USE.pop(place))
        if descriptor is not None:
            IN_USE[place] = descriptor


def refusal(tier: CodeTier, fit: Fit, trust: bool = False) -> str | None:
    """The reason against running the code, or None."""
    if not (trust or tier.is_ours):
        return "it was not built on this machine by this user (--trust-artifact-code runs it all the same)"
    return tier.misfit(fit) or next(tier.problems(), None)


def loaded(tier: CodeTier, source: RegionSource) -> CompiledCode | None:
    """Open the libraries, from copies of exactly the bytes whose hash was checked. None where there are none."""
    variants = []
    device = source.arguments[source.token_input].device.type
    with tempfile.TemporaryDirectory(prefix="open-", dir=cache_dir("code")) as directory:
        for entry in tier.record.variants:
            try:
                for name, digest in entry.files.items():
                    data = read_file(tier.directory / name)
                    if hashlib.sha256(data).hexdigest() != digest:
                        raise ValueError(f"{name} was changed")
                    Path(directory, name).write_bytes(data)
                code = load(Path(directory, entry.stem + LIBRARY), device)
            except (OSError, ValueError, RuntimeError) as error:
                log.warning("compiled code %s can't be loaded: %s", entry.stem, first_line(error))
                continue
            variants.append(Variant(entry.first, entry.last, code))
    return CompiledCode(source, tuple(variants)) if variants else None


# -- writing ---------------------------------------------------------------------------------------------


def code_file(directory: Path, bucket: tuple[int, int | None], seconds: tuple[float, float]) -> CodeFile:
    """The entry of a compiled variant whose files are in ``directory``; ``seconds`` compiled and uncompiled."""
    first, last = bucket
    names = [file_stem(last) + suffix for suffix in (LIBRARY, OPERATORS)]
    files = {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in names
        if (directory / name).exists()
    }
    return CodeFile(first=first, last=last, files=files, seconds=seconds[0], uncompiled_seconds=seconds[1])


def publish(directory: Path, record: CodeRecord, place: Path) -> CodeTier:
    """Seal ``record`` and move all files of ``directory``, or none, to ``place`` in the cache."""
    sealed = record.model_copy(update={"seal": seal(record.sealed_text())})
    tier = CodeTier(place, sealed)
    temporary = Path(tempfile.mkdtemp(prefix=WRITING, dir=place.parent))
    try:
        for name, _ in tier.files():
            shutil.copyfile(directory / name, temporary / name)
        (temporary / RECORD).write_text(sealed.model_dump_json(indent=1) + "\n", "utf-8")
        with Locks(place.parent).holding(place.name):
            shutil.rmtree(place, ignore_errors=True)
            temporary.rename(place)
            use(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remove_oldest(place.parent)
    return tier


def copy_to(tier: CodeTier, native: Path) -> None:
    """Copy a code tier into an artifact under construction."""
    native.mkdir()
    for name in (RECORD, *(name for name, _ in tier.files())):
        (native / name).write_bytes(read_file(tier.directory / name))


def remove_oldest(root: Path) -> None:
    """Remove unused code beyond ``KEEP``, and what a killed process was writing more than ``ABANDONED_SECONDS`` ago."""
    abandoned = time.time() - ABANDONED_SECONDS
    made = sorted((p for p in root.iterdir() if (p / RECORD).exists()), key=modified)
    whole = [p for p in made if not p.name.startswith(WRITING)]
    for old in [*whole[:-KEEP], *(p for p in made if p not in whole and modified(p) < abandoned)]:
        with suppress(FileNotFoundError), locked(old) as unused:  # another run may remove it right now
            if unused:
                shutil.rmtree(old, ignore_errors=True)
