"""Several decode steps in a native call (decode_steps.cpp), with the tokens of each step sent at once.

Between two steps of a few milliseconds, Python takes a tenth of the time. Where nothing but new tokens changes from
step to step, ``decode`` runs the program of a step, chooses a token for each sequence, and writes the inputs of the
next step. The tokens are the tokens of single steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optkit.kernels.cpu import native, sampling
from optkit.kernels.cpu.call_list import BLOCK_SIZE, SEQUENCES, TABLE_WIDTH, CallList

MOST_WATCHED = 8  # of decode_steps.cpp
TOKEN_BYTES = 4  # of a token in a frame
PAIR_BITS = 18  # of decode_steps.h


class Steps(ctypes.Structure):
    """``DecodeSteps`` of decode_steps.h."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("stop_ends", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("pair_ends", ctypes.c_void_p),
        ("input_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("frame", ctypes.c_void_p),
        ("frame_bytes", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("watched", ctypes.c_void_p),
        ("num_watched", ctypes.c_int32),
        ("sink", ctypes.c_int32),
    )


class TokenPairs:
    """A set of pairs of tokens, as 2**18 bits: after n were added, it also holds some n / 2**18 of the other pairs."""

    def __init__(self) -> None:
        self.bits = bytearray(1 << (PAIR_BITS - 3))

    def add_all(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Add ``pairs``."""
        for pair in pairs:
            bit = pair_bit(*pair)
            self.bits[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, pair: tuple[int, int]) -> bool:
        bit = pair_bit(*pair)
        return bool(self.bits[bit >> 3] >> (bit & 7) & 1)


def pair_bit(first: int, second: int) -> int:
    """The bit of a pair of tokens, as ``pair_bit`` of decode_steps.h."""
    return ((first * 0x9E3779B97F4A7C15 + second * 0xC2B2AE3D27D4EB4F) & (1 << 64) - 1) >> (64 - PAIR_BITS)


@dataclass(frozen=True)
class Choice:
    """The choice of tokens from logits.

    Attributes:
        parameters: temperature, top_k, top_p and min_p of each of the S sequences.
        uniforms: a number in [0, 1) for each token of the steps, [steps, S] float64.
        stops: the tokens of each sequence after which nothing follows.
        pairs: sets of pairs of tokens of each sequence; the steps end where its last two tokens are in one. Empty
            stands for none of any sequence.
    """

    parameters: Sequence[tuple[float, int, float, float]]
    uniforms: np.ndarray
    stops: Sequence[Sequence[int]]
    pairs: Sequence[Sequence[TokenPairs]] = ()

    def rows(self, logits: np.ndarray, uniforms: Sequence[float]) -> list[bytes]:
        """The rows of ``logits`` [S, V] float32 for ``sampling.choose``, with a number in [0, 1) for each."""
        each = zip(logits, self.parameters, uniforms, strict=True)
        return [sampling.row(row, logits.shape[1], *its, uniform) for row, its, uniform in each]


@dataclass(frozen=True)
class Outlet:
    """The socket for the tokens of a step, at once.

    Attributes:
        watched: descriptors; the steps end when there is something to read.
        sink: a socket for the tokens of each step but the last; -1 sends nothing.
        frame: the bytes to send, with room for the number of each token, four bytes, the highest first.
        places: the place of each sequence's token in ``frame``.
    """

    watched: Sequence[int] = ()
    sink: int = -1
    frame: bytes = b""
    places: Sequence[int] = ()

    def filled(self, tokens: Sequence[int]) -> bytes:
        """The frame with the token of each sequence."""
        frame = bytearray(self.frame)
        for place, token in zip(self.places, tokens, strict=True):
            frame[place : place + TOKEN_BYTES] = token.to_bytes(TOKEN_BYTES, "big")
        return bytes(frame)


def decode(
    calls: CallList,
    sizes: Sequence[int],
    logits: np.ndarray,
    batch: Mapping[str, np.ndarray],
    tables: Sequence[tuple[str, str]],
    choice: Choice,
    outlet: Outlet,
) -> np.ndarray:
    """Run decode steps of ``calls``; the tokens of the steps, [n, S] int64.

    The steps end after the last of ``choice``, after a step with a token of ``choice.stops`` or a pair of
    ``choice.pairs``, and when a descriptor of ``outlet`` can be read. A failed step is not among the ``n``.

    Args:
        calls: the program of a step, with the addresses of all inputs and of ``logits``.
        sizes: of the batch, as for ``CallList.run``.
        logits: [S, V] float32, which ``calls`` write.
        batch: the inputs of the first step, which are changed: ``input_ids``, ``positions``, ``seq_lens`` and
            ``tables``; dense as ``logits``, and of the types in ``calls``.
        tables: the names of slot mapping and block tables of each group of layers. The tables have blocks for all
            tokens of all steps.

    Raises:
        ValueError: native code would read or write beyond an array.
    """
    count, width, block_size = sizes[SEQUENCES], sizes[TABLE_WIDTH], sizes[BLOCK_SIZE]
    steps = len(choice.uniforms)
    check(logits, batch, tables, choice, outlet, (steps, count, width, block_size))
    vocabulary = logits.shape[1]
    rows = np.frombuffer(bytearray().join(choice.rows(logits, [0.0] * count)), np.uint8)
    frame = np.frombuffer(bytearray(outlet.frame), np.uint8)
    stops = np.array([token for each in choice.stops for token in each], np.int64)
    stop_ends = np.cumsum([len(each) for each in choice.stops], dtype=np.int64)
    sets = [np.frombuffer(pairs.bits, np.uint8) for each in choice.pairs for pairs in each]
    pairs = np.array([each.ctypes.data for each in sets], np.int64)
    pair_ends = np.cumsum([len(each) for each in choice.pairs or [()] * count], dtype=np.int64)
    uniforms = np.ascontiguousarray(choice.uniforms, np.float64)
    slots = np.array([batch[slot].ctypes.data for slot, _ in tables], np.int64)
    blocks = np.array([batch[table].ctypes.data for _, table in tables], np.int64)
    places = np.array(outlet.places, np.int64)
    watched = np.array(outlet.watched, np.int32)
    tokens = np.empty((steps, count), np.int64)
    found = calls.decode(
        sizes,
        Steps(
            count=count,
            vocabulary=vocabulary,
            most=steps,
            rows=rows.ctypes.data,
            uniforms=uniforms.ctypes.data,
            stops=stops.ctypes.data,
            stop_ends=stop_ends.ctypes.data,
            pairs=pairs.ctypes.data,
            pair_ends=pair_ends.ctypes.data,
            input_ids=batch["input_ids"].ctypes.data,
            positions=batch["positions"].ctypes.data,
            seq_lens=batch["seq_lens"].ctypes.data,
            slots=slots.ctypes.data,
            tables=blocks.ctypes.data,
            num_groups=len(tables),
            width=width,
            block_size=block_size,
            tokens=tokens.ctypes.data,
            frame=frame.ctypes.data,
            frame_bytes=frame.size,
            places=places.ctypes.data,
            watched=watched.ctypes.data,
            num_watched=len(watched),
            sink=outlet.sink,
        ),
    )
    return tokens[:found]


def check(
    logits: np.ndarray,
    batch: Mapping[str, np.ndarray],
    tables: Sequence[tuple[str, str]],
    choice: Choice,
    outlet: Outlet,
    sizes: tuple[int, int, int, int],
) -> None:
    """Compare shapes with ``sizes``: steps, sequences, blocks of a table's row, tokens of a block.

    Raises:
        ValueError: as ``decode``.
    """
    steps, count, width, block_size = sizes
    native.require(steps > 0 and count > 0, "there must be steps and sequences")
    native.require(choice.uniforms.shape == (steps, count), f"uniforms must be [{steps}, {count}]")
    same = len(choice.parameters) == len(choice.stops) == logits.shape[0] == count
    native.require(same, f"logits, parameters and stops must be of {count} sequences")
    native.require(len(choice.pairs) in (0, count), f"pairs must be of {count} sequences")
    for name in ("input_ids", "positions", "seq_lens", *(slot for slot, _ in tables)):
        native.require(batch[name].shape == (count,), f"{name} must be [{count}]")
    for _, name in tables:
        native.require(batch[name].shape == (count, width), f"{name} must be [{count}, {width}]")
    last = int(batch["seq_lens"].max()) + steps - 1
    native.require(last <= width * block_size, f"{last} tokens need more than {width} blocks of {block_size}")
    native.require(len(outlet.watched) <= MOST_WATCHED, f"at most {MOST_WATCHED} descriptors can be watched")
    if outlet.sink >= 0:
        inside = all(0 <= place <= len(outlet.frame) - TOKEN_BYTES for place in outlet.places)
        native.require(
            inside and len(outlet.places) == count, f"the frame must have {count} places for tokens"
        )
