"""Files of saved models in the private cache: written after a model was lowered, read at the next start.

A file holds for one artifact, user and machine; native library, instruction set and sources of optkit are part of the
name, too. The header carries the user's seal (``optkit.machine.seals``), since calls hold offsets that become
addresses; the seal covers the hash of the rest, so a damaged weight is found, too::

    MAGIC, seal, length of the header, header (JSON), calls and arguments of each list, packed weights

Weights lie in the order of their use, each on a cache line, and are read into memory in large pages.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from optkit.graph.states import KVSpec, RecurrentSpec
from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import ALIGN, ARGUMENT, CallList, CallPlan
from optkit.kernels.cpu.large_pages import new_chunk
from optkit.lowering.native_model import NativeModel, NativeVariant
from optkit.machine.locks import Locks, modified
from optkit.machine.paths import cache_dir
from optkit.machine.seals import is_sealed, seal
from optkit.version import VERSION

logger = logging.getLogger(__name__)

MAGIC = b"optkit saved model 2\n"
FOLDER = "saved"
MOST_BYTES = 2 << 30  # of a file: a larger model takes long to read, with torch or without
MOST_IN_ALL = 4 << 30  # of all files; those unused for longest go
MAX_HEADER = 64 << 20
WRITING = ".tmp-"  # files that are being written begin with this
ABANDONED_SECONDS = 86400.0
PIECE = 8 << 20  # bytes that are read and hashed at once
ARGUMENTS = np.dtype(
    [("source", "i4"), ("index", "i4"), ("value", "i8"), ("offset", "i8"), ("stride", "i8")]
)  # ``ARGUMENT`` of call_list
SOURCES = ("optkit", "optkit.kernels")  # packages, which need not share a folder
assert ARGUMENTS.itemsize == ARGUMENT.size


class Calls(msgspec.Struct, frozen=True):
    """A list of calls in the file (``NativeVariant``). Places are bytes from the start of the body.

    Attributes:
        calls, arguments: place and bytes.
        constants: number of the argument, place and bytes of each tensor.
    """

    limit: int | None
    inputs: tuple[str, ...]
    width: int
    plan: CallPlan
    calls: tuple[int, int]
    arguments: tuple[int, int]
    constants: tuple[tuple[int, int, int], ...]


class Header(msgspec.Struct, frozen=True):
    """The header of a file.

    Attributes:
        key: ``key_of`` the artifact.
        hidden: the lists without the output head, for embeddings; empty where they can't be had.
        takes_trees: steps may have trees of guesses.
        body_bytes, digest: size and sha256 of all behind the header.
    """

    key: str
    kv: tuple[KVSpec, ...]
    recurrent: tuple[RecurrentSpec, ...]
    vocab_size: int
    max_model_len: int
    keeps_all: str
    variants: tuple[Calls, ...]
    hidden: tuple[Calls, ...]
    takes_trees: bool
    weight_bytes: int
    body_bytes: int
    digest: str


@dataclass(frozen=True)
class Saved:
    """A file that was read.

    Attributes:
        hidden: the model without the output head, over the same weights.
        takes_trees: steps of ``model`` may have trees of guesses.
    """

    model: NativeModel
    hidden: NativeModel | None
    takes_trees: bool


def key_of(content: str) -> str:
    """The name of the saved model of an artifact with the digest ``content`` for this user and machine, in hex."""
    facts = [content, VERSION, native.isa(), native.library_digest(), sources_digest(), seal("saved model")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:40]


@cache
def sources_digest() -> str:
    """A hash of names, sizes and times of optkit's sources: another one after a change."""
    found = []
    for package in SOURCES:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in Path(folder).rglob("*.py"):
                facts = file.stat()
                found.append(f"{package} {file.name} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


@contextmanager
def one_writer(key: str) -> Iterator[bool]:
    """Hold the lock of ``key``; False where another process writes the file."""
    locks = Locks(cache_dir(FOLDER))
    try:
        yield locks.take(key)
    finally:
        locks.close()


def file_of(key: str) -> Path:
    """The file with ``key``, which may not exist."""
    return cache_dir(FOLDER) / f"{key}.bin"


def exists(key: str) -> bool:
    """True where a model was saved with ``key``."""
    return file_of(key).is_file()


def read(key: str) -> Saved | None:
    """The saved model with ``key``; None where there is none, or none that can be read.

    A damaged file is removed, with a line in the log.
    """
    file = file_of(key)
    try:
        with file.open("rb") as stream:
            found = read_stream(stream, key)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s is not used: %s", file, error)
        return None
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("%s is not used and removed: %s", file, error)
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # a cache that is read only, or the file was removed meanwhile
        os.utime(file)  # used now
    return found


def read_stream(stream: BinaryIO, key: str) -> Saved:
    """The saved model of an open file.

    Raises:
        ValueError, msgspec.MsgspecError: the file is damaged, or not sealed by this user.
    """
    if stream.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is no saved model")
    found = stream.read(64).decode("ascii", "replace")
    size = int.from_bytes(stream.read(8), "little")
    if size > MAX_HEADER:
        raise ValueError("its header is too large")
    text = stream.read(size)
    if not is_sealed(hashlib.sha256(text).hexdigest(), found):
        raise ValueError("it is damaged, or was not written by this user on this machine")
    header = msgspec.json.decode(text, type=Header)
    if header.key != key:
        raise ValueError("it belongs to another artifact")
    body = new_chunk(header.body_bytes)[: header.body_bytes]
    if read_body(stream, body) != header.digest:
        raise ValueError("it is damaged")
    model = model_of(header, header.variants, body)
    hidden = model_of(header, header.hidden, body) if header.hidden else None
    return Saved(model, hidden, header.takes_trees)


def model_of(header: Header, lists: Sequence[Calls], body: np.ndarray) -> NativeModel:
    """The model of ``lists`` over the weights in ``body``."""
    return NativeModel(
        variants_of(lists, body),
        (*header.kv, *header.recurrent),
        header.vocab_size,
        header.max_model_len,
        body,
        header.weight_bytes,
        header.keeps_all,
    )


def read_body(stream: BinaryIO, body: np.ndarray) -> str:
    """Fill ``body`` from ``stream``, and hash it beside the reading; the sha256.

    Raises:
        ValueError: the file is shorter.
    """
    digest, view = hashlib.sha256(), body.data
    with ThreadPoolExecutor(1) as hashing:
        done: list[Future[None]] = []
        for start in range(0, len(body), PIECE):
            piece = view[start : start + PIECE]
            if stream.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise ValueError("it is shorter than its header says")
            done.append(hashing.submit(digest.update, piece))
        for each in done:
            each.result()
    return digest.hexdigest()


def variants_of(lists: Sequence[Calls], body: np.ndarray) -> list[NativeVariant]:
    """The variants of ``lists`` over the weights in ``body``.

    Raises:
        ValueError: a place is outside of the file.
    """
    base, size, made = body.ctypes.data, len(body), list[NativeVariant]()
    for each in lists:
        if len(each.inputs) != each.plan.num_inputs or each.plan.num_outputs != 1:
            raise ValueError("a list of calls has other inputs than it names")
        calls, arguments = (part(body, *place) for place in (each.calls, each.arguments))
        table = np.frombuffer(arguments, ARGUMENTS).copy()
        for number, at, num_bytes in each.constants:
            if not (0 <= at <= at + num_bytes <= size and at % ALIGN == 0 and 0 <= number < len(table)):
                raise ValueError("a weight lies outside of it")
            table["value"][number] = base + at
        made.append(
            NativeVariant(each.limit, each.inputs, CallList(each.plan, calls, table.tobytes()), each.width)
        )
    return made


def part(body: np.ndarray, at: int, size: int) -> bytes:
    """``size`` bytes of ``body`` from ``at`` on.

    Raises:
        ValueError: they are not inside.
    """
    if not 0 <= at <= at + size <= len(body):
        raise ValueError("a list of calls lies outside of it")
    return body[at : at + size].tobytes()


def write(header: Mapping[str, Any], body: Sequence[memoryview | bytes], key: str) -> None:
    """Write a saved model: ``header`` without key, size and digest, and the parts of the body in order.

    The file appears whole; files beyond ``MOST_IN_ALL`` bytes are removed, those unused for longest first.

    Raises:
        OSError: the disk is full, say; nothing is left behind.
    """
    file, digest = file_of(key), hashlib.sha256()
    for each in body:
        digest.update(each)
    size = sum(len(each) for each in body)
    text = msgspec.json.encode(Header(**header, key=key, body_bytes=size, digest=digest.hexdigest()))
    descriptor, name = tempfile.mkstemp(prefix=WRITING, dir=file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(MAGIC + seal(hashlib.sha256(text).hexdigest()).encode())
            stream.write(len(text).to_bytes(8, "little") + text)
            for each in body:
                stream.write(each)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    remove_oldest(file.parent, MOST_IN_ALL)


def remove_oldest(folder: Path, most: int) -> None:
    """Remove files of ``folder``, those unused for longest first, until the rest has at most ``most`` bytes.

    Files that were being written a day ago are removed, too.
    """
    files = sorted((modified(file), size_of(file), file) for file in folder.glob("*.bin"))
    total = sum(size for _, size, _ in files)
    for _, size, file in files[:-1]:
        if total > most:
            file.unlink(missing_ok=True)
            total -= size
    for file in folder.glob(f"{WRITING}*"):
        if 0 < modified(file) < time.time() - ABANDONED_SECONDS:
            file.unlink(missing_ok=True)


def size_of(file: Path) -> int:
    """Bytes of ``file``; 0 if another process has removed it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
