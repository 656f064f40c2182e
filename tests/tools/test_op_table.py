"""The printed table: every op on every device, with a file that exists or a reason."""

from __future__ import annotations

import pytest

from optkit.graph.ops import RECORDS
from tools import op_table


def test_rows_has_every_op_on_every_device_with_a_file_or_a_reason() -> None:
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for op, device, implementation, needs in op_table.rows():
        found.setdefault((op, device), []).append((implementation, needs))
    assert set(found) == {(op, device) for op in RECORDS for device in ("cpu", "cuda", "program")}
    for rows in found.values():
        for implementation, needs in rows:
            file = implementation.rpartition(": ")[2]
            assert needs if implementation == "none" else (op_table.FOLDER / file).is_file()


def test_main_prints_a_markdown_table(capsys: pytest.CaptureFixture[str]) -> None:
    op_table.main()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in (lines[0], *lines[2:]))
    assert "| linear_w4a8 | cpu | native: cpu/int4.py | groups of whole 8 channels |" in lines
