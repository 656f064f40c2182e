"""The load generator: send a workload to an OpenAI-compatible server and record the time of each event.

Requests go to ``/v1/completions`` as token ids, so every server gets exactly the same prompt without chat template or
tokenizer. ``temperature`` 0 and ``ignore_eos`` make every request produce exactly its output length. The client is a
single asyncio loop: enough for the tens of streams of a CPU server, with a single clock. The cost: a client on the
server's machine competes for the cores, for all sides alike.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aiohttp

from optkit.bench.client_load import ClientLoad, ClientMonitor
from optkit.bench.records import Chunk, RequestRecord, clock
from optkit.bench.workload import BenchRequest, RequestSchedule

MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
)  # of streams in another format
Result = TypeVar("Result")

MOST_TOKENS = 1 << 31  # of a request, in ``usage``
MOST_HEADER = 1 << 16  # bytes of a line of a response's head
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)  # seconds


def run_workload(
    url: str, model: str, workload: RequestSchedule, api_key: str | None = None, limit: float | None = None
) -> list[RequestRecord]:
    """Send all of ``workload`` to ``url`` (``http://host:port``). Return a record per request, in order.

    ``limit``: seconds from the start after which unfinished requests are cut off and fail; None waits for all.
    """
    return run_watched(url, model, workload, api_key, limit)[0]


def run_watched(
    url: str, model: str, workload: RequestSchedule, api_key: str | None = None, limit: float | None = None
) -> tuple[list[RequestRecord], ClientLoad]:
    """``run_workload`` with the client's own load during the run."""
    return blocking(_run(url, model, workload, api_key, limit))


def blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``: on a loop in another thread where the calling thread runs a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _run(
    url: str, model: str, workload: RequestSchedule, api_key: str | None, seconds: float | None
) -> tuple[list[RequestRecord], ClientLoad]:
    limit = workload.config.max_concurrency or len(workload.requests)
    slots = asyncio.Semaphore(limit)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    target = f"{url.rstrip('/')}/v1/completions"
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit),
            timeout=TIMEOUT,
            headers=headers,
            max_line_size=MOST_HEADER,
            max_field_size=MOST_HEADER,
        ) as http,
        ClientMonitor() as monitor,
    ):
        start = clock()
        end = math.inf if seconds is None else start + seconds
        tasks = [
            _paced(http, target, model, turns, start, end, slots)
            for turns in conversations(workload.requests)
        ]
        records = [record for turns in await asyncio.gather(*tasks) for record in turns]
    return sorted(records, key=lambda record: record.index), monitor.measured()


def conversations(requests: Sequence[BenchRequest]) -> list[list[BenchRequest]]:
    """Lists of requests in turn; a request without ``after`` begins a new list."""
    found: dict[int, list[BenchRequest]] = {}
    for request in requests:
        found[request.index] = found.pop(request.after) if request.after is not None else []
        found[request.index].append(request)
    return list(found.values())


async def _paced(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    turns: Sequence[BenchRequest],
    start: float,
    end: float,
    slots: asyncio.Semaphore,
) -> list[RequestRecord]:
    """Wait for the arrival time and a free slot, then send all turns, each at the end of the turn before.

    The semaphore is first come, first served. A turn is due when the turn before has ended. What has no answer at
    the time ``end`` is cut off.
    """
    due = start + turns[0].arrival
    await asyncio.sleep(max(0.0, min(due, end) - clock()))
    records = []
    async with slots:
        for request in turns:
            record = await _send_until(end, http, url, model, request)
            record.scheduled, due = due, clock()
            records.append(record)
    return records


async def _send_until(
    end: float, http: aiohttp.ClientSession, url: str, model: str, request: BenchRequest
) -> RequestRecord:
    """``send``; a failure where there is no whole answer at the time ``end``."""
    if end == math.inf:
        return await send(http, url, model, request)
    now = clock()
    try:
        return await asyncio.wait_for(send(http, url, model, request), max(end - now, 0.0))
    except TimeoutError:
        return RequestRecord(request.index, now, error="cut off at the end of the time")


async def send(http: aiohttp.ClientSession, url: str, model: str, request: BenchRequest) -> RequestRecord:
    """Stream a completion. ``record.error`` holds a failure, and the record keeps the times before the failure."""
    record = RequestRecord(index=request.index, send=clock())
    try:
        async with http.post(url, json=body(model, request), allow_redirects=False) as response:
            record.headers = clock()
            if response.status != 200:
                text = (await response.read()).decode(errors="replace")
                record.error = f"HTTP {response.status}: {text[:300]}"
                return record
            await _read(response, record)
    except (aiohttp.ClientError, TimeoutError, *MALFORMED) as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


def body(model: str, request: BenchRequest) -> dict[str, Any]:
    """The JSON of a request."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ttft_details": True,  # of optkit; unknown to others, as ignore_eos is to some
    }


async def _read(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    """Fill ``record`` from the event stream; a stream without [DONE] at the end is a failure."""
    counted = 0
    async for data in _events(response):
        now = clock()
        if data == "[DONE]":
            record.done = now
            break
        event = json.loads(data)
        if event.get("error"):
            raise ValueError(f"error in the stream: {event['error']}")
        usage = event.get("usage") or {}
        _take_usage(record, usage)
        if event.get("choices"):
            text = _text(event["choices"][0])
            total = usage.get("completion_tokens", counted + bool(text))
            record.chunks.append(Chunk(now, total - counted, empty=not text))
            counted = total
    if record.done is None:
        record.error = "the stream ended without [DONE]"
    elif record.first_token is None:
        record.error = "the stream held no text"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event. (The measured servers send one data line an event.)

    Lines end only at a newline byte: U+2028 and similar characters may stand unescaped in JSON text.
    """
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def _take_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    """Keep the counts of ``usage`` in ``record``.

    Raises:
        ValueError: a count is no number of tokens.
    """
    details = usage.get("prompt_tokens_details") or {}
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    cached = details.get("cached_tokens") if isinstance(details, dict) else details
    for count in (prompt, output, cached):
        if count is not None and not (type(count) is int and 0 <= count < MOST_TOKENS):
            raise ValueError(f"usage counts {str(count)[:40]!r} tokens")
    record.prompt_tokens = prompt if prompt is not None else record.prompt_tokens
    record.output_tokens = output if output is not None else record.output_tokens
    record.cached_tokens = cached or record.cached_tokens
    if isinstance(parts := usage.get("ttft_details"), list) and parts and isinstance(parts[0], dict):
        record.ttft_details = parts[0]


def problems(records: Sequence[RequestRecord], workload: RequestSchedule) -> list[str]:
    """Reasons against comparing the records: wrong prompt or output lengths, cache hits of a load without prefixes."""
    lines = []
    for record, request in zip(records, workload.requests, strict=True):
        if not record.ok:
            continue
        if record.prompt_tokens not in (None, len(request.prompt_ids)):
            lines.append(
                f"request {record.index}: prompt {record.prompt_tokens}, sent {len(request.prompt_ids)}"
            )
        if record.tokens != request.output_len:
            lines.append(
                f"request {record.index}: {record.tokens} output tokens, asked for {request.output_len}"
            )
        if record.cached_tokens and not workload.config.shares_prefixes:
            lines.append(f"request {record.index}: {record.cached_tokens} prompt tokens came from a cache")
    return lines
