"""Terminal output: panels, progress, and text that is never markup."""

from __future__ import annotations

import pytest

from optkit.cli import console


def test_stages_prints_few_lines_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with console.stages(2) as progress:
        for layer in range(1000):
            progress("awq: model.layers.[0]", part=(layer, 1000))
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "awq: model.layers.[0] (1000 of 1000)" and len(shown) < 100


def test_consoles_print_markup_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.stdout.print("[red]a[/red] :smile: optkit[serve]")
    console.warn("[b]/path/[c]: " + "word " * 40)
    with console.spinner("x") as progress:
        progress("[/nothing] opened")
    shown = capsys.readouterr()
    assert shown.out == "[red]a[/red] :smile: optkit[serve]\n"
    assert shown.err == "warning: [b]/path/[c]: " + "word " * 40 + "\n[/nothing] opened\n"
