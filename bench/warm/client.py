"""A streaming chat client with the time of every token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Answer:
    """A streamed answer: seconds from sending to the first text, and between texts."""

    text: str = ""
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0


async def ask(http: httpx.AsyncClient, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """The greedy answer to ``messages``."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **options}
    answer, last = Answer(), time.perf_counter()
    start = last
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                answer.prompt_tokens = event["usage"]["prompt_tokens"]
                details = event["usage"].get("prompt_tokens_details") or {}
                answer.cached_tokens = details.get("cached_tokens", 0)
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if not piece:
                continue
            now = time.perf_counter()
            if answer.text:
                answer.gaps.append(now - last)
            else:
                answer.first = now - start
            answer.text, last = answer.text + piece, now
    return answer
