"""Sampling by optkit's native kernel (sampling.cpp): a token for each row of logits, all rows in a call.

The choice is the choice of ``reference.sample``. Rows may lie anywhere in memory, because the sampler of the runtime
first changes copies of the logits of some requests (penalties, bias).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from optkit.kernels.cpu import native

BAD_LOGITS, BAD_PARAMETERS = -1, -2  # of sampling.h
ROW = struct.Struct("=fiffdqq")  # SampledRow of sampling.h


def row(
    logits: Tensor,
    width: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    allowed: np.ndarray | None = None,
) -> bytes:
    """A row of ``logits`` [width] with its parameters, for ``choose``; the caller keeps the arrays alive.

    Args:
        allowed: the tokens to choose from, a bit each, [ceil(width / 32)] uint32; None allows all.

    Raises:
        ValueError: ``logits`` are not a dense float32 vector of ``width`` numbers in memory of the CPU, or ``allowed``
            has another shape or type.
        struct.error, OverflowError: a parameter is beyond the range of the C type.
    """
    native.require_vector(logits, width, torch.float32, "logits")
    native.require(logits.device.type == "cpu", "logits must be on the CPU")
    mask = 0
    if allowed is not None:
        dense = allowed.flags.c_contiguous and allowed.dtype == np.uint32
        native.require(
            dense and allowed.shape == (-(-width // 32),), "allowed must have a bit for each token"
        )
        mask = allowed.ctypes.data
    return ROW.pack(temperature, top_k, top_p, min_p, uniform, logits.data_ptr(), mask)


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
