"""Vectors of texts as arrays: cut, normalized, compared, written for a JSON answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

Vectors = np.ndarray[Any, np.dtype[np.float32]]


def joined(parts: Sequence[bytes], size: int) -> Vectors:
    """The rows [texts, size] of ``parts``, float32 row by row."""
    return np.frombuffer(b"".join(parts), np.float32).reshape(-1, size)


def normalized(vectors: Vectors) -> Vectors:
    """Rows of length 1; a row of zeros stays."""
    exact = vectors.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return (exact / np.where(lengths, lengths, 1.0)).astype(np.float32)


def finished(vectors: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """The first ``dimensions`` of each row, of length 1 again with ``normalize``."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    return normalized(cut) if normalize else cut


def encoded(vector: Vectors, as_base64: bool) -> str | list[float]:
    """A vector in an answer: little-endian float32 in base64, or numbers."""
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()  # type: ignore[no-any-return]


def cosines(first: Vectors, second: Vectors) -> list[float]:
    """The cosine of each row of ``first`` and the same row of ``second``, in [-1, 1]; a single row meets every row."""
    a, b = normalized(first).astype(np.float64), normalized(second).astype(np.float64)
    return np.clip((a * b).sum(1), -1.0, 1.0).tolist()  # type: ignore[no-any-return]
