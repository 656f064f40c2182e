"""Raw times of each request as seen by the client: the metrics of every tool can be computed afterwards.

All times are seconds of a monotonic clock (``time.perf_counter``) in a single process; only differences have a
meaning. A record keeps every chunk of the stream, because tools disagree about the chunk with the "first token" (see
``optkit.bench.metrics``). Metrics are functions of records, never the reverse.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

clock = time.perf_counter


@dataclass(frozen=True)
class Chunk:
    """One SSE event with a choice. ``tokens``: new tokens in the event; 1 if the server sends no count."""

    time: float
    tokens: int
    empty: bool = False  # without text: a role-only chunk, the last chunk, or a part of a character


@dataclass
class RequestRecord:
    """A request from send to the end of the stream. ``None`` means "did not happen"."""

    index: int
    send: float
    scheduled: float | None = None  # the workload's arrival; send - scheduled is the wait for a free client
    headers: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    done: float | None = None
    prompt_tokens: int | None = None  # from the server's usage
    output_tokens: int | None = None  # from the server's usage, else the sum over chunks
    cached_tokens: int = 0  # prompt tokens found in a prefix cache
    error: str | None = None
    ttft_details: dict[str, Any] | None = None  # the server's parts of the time to first token, in seconds

    @property
    def ok(self) -> bool:
        return self.error is None and self.done is not None and self.first_token is not None

    @property
    def first_chunk(self) -> float | None:
        return self.chunks[0].time if self.chunks else None

    @property
    def first_token(self) -> float | None:
        """Time of the first chunk with text."""
        return next((chunk.time for chunk in self.chunks if not chunk.empty), None)

    @property
    def last_token(self) -> float | None:
        return next((chunk.time for chunk in reversed(self.chunks) if not chunk.empty), None)

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else the sum over chunks with text."""
        if self.output_tokens is not None:
            return self.output_tokens
        return sum(chunk.tokens for chunk in self.chunks if not chunk.empty)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RequestRecord:
        return cls(**{**data, "chunks": [Chunk(**chunk) for chunk in data["chunks"]]})


def span(records: Iterable[RequestRecord]) -> float:
    """Seconds from the first send to the last event of any request; 0 without requests."""
    records = list(records)
    times = [t for r in records for t in (r.send, r.done, r.chunks[-1].time if r.chunks else None)]
    return max(t for t in times if t is not None) - min(r.send for r in records) if records else 0.0
