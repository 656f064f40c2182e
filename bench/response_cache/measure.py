"""Hits of a server with a response cache: time, and bytes against fresh answers.

A fresh answer is computed alone, with ``cache: {"no-cache": true, "no-store": true}``; the kept answer was computed
beside seven more. Two values differ by computation and are not compared: ``created``, and ``cached_tokens``, the part
of the prompt found in the prefix cache. ``id`` follows from ``request_id``.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

COUNT = 100  # requests
CLIENTS = 8  # at once
TAG = "x-optkit-cache"
OWN = re.compile(rb'"(created|cached_tokens)":\d+')
FRESH = {"cache": {"no-cache": True, "no-store": True}}
TOPICS = ("lighthouses", "bread", "the moon", "a small dog", "winter", "trains", "the sea", "old maps")


class Call(NamedTuple):
    path: str
    body: dict[str, Any]


class Reply(NamedTuple):
    seconds: float
    tag: str
    body: bytes


def calls() -> Iterator[Call]:
    """The requests: chats and completions, greedy and seeded, streamed, or whole with up to two answers.

    Streams have a single answer, since events of several answers interleave by time.
    """
    for index in range(COUNT):
        text = f"Write about {TOPICS[index % len(TOPICS)]}, part {index}."
        mode = {"temperature": 0} if index % 2 else {"temperature": 1.2, "seed": index}
        body: dict[str, Any] = {"max_tokens": 4 + index % 5, "request_id": f"r{index}"}
        body |= {"stream": True} if index % 3 == 0 else {"n": 1 + index % 2}
        if index % 4 < 2:
            yield Call(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **mode, **body}
            )
        else:
            yield Call("/v1/completions", {"prompt": text, "logprobs": 1, **mode, **body})


def others(asked: Sequence[Call]) -> Iterator[Call]:
    """The requests ``asked``, with a different field each."""
    changes = ({"cache_salt": "other"}, {"max_tokens": 3}, {"top_p": 0.5}, {"seed": 4242}, {"unknown": True})
    for index, call in enumerate(asked):
        yield Call(call.path, call.body | changes[index % len(changes)])


def run(url: str, rounds: int) -> dict[str, Any]:
    """The results, by name."""
    asked = list(calls())
    with ThreadPoolExecutor(CLIENTS) as pool:
        first = list(pool.map(lambda call: Client(url).send(call), asked))
    client = Client(url)
    hits = [[client.send(call) for call in asked] for _ in range(rounds)]
    fresh = [client.send(Call(call.path, call.body | FRESH)) for call in asked]
    across = [client.send(call) for call in others(asked)]
    unlike = [
        not (kept.body == hit.body and without_own(hit.body) == without_own(alone.body))
        for kept, hit, alone in zip(first, hits[0], fresh, strict=True)
    ]
    times = [1e3 * hit.seconds for row in hits for hit in row]
    return {
        "hit p50, ms": float(np.percentile(times, 50)),
        "hit p95, ms": float(np.percentile(times, 95)),
        "fresh p50, ms": 1e3 * float(np.percentile([reply.seconds for reply in fresh], 50)),
        "not answered by the cache": sum(hit.tag != "hit" for row in hits for hit in row),
        "hits unlike fresh answers": sum(unlike),
        "pairs across keys": len(first) * len(across),
        "hits across keys": sum(reply.tag != "miss" for reply in [*first, *fresh, *across]),
        "hits, ms": times,
    }


def without_own(body: bytes) -> bytes:
    """``body`` without the values of a computation."""
    return OWN.sub(rb'"\1":0', body)


class Client:
    """A connection to the server at ``url``, kept open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def send(self, call: Call) -> Reply:
        """The reply to ``call``; raises ValueError for an error of the server."""
        body = json.dumps(call.body).encode()
        start = time.perf_counter()
        self._connection.request("POST", call.path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        found = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200:
            raise ValueError(f"{call.path}: {answer.status} {found[:300].decode(errors='replace')}")
        return Reply(seconds, answer.headers[TAG], found)
