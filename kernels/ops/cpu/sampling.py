"""Sampling by optkit's native kernel (sampling.cpp): a token for each row of logits, all rows in a call.

The choice is the choice of ``reference.sample``. Rows may lie anywhere in memory, because the sampler of the runtime
first changes copies of the logits of some requests (penalties, bias).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from optkit.kernels.cpu import native

BAD_LOGITS, BAD_PARAMETERS = -1, -2  # of sampling.h
ROW = struct.Struct("=fiffdqq")  # SampledRow of sampling.h


def row(
    logits: np.ndarray,
    width: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    allowed: np.ndarray | None = None,
) -> bytes:
    """A row of ``logits`` [width] float32 with its parameters, for ``choose``; the caller keeps the arrays alive.

    Args:
        allowed: the tokens to choose from, a bit each, [ceil(width / 32)] uint32; None allows all.

    Raises:
        ValueError: ``logits`` are not a dense float32 array of ``width`` numbers, or ``allowed`` has another shape or
            type.
        struct.error, OverflowError: a parameter is beyond the range of the C type.
    """
    fits = is_dense(logits, np.float32, width)
    native.require(fits, f"logits must be a dense array of float32 [{width}]")
    mask = 0
    if allowed is not None:
        fits = is_dense(allowed, np.uint32, -(-width // 32))
        native.require(fits, "allowed must have a bit for each token")
        mask = allowed.ctypes.data
    return ROW.pack(temperature, top_k, top_p, min_p, uniform, logits.ctypes.data, mask)


def is_dense(array: np.ndarray, dtype: type[np.generic], length: int) -> bool:
    """True for an array [length] of ``dtype`` in the byte order of the CPU, without gaps."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (length,):
        return False
    return array.flags.c_contiguous and array.flags.aligned


def choose(rows: Sequence[bytes], width: int) -> list[int]:
    """The token of each of ``rows``, which have ``width`` logits.

    ``BAD_LOGITS`` stands for a row with a NaN or without a finite largest logit among the allowed tokens,
    ``BAD_PARAMETERS`` for parameters that leave no distribution.
    """
    tokens = (ctypes.c_int64 * len(rows))()
    native.library().optkit_sample(
        b"".join(rows), len(rows), width, ctypes.addressof(tokens), native.threads()
    )
    return list(tokens)


def likeliest(logits: np.ndarray, rows: Sequence[int], most: int) -> np.ndarray:
    """The ``most`` likeliest tokens of ``rows`` of ``logits`` [L, V] float32, the likeliest first, ties by number.

    Returns:
        [n, most] int64; -1 fills the rest of a row with fewer logits above -infinity. A row with NaN may lack tokens.

    Raises:
        ValueError: ``logits`` are not a dense table of float32, or a row does not exist.
    """
    flags = logits.flags
    fits = logits.ndim == 2 and logits.dtype == np.float32 and flags.c_contiguous and flags.aligned
    native.require(fits, "logits must be a dense table of float32")
    native.require(most > 0, "there must be tokens to find")
    inside = not rows or (min(rows) >= 0 and max(rows) < len(logits))
    native.require(inside, f"rows must be of the {len(logits)} of the logits")
    tokens, index = np.empty((len(rows), most), np.int64), np.array(rows, np.int64)
    address = tokens.ctypes.data
    width = logits.shape[1]
    native.library().optkit_likeliest(
        logits.ctypes.data, index.ctypes.data, len(rows), width, most, address, native.threads()
    )
    return tokens
