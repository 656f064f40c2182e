"""Offload store: host memory for KV beyond the pool's room, loaded again without prefill.

The store has a fixed number of equal *host blocks*, one KV block each, in memory or in a file. The scheduler decides
the host block of each KV block (``HostBlockTable``); the engine moves the bytes (``HostBlockStore``).

The file has no name: the file is unlinked as soon as it is open. So no second process can open the file, and the file
ends with the process. The space is reserved at the start, not when the disk is full. The sha256 of a host block stays
in memory and is checked when the block is read; a corrupted block is computed again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import numpy as np

from optkit.errors import UserError
from optkit.runtime.kv.prefix_cache import NodeKV


class HostBlockTable:
    """The content of each host block. When all are taken, the least recently used host block is given away."""

    def __init__(self, num_host_blocks: int) -> None:
        self.num_host_blocks = num_host_blocks
        self._content: OrderedDict[int, NodeKV] = OrderedDict()  # oldest first
        self._free = list(range(num_host_blocks))

    def __len__(self) -> int:
        return len(self._content)

    def take(self, kv: NodeKV) -> NodeKV | None:
        """Give ``kv`` a host block; returns the KV that lost its host block, or None."""
        loser = None
        if not self._free:
            loser = next(iter(self._content.values()))
            self.release(loser)
        kv.host_block = self._free.pop()
        self._content[kv.host_block] = kv
        return loser

    def touch(self, kv: NodeKV) -> None:
        """Mark the host block of ``kv`` as the most recently used."""
        assert kv.host_block is not None
        self._content.move_to_end(kv.host_block)

    def release(self, kv: NodeKV) -> None:
        """Forget the content of the host block of ``kv``."""
        assert kv.host_block is not None and self._content[kv.host_block] is kv
        del self._content[kv.host_block]
        self._free.append(kv.host_block)
        kv.host_block = None

    def owner(self, host_block: int) -> NodeKV | None:
        return self._content.get(host_block)

    def check(self) -> None:
        """Raise AssertionError if a host block is lost or owned twice."""
        assert sorted([*self._content, *self._free]) == list(range(self.num_host_blocks))
        assert all(kv.host_block == host_block for host_block, kv in self._content.items())


class HostBlockStore(Protocol):
    """The bytes of the host blocks. ``OSError`` or ``CorruptBlock`` concern a host block, never the engine."""

    def write(self, host_block: int, data: np.ndarray) -> None: ...

    def read(self, host_block: int) -> np.ndarray: ...


class CorruptBlock(Exception):
    """The content of a host block differs from the written bytes."""


class MemoryBlocks:
    """Host blocks in memory. The pages cost nothing before the first write."""

    def __init__(self, num_host_blocks: int, block_bytes: int) -> None:
        self._blocks = np.empty((num_host_blocks, block_bytes), dtype=np.uint8)

    def write(self, host_block: int, data: np.ndarray) -> None:
        self._blocks[host_block] = data

    def read(self, host_block: int) -> np.ndarray:
        return self._blocks[host_block]


class FileBlocks:
    """Host blocks in a file without a name, in ``directory``.

    Raises:
        UserError: the directory cannot be written, or has no room.
    """

    def __init__(self, num_host_blocks: int, block_bytes: int, directory: Path) -> None:
        self._block_bytes = block_bytes
        self._hashes: dict[int, bytes] = {}
        try:
            self._file, name = tempfile.mkstemp(prefix="optkit-kv-", dir=directory)  # mode 0600
            os.unlink(name)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, num_host_blocks * block_bytes)
        except OSError as error:
            raise UserError(
                f"{num_host_blocks * block_bytes:,} bytes cannot be reserved there: {error.strerror}",
                where=str(directory),
                fix="name a writable directory with --kv-offload-dir, or fewer --kv-offload-bytes",
            ) from error

    def write(self, host_block: int, data: np.ndarray) -> None:
        view = data.data.cast("B")
        self._hashes.pop(host_block, None)
        if os.pwrite(self._file, view, host_block * self._block_bytes) != self._block_bytes:
            raise CorruptBlock("a short write")
        self._hashes[host_block] = hashlib.sha256(view).digest()

    def read(self, host_block: int) -> np.ndarray:
        data = os.pread(self._file, self._block_bytes, host_block * self._block_bytes)
        if hashlib.sha256(data).digest() != self._hashes.get(host_block):
            raise CorruptBlock("the content has changed")
        return np.frombuffer(data, dtype=np.uint8)

    def close(self) -> None:
        os.close(self._file)


def open_store(num_bytes: int, block_bytes: int, directory: Path | None) -> tuple[int, HostBlockStore]:
    """Number of host blocks that fit ``num_bytes``, and the store.

    Raises:
        UserError: no block fits, or the directory cannot take them.
    """
    num_host_blocks = num_bytes // block_bytes
    if num_host_blocks < 1:
        raise UserError(
            f"{num_bytes:,} bytes do not hold one block of KV ({block_bytes:,} bytes)",
            where="kv_offload_bytes",
            fix="raise --kv-offload-bytes",
        )
    if directory is None:
        return num_host_blocks, MemoryBlocks(num_host_blocks, block_bytes)
    return num_host_blocks, FileBlocks(num_host_blocks, block_bytes, directory)
