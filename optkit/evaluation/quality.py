"""Quality of an optimized model: perplexity, KL divergence and top-1 agreement, measured through the runtime.

The text is cut into non-overlapping windows. Each window is a sequence with an empty KV cache at the start.
``RuntimeLogits`` computes the logits as the server does: paged KV, chunked prefill, two sequences in a ragged batch,
and the last tokens decoded one at a time. So errors of the decode kernels and of the block tables count as a loss of
quality, beside errors of the weights. All numbers use natural logarithms, over positions 0..N-2 of each window.
Position t predicts token t+1; early positions have little context, on both sides.

* Perplexity ``exp(mean(-ln p(token)))``: the quality of a model on the given text.
* ``ln_ppl_ratio = mean(nll_candidate - nll_reference)``, paired by token: far less noise than in two perplexities.
* KL(reference || candidate) compares whole distributions. KL is the primary number, since a candidate may by chance
  lower perplexity and still be a different model (Dutta et al. 2024, "Accuracy is not all you need").
* Top-1 agreement: the share of positions where both models choose the same token greedily.

Standard errors are taken over window means, because tokens of a window share a topic and are not independent. With a
single window, standard errors are taken over tokens. Logits dominate the memory (512 x 49152 float32 = 100 MB). So
windows are streamed: each side holds at most a pair of windows, and rows are scored 8 at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from optkit.checkpoint.safetensors_writer import Spill
from optkit.evaluation.limits import FINAL_TOKENS, KEPT_ON_DISK, WINDOW_TOKENS
from optkit.runtime.logits import RuntimeLogits as RuntimeLogits

KEPT_BYTES = 1 << 30  # of the source model's logits, kept for later comparisons
FIRST_POSITIONS = 16  # of a window, scored together
ROWS = 8  # logits rows scored at once: temporaries of [8, V] float32 stay in the cache


class LogitsSource(Protocol):
    """A source of float32 logits [T, V] for each window of T tokens, in order."""

    def logits(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]: ...


class ModuleLogits:
    """Logits of a plain transformers model, a whole window a call. The reference shares no code with the runtime."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def load(cls, directory: Path) -> ModuleLogits:
        """The model of a local Hugging Face directory, in float32."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        return cls(model.eval())

    @torch.inference_mode()
    def logits(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        for window in windows:
            yield self.module(torch.tensor([window]), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """``count`` tokens after each prompt, all prompts at once: equal lengths need no padding."""
        tokens = new = torch.tensor([list(prompt) for prompt in prompts])
        cache = None
        for _ in range(count):
            output = self.module(new, past_key_values=cache, use_cache=True)
            cache = getattr(output, "past_key_values", None)
            chosen = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], dim=1)
            new = tokens if cache is None else chosen  # a model with a cache of its own kind begins again
        return tokens[:, -count:].tolist()


class KeptLogits:
    """Logits of a source, computed once for each window, as long as the kept logits fit in ``limit`` bytes.

    Args:
        make: makes the source; called for each request with windows that are not kept. So the source's memory is free
            between two requests.
        spill: moves kept logits to disk; ``KEPT_ON_DISK`` is then the limit.
    """

    def __init__(
        self,
        make: Callable[[], LogitsSource],
        limit: int = KEPT_BYTES,
        spill: Spill | None = None,
    ) -> None:
        self.make, self.spill, self.limit = make, spill, limit if spill is None else KEPT_ON_DISK
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def logits(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        keys = [tuple(window) for window in windows]
        missing = {key for key in keys if key not in self.kept}
        made = self.make().logits([key for key in keys if key in missing]) if missing else iter(())
        for key in keys:
            rows = self.keep(key, next(made)) if key in missing else self.kept[key]
            yield rows
            if self.spill is not None:
                self.spill.release(rows.nbytes)

    def keep(self, key: tuple[int, ...], rows: Tensor) -> Tensor:
        """Keep ``rows`` if there is room."""
        size = sum(tensor.nbytes for tensor in self.kept.values()) + rows.nbytes
        if size > self.limit:
            return rows
        self.kept[key] = rows if self.spill is None else self.spill(rows)
        return self.kept[key]


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    stderr: float


@dataclass(frozen=True)
class PositionScore:
    """The scores of positions ``first`` to ``last`` of the windows, counted from 0."""

    first: int
    last: int
    kl: Estimate
    top1_agreement: Estimate


@dataclass(frozen=True)
class QualityReport:
    """A candidate against its reference on the same windows. Divergences are in nats.

    ``by_position`` has the positions in ranges, each as long as all before.
    """

    windows: int
    tokens: int  # scored positions
    reference_ppl: Estimate
    ppl: Estimate
    ln_ppl_ratio: Estimate
    kl_mean: Estimate
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: Estimate  # 0..1
    by_position: tuple[PositionScore, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"by_position": [asdict(score) for score in self.by_position]}


def windows(
    tokens: Sequence[int], length: int = 512, count: int | None = None, bos: Sequence[int] = ()
) -> list[list[int]]:
    """Up to ``count`` non-overlapping windows of exactly ``length`` tokens, each starting with ``bos``.

    Raises:
        ValueError: the text is too short for a window or for ``count`` windows.
    """
    step = length - len(bos)
    if step < 2:
        raise ValueError(f"a window of {length} tokens has nothing to predict")
    available = len(tokens) // step
    wanted = available if count is None else count
    if not 1 <= wanted <= available:
        raise ValueError(f"{len(tokens)} tokens give {available} windows of {length}, not {wanted}")
    return [[*bos, *tokens[i * step : (i + 1) * step]] for i in range(wanted)]


def evaluation_windows(
    tokenizer: Any,
    tokens: int = FINAL_TOKENS,
    length: int = WINDOW_TOKENS,
    text: str | None = None,
    *,
    or_fewer: bool = False,
) -> list[list[int]]:
    """Windows of ``text`` with ``tokens`` tokens in total; by default the shipped held-out text.

    Each window begins with BOS if ``tokenizer`` (transformers) adds BOS. With ``or_fewer`` a shorter text gives fewer
    windows.
    """
    from optkit.text.corpora import load_text

    ids = tokenizer(text or load_text("evaluation"), add_special_tokens=False).input_ids
    first = tokenizer("a").input_ids[:1]
    bos = first if first == [tokenizer.bos_token_id] else []
    count = max(1, tokens // length)
    return windows(ids, length, min(count, len(ids) // (length - len(bos))) if or_fewer else count, bos)


def perplexity(source: LogitsSource, token_windows: Sequence[Sequence[int]]) -> Estimate:
    """exp(mean nll) of ``source`` with the standard error (delta method: ppl * stderr of the mean)."""
    scores = [
        _score(window, rows) for window, rows in zip(token_windows, source.logits(token_windows), strict=True)
    ]
    return perplexity_of(scores)


def compare_many(
    reference: LogitsSource, candidates: Mapping[str, LogitsSource], token_windows: Sequence[Sequence[int]]
) -> dict[str, QualityReport]:
    """Run the reference and all candidates window by window, and compare each candidate with the reference.

    Identical sides give KL 0, ratio 0, agreement 1. The reference runs once per window.

    Raises:
        FloatingPointError: a side produced NaN logits, which no bound on a metric could catch.
        ValueError: the vocabularies differ.
    """
    comparison = Comparison(reference, candidates)
    comparison.add(token_windows)
    return comparison.reports()


class Comparison:
    """``compare_many`` on windows given piece by piece; ``measured`` counts the windows."""

    def __init__(self, reference: LogitsSource, candidates: Mapping[str, LogitsSource]) -> None:
        self.reference, self.candidates, self.measured = reference, candidates, 0
        self._totals = {name: _Totals() for name in candidates}

    def add(self, token_windows: Sequence[Sequence[int]], enough: Callable[[], bool] = lambda: False) -> None:
        """Compare on further windows, in order, until ``enough`` is True after a window."""
        streams = {name: source.logits(token_windows) for name, source in self.candidates.items()}
        expected = self.reference.logits(token_windows)
        for window, rows in zip(token_windows, expected, strict=True):
            for name, stream in streams.items():
                self._totals[name].add(window, rows, next(stream))
            self.measured += 1
            if enough():
                break

    def reports(self) -> dict[str, QualityReport]:
        """A report of each candidate on all windows so far."""
        return {name: total.report() for name, total in self._totals.items()}


def mean_kl(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """KL(reference || candidate) in nats, the mean over all rows of pairs of logits [T, V]."""
    return float(torch.cat([compare_rows(*pair)[0] for pair in pairs]).double().mean())


def compare_rows(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """KL(reference || candidate) in nats, and 1 where the most likely tokens are the same: each [T] float32."""
    kl, same = [], []
    for start in range(0, len(reference), ROWS):
        piece = slice(start, start + ROWS)
        nothing = torch.zeros(len(reference[piece]), dtype=torch.int64)
        scores = _compare_rows(nothing, reference[piece], candidate[piece])
        kl.append(scores[2])
        same.append(scores[3])
    return torch.cat(kl), torch.cat(same)


# -- scoring ----------------------------------------------------------------------------------------


@dataclass
class _Totals:
    """Per-token scores, one float32 tensor a window: 4 bytes a token, so thousands of windows fit."""

    reference_nll: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)

    def add(self, window: Sequence[int], reference: Tensor, candidate: Tensor) -> None:
        if reference.shape != candidate.shape:
            raise ValueError(f"logits differ in shape: {tuple(reference.shape)}, {tuple(candidate.shape)}")
        pieces = [_compare_rows(*piece) for piece in _pieces(window, reference, candidate)]
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
        for values, side in zip(columns[:2], ("reference", "candidate"), strict=True):
            if values.isnan().any():
                raise FloatingPointError(f"the {side}'s logits are NaN")
        for target, column in zip((self.reference_nll, self.nll, self.kl, self.same), columns, strict=True):
            target.append(column)

    def report(self) -> QualityReport:
        kl = torch.cat(self.kl).double()
        ratio = [b - a for a, b in zip(self.reference_nll, self.nll, strict=True)]
        return QualityReport(
            windows=len(self.kl),
            tokens=len(kl),
            reference_ppl=perplexity_of(self.reference_nll),
            ppl=perplexity_of(self.nll),
            ln_ppl_ratio=mean_estimate(ratio),
            kl_mean=mean_estimate(self.kl),
            kl_median=float(kl.quantile(0.5)),
            kl_p99=float(kl.quantile(0.99)),
            kl_max=float(kl.max()),
            top1_agreement=mean_estimate(self.same),
            by_position=by_position(self.kl, self.same),
        )


def by_position(kl: Sequence[Tensor], same: Sequence[Tensor]) -> tuple[PositionScore, ...]:
    """Scores by position, from the scores of each window: the first ``FIRST_POSITIONS``, as many again, and so on.

    A growth with the position points to long contexts: to the KV cache, or to attention.
    """
    scores = []
    for first, last in position_ranges(max(map(len, kl))):
        chosen = slice(first, last + 1)
        sides = ([window[chosen] for window in column if len(window) > first] for column in (kl, same))
        scores.append(PositionScore(first, last, *map(mean_estimate, sides)))
    return tuple(scores)


def position_ranges(length: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the ranges of ``length`` positions."""
    first, last = 0, FIRST_POSITIONS - 1
    while first < length:
        yield first, min(last, length - 1)
        first, last = last + 1, 2 * last + 1


def _pieces(window: Sequence[int], *sides: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(next tokens [r], rows [r, V] of each side), r <= ROWS, for the positions with a next token."""
    targets = torch.tensor(window[1:])
    for start in range(0, len(targets), ROWS):
        chosen = slice(start, min(start + ROWS, len(targets)))
        yield targets[chosen], *(side[chosen] for side in sides)


def _compare_rows(targets: Tensor, reference: Tensor, candidate: Tensor) -> tuple[Tensor, ...]:
    """(reference nll, candidate nll, KL, same argmax), each [r] float32."""
    p, q = reference.float().log_softmax(-1), candidate.float().log_softmax(-1)
    terms = p.exp().mul_(p - q)
    if bool(p.amin() == -math.inf):  # rare: looking for the least takes a tenth of masking
        terms.masked_fill_(p == -math.inf, 0.0)  # 0 ln 0 = 0
    kl = terms.sum(-1).clamp_(min=0.0)
    return _nll(p, targets), _nll(q, targets), kl, (p.argmax(-1) == q.argmax(-1)).float()


def _nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    return -log_probs.gather(-1, targets[:, None])[:, 0]


def _score(window: Sequence[int], rows: Tensor) -> Tensor:
    """-ln p of each next token of a window: [T-1]."""
    pieces = [_nll(piece.float().log_softmax(-1), targets) for targets, piece in _pieces(window, rows)]
    return torch.cat(pieces)


def mean_estimate(values: Sequence[Tensor]) -> Estimate:
    """Mean over all tokens; standard error over window means, or over tokens for a single window."""
    tokens = torch.cat(list(values)).double()
    units = torch.stack([v.double().mean() for v in values]) if len(values) > 1 else tokens
    stderr = float(units.std() / math.sqrt(len(units))) if len(units) > 1 else 0.0
    return Estimate(float(tokens.mean()), stderr)


def perplexity_of(nll: Sequence[Tensor]) -> Estimate:
    mean = mean_estimate(nll)
    value = math.exp(mean.value) if mean.value < 700 else math.inf
    return Estimate(value, value * mean.stderr)
