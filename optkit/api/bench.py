"""``optkit.bench``: latency and throughput over HTTP. ``optkit bench`` calls the same function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.api.guard import guarded
from optkit.api.progress import ProgressCallback, ProgressEvent
from optkit.errors import UserError, nearest
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.bench.result import BenchResult
    from optkit.bench.verdict import Verdict

SLO_MISSED, OBJECTIVE_WORSE = 3, 4  # exit codes of optkit bench


@dataclass(frozen=True)
class BenchReport:
    """The result of a benchmark.

    Attributes:
        result: raw records, and the numbers computed from the records.
        slo_misses: a line for each bound of ``slo`` missed by the first side's p95; empty without ``slo``.
        verdicts: the artifact against each baseline, by the objective of the artifact's recipe.
    """

    result: BenchResult = field(repr=False)
    slo_misses: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def exit_code(self) -> int:
        """0; 3 for a missed bound of ``slo``; 4 where the artifact is slower than a baseline in every round."""
        if self.slo_misses:
            return SLO_MISSED
        return OBJECTIVE_WORSE if any(verdict.worse for verdict in self.verdicts) else 0

    @property
    def ok(self) -> bool:
        """True where ``exit_code`` is 0."""
        return self.exit_code == 0

    def median(self, metric: str, percentile: int = 50, side: str | None = None) -> float | None:
        """The median over rounds of a latency's percentile in milliseconds, as in ``median("ttft", 95)``.

        Args:
            metric: ``ttft``, ``tpot``, ``itl`` or ``e2e``.
            percentile: 50, 95 or 99.
            side: by default the first.

        Returns:
            None where a round has no value.
        """
        found = self.result.statistic(side or self.result.sides[0], ("latency_ms", metric, f"p{percentile}"))
        return None if found is None else found["median"]

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write every timestamp and all summaries as JSON."""
        self.result.save(Path(file))

    def lines(self) -> list[str]:
        """Missed bounds and verdicts, a line each."""
        misses = [f"SLO missed: {line}" for line in self.slo_misses]
        return [*misses, *(verdict.line() for verdict in self.verdicts)]

    def _repr_html_(self) -> str:
        from optkit.api.html import fragment, of_table
        from optkit.bench.table import legend, table

        notes = [*self.result.problems()[:10], *self.lines(), *legend(self.result)]
        return fragment(" and ".join(self.result.sides), [of_table(table(self.result))], notes)


@guarded
def bench(
    artifact: str | os.PathLike[str] | None = None,
    *,
    url: str | None = None,
    baseline: str | None = None,
    num_prompts: int = 16,
    input_len: int = 512,
    output_len: int = 64,
    max_concurrency: int | None = None,
    request_rate: float | None = None,
    rounds: int = 3,
    num_warmups: int = 2,
    slo: str | Mapping[str, float] | None = None,
    goodput: str | Mapping[str, float] | None = None,
    definitions: str = "optkit",
    tokenizer: str | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> BenchReport:
    """Measure latency and throughput over HTTP, and compare with the unoptimized model.

    All sides get identical prompts at identical arrivals, in interleaved rounds, so drift of the machine cancels in a
    ratio. No prefix cache can help: prompts share no prefix.

    Args:
        artifact: a directory to serve and measure; or give ``url``.
        url: a running server, as in ``http://127.0.0.1:8000``; ``OPTKIT_API_KEY`` holds the API key, if any.
        baseline: a model to compare with: unoptimized on optkit's runtime, and in transformers.
        num_prompts: requests of each side in each round.
        input_len, output_len: tokens of each prompt and of each answer.
        max_concurrency: most requests in flight; by default 1 without ``request_rate``, else no limit.
        request_rate: requests a second, arriving at random (Poisson); by default clients without pauses.
        rounds: rounds; the sides take turns in each.
        num_warmups: unmeasured requests of each side before the first round.
        slo: bounds on the p95 in milliseconds, ``{"ttft": 700}`` or ``"ttft:700,tpot:50"``; ``"recipe"`` takes the
            bounds of the artifact's recipe. A missed bound is in ``slo_misses``.
        goodput: bounds for the requests a second within all bounds; misses are no failure.
        definitions: formulas of the metrics: ``optkit``, ``vllm``, ``aiperf``, ``guidellm`` or ``llmperf``.
        tokenizer: model with the tokenizer for the prompts; by default the artifact, else ``baseline``.
        seed: of prompts and arrivals: the same seed gives the same requests.
        progress: called with a ``ProgressEvent`` for each step.

    Raises:
        UserError: contradicting arguments, or no server.
    """
    need_extra("serve", "optkit bench")
    from optkit.bench.bounds import bounds_of
    from optkit.bench.metrics import DEFINITIONS
    from optkit.bench.run import run_bench
    from optkit.bench.sides import choose_sides, tokenizer_directory
    from optkit.bench.workload import WorkloadConfig

    if definitions not in DEFINITIONS:
        raise UserError("unknown --definitions", where=definitions, fix=nearest(definitions, DEFINITIONS))
    if slo and goodput:
        raise UserError(
            "--slo and --goodput both set the bounds", where="optkit bench", fix="give one of them"
        )
    if rounds < 1 or num_warmups < 0:
        raise UserError(
            "a benchmark has at least one round and no negative number of warm-ups", where="optkit bench"
        )
    if request_rate is None and max_concurrency is None:
        max_concurrency = 1

    def line(text: str) -> None:
        if progress is not None:
            progress(ProgressEvent(text))

    path = None if artifact is None else Path(artifact)
    config = WorkloadConfig(num_prompts, input_len, output_len, max_concurrency, request_rate, seed)
    config.check()
    bounds = bounds_of(slo or goodput, path)
    sides = choose_sides(path, url, baseline, line)
    directory = tokenizer_directory(tokenizer, path, baseline)
    result = run_bench(sides, config, directory, rounds, num_warmups, bounds, definitions, line)
    misses = tuple(result.slo_misses()) if slo else ()
    return BenchReport(result, misses, verdicts_on(result, path) if baseline else ())


def verdicts_on(result: BenchResult, artifact: Path | None) -> tuple[Verdict, ...]:
    """The verdict of each side beside the first; none without an artifact."""
    if artifact is None:
        return ()
    from optkit.artifact.open import Artifact
    from optkit.bench.verdict import verdicts

    objective = Artifact.open(artifact, verify=False).recipe.objective  # the server has checked the hashes
    return tuple(verdicts(result, objective))
