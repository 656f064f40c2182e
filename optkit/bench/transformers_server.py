"""The baseline everyone has: plain transformers behind the smallest streaming HTTP server.

``python -m optkit.bench.transformers_server DIR --port P`` serves ``/v1/completions`` for token-id prompts, so the
benchmark's client measures transformers exactly as it measures optkit. The model is loaded in float32 with
transformers' own defaults (SDPA attention, dynamic KV cache) and decodes greedily, one forward a token with logits
for the last position only, as ``generate`` does, but without its per-token bookkeeping: a slightly generous
baseline. Requests run one at a time, since transformers has no continuous batching of streams here: others wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from optkit.errors import UserError


class Greedy:
    """Greedy decoding of one sequence at a time with a transformers model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def load(cls, directory: str) -> Greedy:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        return cls(model.eval())

    def tokens(self, prompt_ids: list[int], max_tokens: int) -> Iterator[int]:
        """``max_tokens`` greedy tokens after ``prompt_ids``; end-of-sequence is a token like any other."""
        ids, cache = prompt_ids, None
        for _ in range(max_tokens):
            token, cache = self.forward(ids, cache)
            yield token
            ids = [token]

    def forward(self, ids: list[int], cache: Any) -> tuple[int, Any]:
        """The next token after ``ids``, and the cache that now holds them."""
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            return int(out.logits[0, -1].argmax()), out.past_key_values


class Completions:
    """Streams completions of one model; one request and one worker thread at a time.

    A single worker keeps all forwards in one thread: a new thread would start a new OpenMP team.
    """

    def __init__(self, greedy: Greedy, tokenizer: Any, name: str) -> None:
        self.greedy, self.tokenizer, self.name = greedy, tokenizer, name
        self.turn = asyncio.Lock()
        self.worker = ThreadPoolExecutor(max_workers=1)

    async def stream(self, prompt_ids: list[int], max_tokens: int) -> AsyncIterator[str]:
        """Server-sent events: one chunk a token with running usage, then a usage event and [DONE]."""
        async with self.turn:
            tokens = self.greedy.tokens(prompt_ids, max_tokens)
            loop = asyncio.get_running_loop()
            output: list[int] = []
            sent = ""
            while (token := await loop.run_in_executor(self.worker, next, tokens, None)) is not None:
                output.append(token)
                text = self.tokenizer.decode(output, skip_special_tokens=True)
                last = len(output) == max_tokens
                new = "" if text.endswith("\ufffd") and not last else text[len(sent) :]
                sent += new
                choice = {"index": 0, "text": new, "finish_reason": "length" if last else None}
                yield self._event([choice], len(prompt_ids), len(output))
            yield self._event([], len(prompt_ids), len(output))
            yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], prompt: int, completion: int) -> str:
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        event = {"object": "text_completion", "model": self.name, "choices": choices, "usage": usage}
        return f"data: {json.dumps(event)}\n\n"


def build_app(completions: Completions) -> Any:
    """The Starlette application: /health, /v1/models, /v1/completions."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def health(_: Request) -> Response:
        return Response()

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": completions.name, "object": "model"}]})

    async def complete(request: Request) -> Response:
        try:
            prompt, count = check(await request.json())
        except (ValueError, UserError) as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        return StreamingResponse(completions.stream(prompt, count), media_type="text/event-stream")

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    return Starlette(routes=routes)


def check(data: Any) -> tuple[list[int], int]:
    """(prompt ids, max_tokens) of a request body, or a UserError for what this baseline does not do."""
    prompt, count = (data.get("prompt"), data.get("max_tokens")) if isinstance(data, dict) else (None, None)
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int and i >= 0 for i in prompt):
        raise UserError("the baseline server takes a list of token ids", where="prompt")
    if type(count) is not int or count < 1:
        raise UserError("must be a positive number", where="max_tokens")
    if data.get("stream") is not True or data.get("ignore_eos") is not True or data.get("temperature") != 0:
        raise UserError("the baseline server only streams, greedily, with ignore_eos", where="stream")
    return prompt, count


def main() -> None:
    import uvicorn
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description="plain transformers behind a streaming /v1/completions")
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.directory, local_files_only=True)
    completions = Completions(Greedy.load(options.directory), tokenizer, "transformers")
    uvicorn.run(build_app(completions), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
