"""Sampling by optkit's native kernel (sampling.cpp): a token for each row of logits, all rows in a call.

The choice is the choice of ``reference.sample``. Rows may lie anywhere in memory, because the sampler of the runtime
first changes copies of the logits of some requests (penalties, bias).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.kernels.cpu import native

BAD_LOGITS, BAD_PARAMETERS = -1, -2  # of sampling.h
ROW = struct.Struct("=fiffdq")  # SampledRow of sampling.h


def row(
    logits: Tensor, width: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> bytes:
    """A row of ``logits`` [width] with its parameters, for ``choose``; the caller keeps ``logits`` alive.

    Raises:
        ValueError: ``logits`` are not a dense float32 vector of ``width`` numbers in memory of the CPU.
        struct.error, OverflowError: a parameter is beyond the range of the C type.
    """
    native.require_vector(logits, width, torch.float32, "logits")
    native.require(logits.device.type == "cpu", "logits must be on the CPU")
    return ROW.pack(temperature, top_k, top_p, min_p, uniform, logits.data_ptr())


def choose(rows: Sequence[bytes], width: int) -> list[int]:
    """The token of each of ``rows``, which have ``width`` logits.

    ``BAD_LOGITS`` stands for a row with a NaN or without a finite largest logit, ``BAD_PARAMETERS`` for parameters
    that leave no distribution.
    """
    tokens = (ctypes.c_int64 * len(rows))()
    native.library().optkit_sample(
        b"".join(rows), len(rows), width, ctypes.addressof(tokens), native.threads()
    )
    return list(tokens)
