"""Write a safetensors file tensor by tensor: memory holds one tensor at a time.

The bytes are those of ``safetensors.torch.save_file``: tensors in the order of falling alignment and rising names, a
header of JSON without spaces, filled with blanks to a multiple of 8 bytes. That function collects all tensors as bytes
before it writes, so a file of 4 GB takes 8 GB of memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.graph.stored import StoredTensor
from optkit.machine.mapped_files import PageRelease

# The name of each dtype in the format, in the order of the writer of the safetensors library: first dtypes first.
NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ORDER = list(NAMES)


def save_tensors(
    tensors: Mapping[str, Tensor | StoredTensor],
    file: Path,
    metadata: Mapping[str, str] | None = None,
    release: Callable[[int], None] | None = None,
) -> None:
    """Write ``tensors`` to ``file`` and read each stored tensor when its turn comes.

    ``release`` takes the bytes of each written tensor, and may free mapped pages.
    """
    names = sorted(tensors, key=lambda name: (ORDER.index(tensors[name].dtype), name.encode()))
    with file.open("wb") as stream:
        stream.write(header(names, tensors, metadata))
        for name in names:
            stream.write(as_bytes(tensors[name]))
            if release is not None:
                release(tensors[name].nbytes)


def header(
    names: list[str], tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, str] | None
) -> bytes:
    """Length and JSON of the header for tensors that follow in the order of ``names``."""
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    begin = 0
    for name in names:
        shape, dtype = list(tensors[name].shape), tensors[name].dtype
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def as_bytes(tensor: Tensor | StoredTensor) -> memoryview:
    """The bytes of a tensor on the CPU; those of a contiguous tensor are not copied."""
    value = tensor.read() if isinstance(tensor, StoredTensor) else tensor
    flat = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


class Spill:
    """Moves large tensors to files without a name below ``directory``; their pages are mapped on reading.

    The space on disk is free again when the tensor is. ``release`` takes the bytes of a mapped tensor that was read,
    and may free the mapped pages of earlier reads.
    """

    def __init__(self, directory: Path, least: int = 1 << 20) -> None:
        self.directory, self.least, self.release = directory, least, PageRelease(directory)

    def __call__(self, tensor: Tensor) -> Tensor:
        """``tensor`` on disk; tensors below ``least`` bytes, and shapes without values, stay as they are."""
        if tensor.device.type != "cpu" or tensor.nbytes < self.least:
            return tensor
        file = self.directory / f".spill-{os.getpid()}-{os.urandom(6).hex()}.safetensors"
        try:
            with file.open("xb") as stream:
                stream.write(as_bytes(tensor))
            mapped = torch.from_file(str(file), shared=False, size=tensor.numel(), dtype=tensor.dtype)
        finally:
            file.unlink(missing_ok=True)
        return mapped.view(tensor.shape)
