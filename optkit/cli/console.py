"""Terminal output: results on stdout, everything else on stderr.

Only results go to stdout, so ``optkit ... --json | jq`` works and progress lines never end up in a file. rich turns
colour and cursor movement off if the stream is not a terminal. Text is never markup: square brackets and colons in
paths, model names and ``optkit[serve]`` are printed unchanged. A stream without a terminal gets whole lines, neither
wrapped nor cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from optkit.cli.paced import ESTIMATES, PacedLines
from optkit.errors import UserError

if TYPE_CHECKING:
    from optkit.passes.base import Progress

stdout = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
DESCRIPTION = TextColumn("{task.description}", markup=False)


def error_panel(error: UserError) -> None:
    """Print a user error on stderr: a panel with problem, place and remedy, or a single line without a terminal."""
    if not stderr.is_terminal:
        stderr.print(f"error: {error.line()}")
        return
    rows = [Text(error.what, style="bold")]
    if error.where:
        rows.append(Text.assemble(("where  ", "dim"), error.where))
    if error.fix:
        rows.append(Text.assemble(("fix    ", "dim"), error.fix))
    print_panel(Group(*rows), "error")


def bug_panel(error: BaseException) -> None:
    """Print an exception caused by a bug on stderr: a short panel, or two lines without a terminal."""
    text = Text(f"{type(error).__name__}: {error}"[:500])
    text.append("\nThis is a bug in optkit. Rerun with --debug for the traceback.", style="bold")
    if stderr.is_terminal:
        print_panel(text, "internal error")
    else:
        stderr.print(Text("internal error: ") + text)


def print_panel(content: Group | Text, title: str) -> None:
    """Print a red box on stderr, with wrapped text."""
    stderr.print(Panel(content, title=title, title_align="left", border_style="red"), soft_wrap=False)


def warn(text: str) -> None:
    """Print a warning line on stderr, highlighted in a terminal."""
    stderr.print(f"warning: {text}", style="bold yellow")


def print_json(data: Any) -> None:
    """Print ``data`` as indented JSON on stdout, neither wrapped nor coloured."""
    stdout.file.write(json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")
    stdout.file.flush()  # a full disk is an error of the command


@contextmanager
def paced_lines() -> Iterator[PacedLines]:
    """Progress on a stderr without a terminal: see ``PacedLines``."""
    lines = PacedLines(lambda line: stderr.print(line, style="dim"))
    try:
        yield lines
    finally:
        lines.flush()


@contextmanager
def stages(total: int) -> Iterator[Progress]:
    """Show a progress bar over ``total`` stages on stderr; the yielded function reports progress.

    A text reads ``stage: detail``; the bar moves on when the stage changes. ``part`` shows a second bar, for layers
    within the stage. Without a terminal each stage prints at most a line a second.
    """
    if not stderr.is_terminal:
        with paced_lines() as lines:
            yield lines
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        DESCRIPTION,
    )
    with Bars(*columns, console=stderr, transient=True) as bars:
        task = bars.add_task("", total=total)
        layers = bars.add_task("", visible=False)
        seen: list[str] = []

        def progress(line: str, /, *, part: tuple[int, int] | None = None) -> None:
            stage, _, detail = line.partition(": ")
            if seen and seen[-1] != stage:
                bars.advance(task)
            seen.append(stage)
            if part is None:
                bars.update(task, description=line)
                bars.update(layers, visible=False)
                if detail.startswith(ESTIMATES):  # printed above the bar
                    bars.console.print(Text(line, style="dim"))
            else:
                bars.update(layers, visible=True, completed=part[0], total=part[1], description=detail)

        yield progress


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr while the body runs; the yielded function replaces the text.

    Without a terminal each text is printed as a line.
    """
    if not stderr.is_terminal:
        with paced_lines() as lines:
            yield lines
        return
    with stderr.status(Text(text)) as status:
        yield lambda line: status.update(Text(line))
