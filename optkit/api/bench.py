"""``optkit.bench``: latency and throughput over HTTP. ``optkit bench`` calls the same function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.api.guard import guarded
from optkit.api.progress import ProgressCallback, ProgressEvent
from optkit.errors import UserError, nearest
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.bench.assertions import Checked
    from optkit.bench.metrics import LatencyBounds
    from optkit.bench.result import BenchResult
    from optkit.bench.run import Side
    from optkit.bench.verdict import Verdict

SLO_MISSED, OBJECTIVE_WORSE, ASSERTION_FAILED = 3, 4, 5  # exit codes of optkit bench
ROUNDS, ROUNDS_WITH_INTERVALS = 3, 6


@dataclass(frozen=True)
class BenchReport:
    """The result of a benchmark.

    Attributes:
        result: raw records, and the numbers computed from the records.
        slo_misses: a line for each bound of ``slo`` missed by the first side's p95; empty without ``slo``.
        verdicts: the artifact against each baseline, by the objective of the artifact's recipe.
        assertions: the outcome of each claim of ``assertions``, with the numbers behind.
    """

    result: BenchResult = field(repr=False)
    slo_misses: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    assertions: tuple[Checked, ...] = ()

    @property
    def exit_code(self) -> int:
        """0; 3: a bound of ``slo`` is missed; 5: a claim failed or is not shown; 4: slower than a baseline.

        Slower than a baseline is an artifact that loses every round, by its recipe's objective.
        """
        if self.slo_misses:
            return SLO_MISSED
        if not all(checked.held for checked in self.assertions):
            return ASSERTION_FAILED
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
        """Doubts, missed bounds, assertions, intervals and verdicts, a line each."""
        doubts = [f"do not trust this: {doubt}" for doubt in self.result.validity().doubts]
        misses = [f"SLO missed: {line}" for line in self.slo_misses]
        claims = [checked.line() for checked in self.assertions]
        return [*doubts, *misses, *claims, *self.intervals(), *(verdict.line() for verdict in self.verdicts)]

    def intervals(self) -> list[str]:
        """The ratios to the other sides with their intervals, a line each; empty with a single side."""
        need_extra("serve", "optkit bench")
        from optkit.bench.comparison import ratio_lines

        return ratio_lines(self.result.intervals())

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
    against: Sequence[str] = (),
    num_prompts: int = 20,
    input_len: int = 512,
    output_len: int = 64,
    max_concurrency: int | None = None,
    request_rate: float | None = None,
    burstiness: float = 1.0,
    shared_prefix_len: int = 0,
    num_prefixes: int = 1,
    turns: int = 1,
    trace: str | os.PathLike[str] | None = None,
    trace_scale: float = 1.0,
    rounds: int | None = None,
    num_warmups: int = 2,
    slo: str | Mapping[str, float] | None = None,
    goodput: str | Mapping[str, float] | None = None,
    assertions: Sequence[str] = (),
    definitions: str = "optkit",
    tokenizer: str | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> BenchReport:
    """Measure latency and throughput over HTTP, and compare with the unoptimized model or any other side.

    All sides get identical prompts at identical arrivals, in interleaved rounds, so drift of the machine cancels in a
    ratio. Unless asked for, prompts share no prefix, so no prefix cache can help.

    Args:
        artifact: a directory to serve and measure, a model, or a URL; or give ``url``.
        url: a running server, as in ``http://127.0.0.1:8000``; ``OPTKIT_API_KEY`` holds the API key, if any.
        baseline: a model to compare with: unoptimized on optkit's runtime, and in transformers.
        against: further sides: artifacts, models or URLs, each perhaps with a name: ``"old=artifact-1"``.
        num_prompts: requests of each side in each round.
        input_len, output_len: tokens of each prompt and of each answer.
        max_concurrency: most requests in flight; by default 1 without ``request_rate`` and ``trace``, else no limit.
        request_rate: requests a second, arriving at random (Poisson); by default clients without pauses.
        burstiness: shape of the arrivals: 1 is Poisson, below 1 comes in bursts, above 1 is more regular.
        shared_prefix_len: tokens at the start of prompts that are shared, before ``input_len`` further ones.
        num_prefixes: different shared prefixes, taken in turn.
        turns: requests of a conversation; each sends the history and ``input_len`` further tokens.
        trace: a file with arrivals, lengths and prefixes, in Mooncake's or Azure's format.
        trace_scale: factor on the trace's lengths, as in ``1 / 32``.
        rounds: rounds; the sides take turns in each. By default 3, or 6 with ``against`` or ``assertions``: an interval
            needs 6.
        num_warmups: unmeasured requests of each side before the first round.
        slo: bounds on the p95 in milliseconds, ``{"ttft": 700}`` or ``"ttft:700,tpot:50"``; ``"recipe"`` takes the
            bounds of the artifact's recipe. A missed bound is in ``slo_misses``.
        goodput: bounds for the requests a second within all bounds; misses are no failure.
        assertions: claims to check with their confidence, as ``"ttft_p50 <= 0.5x baseline"``,
            ``"95%:ttft<700ms,tpot<50ms"`` or ``"ttft_p95<700ms"``.
        definitions: formulas of the metrics: ``optkit``, ``vllm``, ``aiperf``, ``guidellm`` or ``llmperf``.
        tokenizer: model with the tokenizer for the prompts; by default the first side with one, else ``baseline``.
        seed: of prompts and arrivals: the same seed gives the same requests.
        progress: called with a ``ProgressEvent`` for each step.

    Raises:
        UserError: contradicting arguments, or no server.
    """
    need_extra("serve", "optkit bench")
    from optkit.bench.metrics import DEFINITIONS
    from optkit.bench.run import run_bench
    from optkit.bench.workload import WorkloadConfig

    if definitions not in DEFINITIONS:
        raise UserError("unknown --definitions", where=definitions, fix=nearest(definitions, DEFINITIONS))
    bounds, option = either(slo, goodput)
    if rounds is None:
        rounds = ROUNDS_WITH_INTERVALS if against or assertions else ROUNDS
    if rounds < 1 or num_warmups < 0:
        raise UserError(
            "a benchmark has at least one round and no negative number of warm-ups", where="optkit bench"
        )
    if request_rate is None and max_concurrency is None and trace is None:
        max_concurrency = 1
    config = WorkloadConfig(
        num_prompts, input_len, output_len, max_concurrency, request_rate, seed, burstiness, shared_prefix_len,
        num_prefixes, turns, None if trace is None else os.fspath(trace), trace_scale,
    )  # fmt: skip
    config.check()
    line = line_to(progress)
    run = prepared(artifact, url, baseline, against, bounds, tokenizer, assertions, line, option)
    result = run_bench(
        run.sides,
        config,
        run.tokenizer,
        rounds,
        num_warmups,
        run.bounds,
        definitions,
        line,
        tuple(assertions),
    )
    misses = tuple(result.slo_misses()) if slo else ()
    verdicts = verdicts_on(result, run.artifact) if baseline else ()
    return BenchReport(result, misses, verdicts, tuple(result.assertions()))


def either(
    slo: str | Mapping[str, float] | None, goodput: str | Mapping[str, float] | None
) -> tuple[str | Mapping[str, float] | None, str]:
    """The bounds, and the name of the option that has them.

    Raises:
        UserError: both options have bounds.
    """
    if slo and goodput:
        what = "--slo and --goodput both set the bounds"
        raise UserError(what, where="optkit bench", fix="give one of them")
    return (goodput, "--goodput") if goodput else (slo, "--slo")


def line_to(progress: ProgressCallback | None) -> Callable[[str], None]:
    """A function that reports a line of text as progress."""

    def line(text: str) -> None:
        if progress is not None:
            progress(ProgressEvent(text))

    return line


@dataclass(frozen=True)
class Prepared:
    """The sides of a run with what belongs to them. ``artifact`` is the first side's, if it is one."""

    sides: Sequence[Side]
    tokenizer: str
    bounds: LatencyBounds
    artifact: Path | None


def prepared(
    artifact: str | os.PathLike[str] | None,
    url: str | None,
    baseline: str | None,
    against: Sequence[str],
    bounds: str | Mapping[str, float] | None,
    tokenizer: str | None,
    assertions: Sequence[str],
    line: Callable[[str], None],
    option: str = "--slo",
) -> Prepared:
    """Sides, bounds, tokenizer and claims, all checked before a server starts; the bounds are those of ``option``."""
    need_extra("serve", "optkit bench")
    from optkit.bench.assertions import parse, parse_all
    from optkit.bench.bounds import bounds_of
    from optkit.bench.sides import choose_sides, described, first_side, tokenizer_directory

    for text in assertions:
        parse(text)
    first = first_side(_side_text(artifact), url)
    limits = bounds_of(bounds, first.artifact, option)
    others = [described(text, "--against") for text in against]
    directory = tokenizer_directory(tokenizer, [first, *others], baseline)
    sides = choose_sides(first, baseline, against, line)
    parse_all(assertions, [side.name for side in sides])
    return Prepared(sides, directory, limits, first.artifact)


def _side_text(artifact: str | os.PathLike[str] | None) -> str | Path | None:
    """A path object is a directory; a text may be a URL or a model, too."""
    return artifact if artifact is None or isinstance(artifact, str) else Path(artifact)


def verdicts_on(result: BenchResult, artifact: Path | None) -> tuple[Verdict, ...]:
    """The verdict of each side beside the first; none without an artifact."""
    if artifact is None:
        return ()
    from optkit.artifact.open import Artifact
    from optkit.bench.verdict import verdicts

    objective = Artifact.open(artifact, verify=False).recipe.objective  # the server has checked the hashes
    return tuple(verdicts(result, objective))
