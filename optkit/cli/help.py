"""Help of a command as plain text: wrapped between words, with complete option names.

typer's own boxes shorten long names and types in a narrow terminal, and take ``[...]`` in a text for markup.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command with options under the headings given by ``rich_help_panel``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_section(param), []).append(record)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def _section(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or "Options"


def summary(function: Any) -> str:
    """The first sentence of a command's docstring, for the list of commands."""
    return (function.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")
