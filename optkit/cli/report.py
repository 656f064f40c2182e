"""``optkit report``: an artifact, benchmarks and evaluations as one page, and as Markdown for pull requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optkit.cli import console
from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.machine.paths import save_text


def report(
    artifact: Annotated[
        Path | None, typer.Argument(help="Artifact directory; may be left out with any of the results below.")
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            help="Result of optkit bench --save-result; may be repeated. A sweep, or several loads, show throughput "
            "against latency."
        ),
    ] = None,
    eval_: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="Result of optkit eval --against MODEL --json; may be repeated."),
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option(help="Result of optkit plan --json; may be repeated.")
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="JSON file of optkit profile -o; may be repeated.")
    ] = None,
    tune: Annotated[
        list[Path] | None, typer.Option(help="trials.json of optkit tune; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write, as in report.html.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Markdown to write for a pull request, the verdict first; - is stdout."),
    ] = None,
) -> None:
    """Write a page on a result: passes, latencies, roofline, memory, quality, environment.

    The page is a single HTML file without scripts and fetched parts, for mail, paper and phones. Without --bench and
    --eval the content is that of report.html in the artifact, written by optkit optimize. Below each chart is a table
    of the numbers. Parts without data are left out; the last lines of the page are the commands for the data.

    With benchmarks: latency distributions by side, time to first token against prompt length over the roofline floor,
    throughput against latency, and the parts of each time to first token. With an evaluation: divergence by position
    and greedy continuations. Plans, profiles and tunings have sections of their own. Measurements beside other work are
    named. docs/reports.md explains each chart.

    Example: optkit report artifact/ --bench bench.json --eval eval.json -o report.html --markdown report.md
    """
    need_extra("serve", "optkit report")  # results are read by the code of optkit bench
    if out is None and markdown is None:
        raise UserError(
            "nothing to write", where="optkit report", fix="give -o report.html, or --markdown report.md"
        )
    if artifact is None and not any((bench, eval_, plan, profile, tune)):
        fix = "give an artifact, --bench, --eval, --plan, --profile or --tune"
        raise UserError("nothing to report on", where="optkit report", fix=fix)
    from optkit.evaluation.saved import read_eval
    from optkit.report.artifact_file import artifact_report
    from optkit.report.bench_file import read_benches
    from optkit.report.document import Sources, report_page
    from optkit.report.markdown import report_markdown
    from optkit.report.saved_results import SavedPlan, SavedProfile, SavedTuning, read_results

    with console.spinner("reading"):
        sources = Sources(
            None if artifact is None else artifact_report(artifact),
            [one for file in bench or () for one in read_benches(file)],
            [read_eval(file) for file in eval_ or ()],
            read_results(SavedPlan, plan),
            read_results(SavedProfile, profile),
            read_results(SavedTuning, tune),
        )
    if out is not None:
        write(out, report_page(sources))
    if markdown is not None:
        write(markdown, report_markdown(sources))


def write(file: Path, text: str) -> None:
    """Write ``text`` into ``file``; ``-`` is stdout.

    Raises:
        UserError: the file can't be written.
    """
    if str(file) == "-":
        console.stdout.file.write(text)
        return
    save_text(file, text)
    console.stderr.print(f"wrote {file}")
