"""The header of a safetensors file, read and checked without touching a tensor.

Layout (https://huggingface.co/docs/safetensors): 8 bytes little endian ``N``, then ``N`` bytes of JSON, then the data.
The JSON maps each tensor to ``dtype``, ``shape`` and ``data_offsets`` [begin, end) into the data. Every number of an
untrusted file may be false, so all numbers are checked, with plain Python integers, which cannot overflow: sizes are
bounded before anything is allocated, every tensor's bytes must equal shape times dtype, and all tensors together must
cover the data exactly, without gap or overlap.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from optkit.errors import UserError
from optkit.untrusted_json import parse_json

FIX = "download or copy it again"
MAX_HEADER_BYTES = 25 * 1000**2
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 48

DTYPE_BITS = {
    **dict.fromkeys(["F64", "I64", "U64", "C64"], 64),
    **dict.fromkeys(["F32", "I32", "U32"], 32),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 16),
    **dict.fromkeys(["BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint.

    Attributes:
        file: the safetensors file of the tensor.
        dtype: the format's own name, such as ``"F32"``.
        shape: the dimensions; empty for a scalar.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of ``file`` by name.

    Raises:
        UserError: not a safetensors file, a truncated file, or a contradictory header.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            header, data_bytes = _read_json(stream, size, file)
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", where=str(file), fix="give a file that can be read"
        ) from error
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if len(entries) > MAX_TENSORS:
        raise UserError(
            f"{len(entries)} tensors; at most {MAX_TENSORS} are read",
            where=str(file),
            fix="merge small tensors",
        )
    spans = [_check_entry(name, entry, file) for name, entry in entries.items()]
    _check_cover(sorted(spans), data_bytes, file)
    return {name: TensorInfo(file, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def _read_json(stream: BinaryIO, size: int, file: Path) -> tuple[dict[str, Any], int]:
    """The header object and the number of data bytes after the header."""
    stream.seek(0)
    prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        what = f"not a safetensors file, or cut off (header of {length} bytes)"
        raise UserError(what, where=str(file), fix=f"a header has 2 to {MAX_HEADER_BYTES} bytes")
    if 8 + length > size:
        what = f"truncated: its header needs {8 + length} bytes, it has {size}"
        raise UserError(what, where=str(file), fix=FIX)
    header = parse_json(stream.read(length), str(file), "its header is", FIX)
    return header, size - 8 - length


def _check_entry(name: str, entry: Any, file: Path) -> tuple[int, int, str]:
    """Begin, end and name of a tensor's bytes, checked against dtype and shape."""
    where = f"{file}: tensor {name!r:.100}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise UserError("needs exactly dtype, shape and data_offsets", where=where, fix=FIX)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UserError(f"unknown dtype {dtype!r:.40}", where=where, fix=f"known: {', '.join(DTYPE_BITS)}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise UserError(f"bad shape {shape!r:.80}", where=where, fix=FIX)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"bad data_offsets {offsets!r:.80}", where=where, fix=FIX)
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS or elements * DTYPE_BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        what = f"shape {shape!r:.80} of {dtype} does not fill its {offsets[1] - offsets[0]} bytes"
        raise UserError(what, where=where, fix=FIX)
    return offsets[0], offsets[1], name


def _naturals(value: Any) -> bool:
    """A list of integers from 0 to 2^48."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_ELEMENTS for item in value)


def _check_cover(spans: list[tuple[int, int, str]], data_bytes: int, file: Path) -> None:
    """The tensors follow each other without gap or overlap and end where the file ends."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            problem = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise UserError(problem, where=f"{file}: tensor {name!r:.100}", fix=FIX)
        position = end
    if position > data_bytes:
        what = f"truncated: its tensors need {position} bytes, it has {data_bytes}"
        raise UserError(what, where=str(file), fix=FIX)
    if position < data_bytes:
        raise UserError(f"{data_bytes - position} bytes follow the last tensor", where=str(file), fix=FIX)
