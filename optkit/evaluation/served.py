"""Quality of a model behind a URL, by OpenAI's ``/v1/completions`` with ``echo`` and ``logprobs``.

For an echoed prompt of token ids, a server (vLLM, optkit and others) returns the log probability of each token, and
the few most likely tokens of each position. So perplexity and top-1 agreement are exact. The KL divergence gets a
lower bound: let S be the tokens with known probability, and let all other tokens be a single event. Merging events
never raises a divergence (the log-sum inequality):

    KL(p || q) >= sum over S of p ln(p / q) + p(rest) ln(p(rest) / q(rest))

A server with support for ``return_tokens_as_token_ids`` (vLLM) names tokens ``token_id:N``. Other servers name tokens
by text, in the notation of OpenAI and optkit (``bytes:`` for parts of characters).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.evaluation.quality import (
    Estimate,
    LogitsSource,
    PositionScore,
    by_position,
    mean_estimate,
    perplexity_of,
)
from optkit.extras import need_extra

TOP = 5  # most likely tokens in a response: the maximum of OpenAI's API
TIMEOUT = 600.0  # seconds for one window
PIECE = 2000  # characters of a window, where there is no tokenizer
TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class Scored:
    """A prompt of T tokens as scored by a server.

    ``logprobs`` [T - 1] are the log probabilities of all tokens but the first. ``top`` holds the most likely tokens
    of the same positions, with log probabilities.
    """

    logprobs: Tensor
    top: list[dict[str, float]]


@dataclass(frozen=True)
class ServedReport:
    """A served model on a text, and against a reference if given. Divergences are in nats."""

    windows: int
    tokens: int
    ppl: Estimate
    reference_ppl: Estimate | None = None
    ln_ppl_ratio: Estimate | None = None
    kl_lower_bound: Estimate | None = None
    top1_agreement: Estimate | None = None
    by_position: tuple[PositionScore, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"by_position": [asdict(score) for score in self.by_position]}


class ScoringServer:
    """An OpenAI-compatible server at ``url``. The environment variable ``OPENAI_API_KEY`` holds the key, if needed.

    ``context`` is the longest sequence, prompt and answer together, as reported by the server (``max_model_len``), or
    None.
    """

    def __init__(self, url: str) -> None:
        need_extra("serve", "optkit eval of a URL")
        import httpx

        key = os.environ.get("OPENAI_API_KEY")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(headers=headers, timeout=TIMEOUT)
        self.model, self.context = self._model()

    def _model(self) -> tuple[str, int | None]:
        data: Any = self._ask("GET", "/v1/models").get("data")
        try:
            context = data[0].get("max_model_len")
            return str(data[0]["id"]), context if type(context) is int and context > 0 else None
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError("the server lists no model", where=f"{self.url}/v1/models") from error

    def longest(self, wanted: int) -> int:
        """``wanted``, or less: the longest prompt with room for the generated token."""
        return wanted if self.context is None else min(wanted, self.context - 1)

    def score(self, prompt: Sequence[int] | str) -> Scored:
        """Log probabilities of a prompt, given as token ids or as text for the server's tokenizer.

        Raises:
            UserError: the server can't be reached, refuses, or does not echo log probabilities.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
        }
        answer = self._ask("POST", "/v1/completions", body)
        return self._scored(answer, None if isinstance(prompt, str) else len(prompt))

    def _scored(self, answer: dict[str, Any], expected: int | None) -> Scored:
        where = f"{self.url}/v1/completions"
        try:
            given = answer["choices"][0]["logprobs"]
            values, top = given["token_logprobs"], given["top_logprobs"]
            count = len(values) - 1 if expected is None else expected  # less the generated token
            logprobs = torch.tensor([float(v) for v in values[1:count]], dtype=torch.float64)
            likely = [{str(k): float(v) for k, v in (row or {}).items()} for row in top[1:count]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                "the server gives no log probabilities of the prompt",
                where=where,
                fix="use a server with echo and logprobs in /v1/completions, such as vLLM or optkit serve",
            ) from error
        if count < 2 or len(logprobs) != count - 1 or len(likely) != count - 1:
            raise UserError(
                f"the server gave {len(values)} log probabilities for {expected} tokens", where=where
            )
        if not bool(logprobs.isfinite().all()) or bool((logprobs > 1e-3).any()):
            raise UserError(
                "the server gave invalid log probabilities (positive, infinite or NaN)", where=where
            )
        return Scored(logprobs, likely)

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        import httpx

        where = self.url + path
        try:
            answer = self.client.request(method, where, json=body)
            answer.raise_for_status()
            content = answer.json()
        except httpx.HTTPStatusError as error:
            text = error.response.text[:200].replace("\n", " ")
            raise UserError(
                f"the server answered {error.response.status_code}: {text}", where=where
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UserError(
                f"no answer from the server ({type(error).__name__})",
                where=where,
                fix="check that the server runs, and the URL",
            ) from error
        if not isinstance(content, dict):
            raise UserError("the answer is not a JSON object", where=where)
        return content


def score_text(server: ScoringServer, text: str, characters: int) -> ServedReport:
    """Perplexity of a served model on the first ``characters`` characters of ``text``, by the server's own tokens."""
    length = server.longest(PIECE)  # a character rarely makes more than one token
    pieces = [text[i : i + length] for i in range(0, min(len(text), characters), length)]
    pieces = [piece for piece in pieces if len(piece) == length] or pieces
    nll = [-server.score(piece).logprobs for piece in pieces]
    return ServedReport(len(nll), sum(map(len, nll)), perplexity_of(nll))


def compare_served(
    reference: LogitsSource,
    server: ScoringServer,
    windows: Sequence[Sequence[int]],
    decode: Callable[[int], str],
) -> ServedReport:
    """A served model against ``reference`` on windows of token ids; ``decode`` gives a token's text."""
    columns: list[list[Tensor]] = [[], [], [], []]
    for window, rows in zip(windows, reference.logits(windows), strict=True):
        scored = server.score(window)
        for column, values in zip(columns, compare_window(window, rows, scored, decode), strict=True):
            column.append(values)
    expected, given, kl, same = columns
    return ServedReport(
        windows=len(kl),
        tokens=sum(map(len, kl)),
        ppl=perplexity_of(given),
        reference_ppl=perplexity_of(expected),
        ln_ppl_ratio=mean_estimate([b - a for a, b in zip(expected, given, strict=True)]),
        kl_lower_bound=mean_estimate(kl),
        top1_agreement=mean_estimate(same),
        by_position=by_position(kl, same),
    )


def compare_window(
    window: Sequence[int], rows: Tensor, scored: Scored, decode: Callable[[int], str]
) -> Iterator[Tensor]:
    """Reference nll, served nll, lower bound of KL, same most likely token: each [T - 1]."""
    log_p = rows[:-1].float().log_softmax(-1).double()
    targets = torch.tensor(window[1:])
    bounds, same = [], []
    for row, target, value, top in zip(log_p, window[1:], scored.logprobs.tolist(), scored.top, strict=True):
        known = identified(row, top, decode) | {target: value}
        bounds.append(kl_lower_bound(row, known))
        best = max(top, key=lambda token: top[token]) if top else ""
        most = int(row.argmax())
        same.append(float(best in (f"{TOKEN_ID}{most}", decode(most))))
    yield -log_p.gather(-1, targets[:, None])[:, 0]
    yield -scored.logprobs
    yield torch.tensor(bounds)
    yield torch.tensor(same)


def identified(row: Tensor, top: dict[str, float], decode: Callable[[int], str]) -> dict[int, float]:
    """Log probabilities by token id.

    Token texts are searched among the 20 most likely tokens of the reference, which decide the divergence.
    """
    found = {
        int(token.removeprefix(TOKEN_ID)): value
        for token, value in top.items()
        if token.startswith(TOKEN_ID) and token.removeprefix(TOKEN_ID).isdigit()
    }
    found = {token: value for token, value in found.items() if token < len(row)}
    if not found:
        likely = row.topk(min(len(row), 4 * TOP)).indices.tolist()
        found = {token: top[decode(token)] for token in likely if decode(token) in top}
    return found


def kl_lower_bound(log_p: Tensor, known: dict[int, float]) -> float:
    """Lower bound of the KL divergence in nats, from the ``known`` log probabilities of the candidate."""
    ids = torch.tensor(list(known))
    p, log_q = log_p[ids].exp(), torch.tensor(list(known.values()), dtype=torch.float64)
    total = float((p * (log_p[ids] - log_q)).nan_to_num(0.0).sum())
    rest_p, rest_q = max(0.0, 1.0 - float(p.sum())), max(1e-12, 1.0 - float(log_q.exp().sum()))
    if rest_p > 1e-9:
        total += rest_p * math.log(rest_p / rest_q)
    return max(0.0, total)
