"""What the terminal shows: results on stdout, everything else on stderr.

Only results go to stdout, so ``optkit ... --json | jq`` works and a progress line never ends up in a file.
rich turns colour and cursor movement off by itself when the stream is not a terminal.
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
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from optkit.errors import UserError

if TYPE_CHECKING:
    from optkit.passes.base import Tell

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False)
KEPT_ON_SCREEN = ("calibrating", "calibrated")  # estimates, which a bar would overwrite
DESCRIPTION = TextColumn("{task.description}", markup=False)


def error_panel(error: UserError) -> None:
    """One panel on stderr: what was wrong, where, and what to do."""
    rows = [Text(error.what, style="bold")]
    if error.where:
        rows.append(Text.assemble(("where  ", "dim"), error.where))
    if error.fix:
        rows.append(Text.assemble(("fix    ", "dim"), error.fix))
    stderr.print(Panel(Group(*rows), title="error", title_align="left", border_style="red"))


def bug_panel(error: BaseException) -> None:
    """One short panel for an exception that is not the user's doing."""
    text = Text(f"{type(error).__name__}: {error}"[:500])
    text.append("\nThis is a bug in optkit. Rerun with --debug for the traceback.", style="bold")
    stderr.print(Panel(text, title="internal error", title_align="left", border_style="red"))


def print_json(data: Any) -> None:
    """``data`` as indented JSON on stdout, never wrapped or coloured."""
    stdout.file.write(json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")


def print_line(line: str, /, *, part: tuple[int, int] | None = None) -> None:
    count = f" ({part[0] + 1} of {part[1]})" if part else ""
    stderr.print(Text(line + count, style="dim"))


@contextmanager
def stages(total: int) -> Iterator[Tell]:
    """A progress bar over ``total`` stages on stderr; the yielded function says what is going on.

    A text reads ``stage: detail``; the bar moves on when the stage changes. ``part`` shows a second bar, of layers
    within the stage. Without a terminal each text is printed as a line.
    """
    if not stderr.is_terminal:
        yield print_line
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        DESCRIPTION,
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("", total=total)
        layers = progress.add_task("", visible=False)
        seen: list[str] = []

        def tell(line: str, /, *, part: tuple[int, int] | None = None) -> None:
            stage, _, detail = line.partition(": ")
            if seen and seen[-1] != stage:
                progress.advance(task)
            seen.append(stage)
            if part is None:
                progress.update(task, description=line)
                progress.update(layers, visible=False)
                if detail.startswith(KEPT_ON_SCREEN):
                    progress.console.print(Text(line, style="dim"))
            else:
                progress.update(layers, visible=True, completed=part[0], total=part[1], description=detail)

        yield tell


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while the body runs; the yielded function replaces its text.

    Without a terminal each text is printed once, as a line.
    """
    if not stderr.is_terminal:
        yield lambda line: stderr.print(Text(line, style="dim"))
        return
    with stderr.status(text) as status:
        yield lambda line: status.update(line)
