"""Offload store: where KV goes when the pool is full, and comes back from without prefill.

A fixed number of equal *slots*, one KV block each, in host memory or in one file. The scheduler decides which block
goes to which slot (``SlotTable``); the engine moves the bytes (``SlotStore``).

The file has no name: it is unlinked as soon as it is open. So nobody else can open it, and it is gone when the process
is, however that ends. Its space is reserved at the start, not when the disk is full. A slot's sha256 stays in memory
and is checked on the way back: what a disk corrupts is computed again, never attended to.
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
from optkit.runtime.kv.prefix_cache import Node


class SlotTable:
    """Which node's KV is in which slot. When all are taken, the one not used for longest is given away."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # oldest first
        self._free = list(range(num_slots))

    def __len__(self) -> int:
        return len(self._nodes)

    def take(self, node: Node) -> Node | None:
        """Give ``node`` a slot; returns the node that lost its own for it, if one did."""
        loser = None
        if not self._free:
            loser = next(iter(self._nodes.values()))
            self.release(loser)
        node.slot = self._free.pop()
        self._nodes[node.slot] = node
        return loser

    def touch(self, node: Node) -> None:
        """``node`` has just been asked for."""
        assert node.slot is not None
        self._nodes.move_to_end(node.slot)

    def release(self, node: Node) -> None:
        """Forget what is in the node's slot."""
        assert node.slot is not None and self._nodes[node.slot] is node
        del self._nodes[node.slot]
        self._free.append(node.slot)
        node.slot = None

    def owner(self, slot: int) -> Node | None:
        return self._nodes.get(slot)

    def check(self) -> None:
        """Raise AssertionError if a slot is lost or owned twice."""
        assert sorted([*self._nodes, *self._free]) == list(range(self.num_slots))
        assert all(node.slot == slot for slot, node in self._nodes.items())


class SlotStore(Protocol):
    """The bytes of the slots. ``OSError`` or ``CorruptSlot`` concern one slot, never the engine."""

    def write(self, slot: int, data: np.ndarray) -> None: ...

    def read(self, slot: int) -> np.ndarray: ...


class CorruptSlot(Exception):
    """A slot does not hold what was written."""


class MemorySlots:
    """Slots in host memory. The pages cost nothing before they are first written."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self._slots = np.empty((num_slots, slot_bytes), dtype=np.uint8)

    def write(self, slot: int, data: np.ndarray) -> None:
        self._slots[slot] = data

    def read(self, slot: int) -> np.ndarray:
        return self._slots[slot]


class FileSlots:
    """Slots in a file without a name, in ``directory``.

    Raises:
        UserError: the directory cannot be written, or has no room.
    """

    def __init__(self, num_slots: int, slot_bytes: int, directory: Path) -> None:
        self._slot_bytes = slot_bytes
        self._hashes: dict[int, bytes] = {}
        try:
            self._file, name = tempfile.mkstemp(prefix="optkit-kv-", dir=directory)  # mode 0600
            os.unlink(name)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, num_slots * slot_bytes)
        except OSError as error:
            raise UserError(
                f"{num_slots * slot_bytes:,} bytes cannot be reserved there: {error.strerror}",
                where=str(directory),
                fix="name a writable directory with --kv-offload-dir, or fewer --kv-offload-bytes",
            ) from error

    def write(self, slot: int, data: np.ndarray) -> None:
        view = data.data.cast("B")
        self._hashes.pop(slot, None)
        if os.pwrite(self._file, view, slot * self._slot_bytes) != self._slot_bytes:
            raise CorruptSlot("a short write")
        self._hashes[slot] = hashlib.sha256(view).digest()

    def read(self, slot: int) -> np.ndarray:
        data = os.pread(self._file, self._slot_bytes, slot * self._slot_bytes)
        if hashlib.sha256(data).digest() != self._hashes.get(slot):
            raise CorruptSlot("the content has changed")
        return np.frombuffer(data, dtype=np.uint8)

    def close(self) -> None:
        os.close(self._file)


def open_store(num_bytes: int, slot_bytes: int, directory: Path | None) -> tuple[int, SlotStore]:
    """Number of slots that fit ``num_bytes``, and the store of them.

    Raises:
        UserError: not even one block fits, or the directory cannot take them.
    """
    num_slots = num_bytes // slot_bytes
    if num_slots < 1:
        raise UserError(
            f"{num_bytes:,} bytes do not hold one block of KV ({slot_bytes:,} bytes)",
            where="kv_offload_bytes",
            fix="raise --kv-offload-bytes",
        )
    if directory is None:
        return num_slots, MemorySlots(num_slots, slot_bytes)
    return num_slots, FileSlots(num_slots, slot_bytes, directory)
