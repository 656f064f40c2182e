"""report.json of an artifact: untrusted, read against a schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.pipeline.report_schema import ReportFile
from optkit.untrusted_json import check, parse_bounded, read_bounded

MAX_REPORT_BYTES = 64 << 20


def read_report(artifact: Path, schema: type[ReportFile] = ReportFile) -> dict[str, Any]:
    """The content of report.json, checked against ``schema``.

    Raises:
        UserError: the file is missing or not a report.
    """
    file = artifact / "optkit" / "report.json"
    data = parse_bounded(read_bounded(file, MAX_REPORT_BYTES), str(file), "the report can't be read:")
    check(schema, data, str(file), "the report can't be read")
    return data
