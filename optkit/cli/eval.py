"""``optkit eval``: quality of a model on held-out text, and the distance from its source model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.errors import UserError
from optkit.json_names import JSON_NAMES

if TYPE_CHECKING:
    from rich.table import Table

    from optkit.evaluation.greedy import GreedyReport
    from optkit.evaluation.quality import Estimate, PositionScore, QualityReport
    from optkit.evaluation.served import ServedReport

TOKENS, GREEDY_TOKENS = 20480, 64  # defaults
CHARACTERS = 4  # per token, about, for a text tokenized by the server
Lines = list[tuple[str, str]]


def eval_command(
    model: Annotated[str, typer.Argument(help="An artifact directory, a model, or the URL of a server.")],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            "--baseline",
            help="Reference to compare with: a model (runs in transformers) or an artifact.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text file, at most 64 MiB. Default: the held-out text shipped with optkit."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens to score.", min=1024)] = TOKENS,
    greedy_tokens: Annotated[
        int,
        typer.Option(
            help="With --against: tokens of greedy continuations of 16 prompts, compared token by token; 0: none.",
            min=0,
            max=1 << 16,
        ),
    ] = GREEDY_TOKENS,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Score answers to questions about long documents instead of windows of 512 tokens.",
            rich_help_panel="Long documents",
        ),
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="With --long: tokens of the documents, such as 1024,8192. Default: 1024 to 8192 within the context.",
            rich_help_panel="Long documents",
        ),
    ] = None,
    documents: Annotated[
        int,
        typer.Option(
            help="With --long: documents of each task and length, with up to four questions each.",
            min=1,
            max=64,
            rich_help_panel="Long documents",
        ),
    ] = 1,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON on stdout instead of text: the input of optkit report --eval."
        ),
    ] = False,
) -> None:
    """Measure quality: perplexity, and with --against also KL divergence and top-1 agreement.

    An artifact runs through the serving runtime: paged KV cache, chunked prefill, two sequences a batch, the last
    tokens of each window decoded in single steps. For a URL, the server must return log probabilities of prompts
    (/v1/completions with echo and logprobs: vLLM, optkit serve); the KL divergence is then a lower bound. The text is
    read in windows of 512 tokens. No pass reads the default text.

    Read the KL divergence first: KL compares whole distributions, where perplexity can hide a change. As a guide for
    small models, int8 stays below 0.01 nats and above 97 % agreement, 4 bits below 0.08 nats. Four times the tokens
    halve the standard errors.

    By position: a divergence that grows along a window comes from the KV cache or from attention. Greedy continuations
    (not for a URL) show when a reader would meet the first other word.

    Perplexity barely changes when a model forgets distant text. --long asks for it: numbers hidden in text, chains of
    variables, counts of words, passages to continue, questions in other words; made from a seed, no download. The score
    is the log probability of the true answer; the loss against the reference is in nats an answer token, over the tasks
    that the reference can answer. Four times the --documents halve the standard errors.

    optkit report --eval draws the output of --json.

    Example: optkit eval artifact/ --against smollm2-135m

    Example: optkit eval artifact/ --against smollm2-135m --long --lengths 1024,4096
    """
    if lengths is not None and not long:
        raise UserError("needs --long", where="--lengths")
    if long and text is not None:
        raise UserError(
            "the text of long documents is shipped", where="--text", fix="leave out --text or --long"
        )
    if long and (tokens, greedy_tokens) != (TOKENS, GREEDY_TOKENS):
        raise UserError(
            "count tokens of short windows, not of long documents",
            where="--tokens and --greedy-tokens",
            fix="give --lengths and --documents, or leave out --long",
        )
    with console.spinner("loading") as progress:
        from optkit.evaluation.text import read_text

        read = None if text is None else read_text(text)
        origin = _origin(model, against)
        if long:
            report, tables = _long(model, against, lengths, documents, progress)
        elif is_url(model):
            report, lines = _served(model, against, read, tokens, progress)
            tables = [table(lines)]
        else:
            report, lines = _local(model, against, read, tokens, greedy_tokens, progress)
            tables = [table(lines)]
    if as_json:
        console.print_json(report | origin)
        return
    for number, grid in enumerate(tables):
        if number:
            console.stdout.print()
        print_table(grid)


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _origin(model: str, against: str | None) -> dict[str, Any]:
    """Models and machine of an evaluation, for its file."""
    from optkit.bench.environment import environment, public

    root = Path.cwd()
    return {
        "model": public(model, root),
        "against": None if against is None else public(against, root),
        "environment": environment(),
    }


def _local(
    model: str, against: str | None, text: str | None, tokens: int, greedy_tokens: int, progress: Any
) -> tuple[dict[str, Any], Lines]:
    """The report of a local model, as data and as lines."""
    from optkit.evaluation.quality import compare_many, perplexity

    candidate, directory = _open(model, progress)
    if against is None:
        windows = _windows(_tokenizer(directory, directory), text, tokens, _length(candidate))
        progress(f"scoring {len(windows)} windows of {len(windows[0])} tokens")
        estimate = perplexity(candidate, windows)
        scored = sum(len(window) - 1 for window in windows)
        data = {"windows": len(windows), "tokens": scored, "ppl": vars(estimate)}
        return data, [
            ("scored positions", f"{scored} in {len(windows)} windows"),
            ("perplexity", _text(estimate, spec=".3f")),
        ]
    reference, source = _open(against, progress)
    windows = _windows(_tokenizer(directory, source), text, tokens, _length(candidate))
    progress(f"scoring {len(windows)} windows of {len(windows[0])} tokens")
    candidates = _variants(candidate)
    reports = compare_many(reference, candidates, windows)
    greedy = _greedy(reference, candidates, windows, greedy_tokens, progress)
    lines = [
        (f"{name} (steps of {variant})" if variant else name, value)
        for variant, report in reports.items()
        for name, value in [*_lines(report), *_greedy_lines(greedy.get(variant))]
    ]
    found = {
        variant: report.to_dict() | ({"greedy": greedy[variant].to_dict()} if variant in greedy else {})
        for variant, report in reports.items()
    }
    return found.get("", {JSON_NAMES["variants"]: found}), lines


def _served(
    url: str, against: str | None, text: str | None, tokens: int, progress: Any
) -> tuple[dict[str, Any], Lines]:
    """The report of a served model, as data and as lines."""
    from optkit.evaluation.served import ScoringServer, compare_served, score_text
    from optkit.text.corpora import load_text

    server = ScoringServer(url)
    if against is None:
        progress(f"scoring by {server.model}")
        report = score_text(server, text or load_text("evaluation"), tokens * CHARACTERS)
    else:
        reference, source = _open(against, progress)
        tokenizer = _tokenizer(source, source)
        windows = _windows(tokenizer, text, tokens, server.longest(_length(reference)))
        progress(f"scoring {len(windows)} windows of {len(windows[0])} tokens by {server.model}")
        report = compare_served(reference, server, windows, token_texts(tokenizer))
    return report.to_dict(), _served_lines(report)


def _long(
    model: str, against: str | None, lengths: str | None, documents: int, progress: Any
) -> tuple[dict[str, Any], list[Table]]:
    """The report on long documents, as data and as tables."""
    from optkit.cli.eval_long import long_report, parse_lengths, summary, tables
    from optkit.evaluation.long.sources import AnswerSource, ServedAnswers, answer_source, context_of
    from optkit.evaluation.served import ScoringServer

    reference: AnswerSource | None = None
    opened, source = (None, Path()) if against is None else _open(against, progress)
    if opened is not None:
        reference = answer_source(opened)
    if is_url(model):
        if opened is None:
            raise UserError(
                "long documents need the model's tokenizer", where=model, fix="give --against MODEL"
            )
        server, tokenizer = ScoringServer(model), _tokenizer(source, source)
        candidate: AnswerSource = ServedAnswers(server, token_texts(tokenizer))
        most = server.longest(context_of(opened))
    else:
        own, directory = _open(model, progress)
        candidate, most = answer_source(own), context_of(own)
        tokenizer = _tokenizer(directory, source if opened is not None else directory)
        most = min(most, context_of(opened)) if opened is not None else most
    found = long_report(candidate, reference, tokenizer, parse_lengths(lengths, most), documents, progress)
    return {"long": found.to_dict()}, [*tables(found), table([(summary(found), "")])]


def _variants(candidate: Any) -> dict[str, Any]:
    """The variants of a model by name, for layers with several variants; else the model under an empty name."""
    from optkit.graph.variants import named

    model = getattr(candidate, "model", None)
    limits = [variant.limit for variant in getattr(model, "variants", ()) if variant.limit is not None]
    if model is None or not limits:
        return {"": candidate}
    return {name: type(candidate)(model.at(tokens)) for name, tokens in named(limits).items()}


def _greedy(
    reference: Any, candidates: dict[str, Any], windows: list[list[int]], count: int, progress: Any
) -> dict[str, GreedyReport]:
    """Greedy continuations compared, by variant; empty where a side can't continue prompts, or has no room."""
    from optkit.evaluation.greedy import GreedySource, compare_greedy, prompts_of

    prompts = prompts_of(windows)
    room = min(getattr(side, "max_length", 1 << 30) for side in (reference, *candidates.values()))
    count = min(count, room - len(prompts[0]))
    if count < 1 or not all(isinstance(side, GreedySource) for side in (reference, *candidates.values())):
        return {}
    progress(f"continuing {len(prompts)} prompts by {count} tokens")
    return compare_greedy(reference, candidates, prompts, count)


def _greedy_lines(report: GreedyReport | None) -> Lines:
    return [] if report is None else [("equal greedy tokens", report.line())]


def _length(source: Any) -> int:
    """Tokens of a window: 512, or the context length of a model with a shorter context."""
    return min(512, getattr(source, "max_length", 512))


def _windows(tokenizer: Any, text: str | None, tokens: int, length: int) -> list[list[int]]:
    from optkit.evaluation.quality import evaluation_windows

    try:
        return evaluation_windows(tokenizer, tokens, length, text)
    except ValueError as error:
        raise UserError(str(error), where="--tokens", fix="ask for fewer, or give a longer --text") from error


def _open(model: str, progress: Any) -> tuple[Any, Path]:
    """(logits source, directory with the tokenizer) of an artifact or a model."""
    from optkit.artifact.manifest import is_artifact

    if is_artifact(Path(model)):
        return _runtime(Path(model)), Path(model)
    return _reference(model, progress)


def _runtime(artifact: Path) -> Any:
    from optkit.artifact.open import Artifact
    from optkit.evaluation.quality import RuntimeLogits

    return RuntimeLogits(Artifact.open(artifact).executable())


def _reference(model: str, progress: Any) -> tuple[Any, Path]:
    """A model in plain transformers, or the captured graph of a quantized checkpoint.

    transformers would need further libraries for a quantized checkpoint.
    """
    from optkit.capture import capture_directory
    from optkit.checkpoint.locate import resolve
    from optkit.checkpoint.source import open_source
    from optkit.evaluation.quality import ModuleLogits, RuntimeLogits
    from optkit.lowering.lower import lower

    directory = resolve(model, progress).directory
    if open_source(directory).layers:
        progress(f"capturing {directory.name}")
        return RuntimeLogits(lower(capture_directory(directory))), directory
    progress(f"loading {directory.name} in plain transformers")
    return ModuleLogits.load(directory), directory


def _tokenizer(artifact: Path, source: Path) -> Any:
    """The source's tokenizer.

    Raises:
        UserError: the artifact's tokenizer has another vocabulary.
    """
    from optkit.text.load import load_tokenizer

    ours, theirs = load_tokenizer(str(artifact)), load_tokenizer(str(source))
    if ours.get_vocab() != theirs.get_vocab():
        raise UserError(
            "the tokenizers differ: these are not two versions of the same model", where=str(artifact)
        )
    return theirs


def token_texts(tokenizer: Any) -> Callable[[int], str]:
    """A function from token id to the token's text in a server's list of log probabilities."""
    from optkit.text.token_text import TokenTexts, show

    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda token: str(tokenizer.decode([token]))
    texts = TokenTexts(fast)
    return lambda token: show(texts.of(token))


def table(lines: Lines) -> Table:
    """The report, a row per metric; ± is a standard error over windows."""
    from rich.table import Table

    grid = Table("", "", box=None, pad_edge=False, show_header=False)
    for name, value in lines:
        grid.add_row(name, value)
    return grid


def _text(estimate: Estimate, scale: float = 1.0, spec: str = ".3g") -> str:
    return f"{estimate.value * scale:{spec}} ± {estimate.stderr * scale:.2g}"


def _lines(report: QualityReport) -> Lines:
    percentiles = f"{report.kl_median:.3g} / {report.kl_p99:.3g} / {report.kl_max:.3g}"
    return [
        ("scored positions", f"{report.tokens} in {report.windows} windows"),
        ("mean KL(source || model), nats", _text(report.kl_mean)),
        ("median / p99 / max KL, nats", percentiles),
        ("top-1 agreement, %", _text(report.top1_agreement, 100, ".2f")),
        ("perplexity, source", _text(report.reference_ppl, spec=".3f")),
        ("perplexity, model", _text(report.ppl, spec=".3f")),
        ("ln(PPL model / PPL source), paired", _text(report.ln_ppl_ratio)),
        *_position_lines(report.by_position),
    ]


def _position_lines(scores: Sequence[PositionScore]) -> Lines:
    """A line for the first, the middle and the last range of positions."""
    few = dict.fromkeys([0, len(scores) // 2, len(scores) - 1]) if scores else {}
    return [(f"mean KL, positions {scores[i].first} to {scores[i].last}", _text(scores[i].kl)) for i in few]


def _served_lines(report: ServedReport) -> Lines:
    lines = [("scored positions", f"{report.tokens} in {report.windows} windows")]
    named = [
        ("mean KL(source || model), nats, at least", report.kl_lower_bound, 1.0, ".3g"),
        ("top-1 agreement, %", report.top1_agreement, 100.0, ".2f"),
        ("perplexity, source", report.reference_ppl, 1.0, ".3f"),
        ("perplexity, model", report.ppl, 1.0, ".3f"),
        ("ln(PPL model / PPL source), paired", report.ln_ppl_ratio, 1.0, ".3g"),
    ]
    return lines + [(name, _text(value, scale, spec)) for name, value, scale, spec in named if value]
