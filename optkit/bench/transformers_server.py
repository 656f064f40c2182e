"""The transformers baseline: plain transformers behind a minimal streaming HTTP server.

``python -m optkit.bench.transformers_server DIR --port P`` serves ``/v1/completions`` for token-id prompts, so the
benchmark's client measures transformers exactly as optkit. The model is loaded in float32 (``--dtype`` changes that)
with the defaults of transformers (SDPA attention, dynamic KV cache) and decodes greedily: a forward per token with
logits for the last position only, as in ``generate``, but without the bookkeeping of ``generate``. The baseline is
therefore slightly generous. Requests run in turn, since the server has no continuous batching.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from optkit.bench.completions import CompletionEvents, build_app

DTYPES = ("float32", "bfloat16")


class Greedy:
    """Greedy decoding of a single sequence with a transformers model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def load(cls, directory: str, dtype: str = "float32") -> Greedy:
        """The model in ``directory``, in one of ``DTYPES``."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        )
        return cls(model.eval())

    def tokens(self, prompt_ids: list[int], max_tokens: int) -> Iterator[int]:
        """``max_tokens`` greedy tokens after ``prompt_ids``; end-of-sequence is an ordinary token."""
        ids, cache = prompt_ids, None
        for _ in range(max_tokens):
            token, cache = self.forward(ids, cache)
            yield token
            ids = [token]

    def forward(self, ids: list[int], cache: Any) -> tuple[int, Any]:
        """The next token after ``ids``, and the cache with ``ids`` added."""
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            return int(out.logits[0, -1].argmax()), out.past_key_values


class Completions:
    """Stream completions of a model, a single request at a time.

    All forwards run in a single worker thread: a new thread would start a new OpenMP team.
    """

    def __init__(self, greedy: Greedy, tokenizer: Any, name: str) -> None:
        self.greedy, self.tokenizer, self.name = greedy, tokenizer, name
        self.turn = asyncio.Lock()
        self.worker = ThreadPoolExecutor(max_workers=1)

    async def stream(self, prompt_ids: list[int], max_tokens: int) -> AsyncIterator[str]:
        """Server-sent events: a chunk per token with running usage, then a usage event and [DONE]."""
        events = CompletionEvents(self.name, self.decode, len(prompt_ids), max_tokens)
        async with self.turn:
            tokens = self.greedy.tokens(prompt_ids, max_tokens)
            loop = asyncio.get_running_loop()
            while (token := await loop.run_in_executor(self.worker, next, tokens, None)) is not None:
                yield events.tokens([token])
            for event in events.end():
                yield event

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def app(self) -> Any:
        """The Starlette application."""
        return build_app(self.name, self.stream)


def main() -> None:
    import uvicorn
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description="plain transformers behind a streaming /v1/completions")
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.directory, local_files_only=True)
    completions = Completions(Greedy.load(options.directory, options.dtype), tokenizer, "transformers")
    uvicorn.run(completions.app(), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
