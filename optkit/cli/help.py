"""Help of a command as plain text: wrapped between words, with complete option names.

typer's own boxes shorten long names and types in a narrow terminal, and take ``[...]`` in a text for markup. typer
writes arguments as ``{model}`` and types as ``<int range>`` and ``<list[str]>``. The help has ``MODEL``, ``<int>`` and
``<str>``.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

BRACES = re.compile(r"\{(\w+)\}")
TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range|\])?>")
UNBROKEN_HYPHEN = "\u2011"  # lines are never wrapped after this character


class PlainCommand(TyperCommand):
    """A command with options under the headings given by ``rich_help_panel``, and arguments in capitals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if _is_argument(param):
                param.metavar = param.name.upper()  # type: ignore[attr-defined]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [BRACES.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_section(param), []).append(_row(param, *record))
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)
        formatter.buffer[:] = [piece.replace(UNBROKEN_HYPHEN, "-") for piece in formatter.buffer]


def _row(param: Any, name: str, text: str) -> tuple[str, str]:
    """The row of an option or an argument: the name with the type, and the text with unbroken hyphens."""
    shown = param.metavar if _is_argument(param) else TYPE.sub(r"<\1>", name)
    return shown, text.replace("-", UNBROKEN_HYPHEN)


def _is_argument(param: Any) -> bool:
    return param.param_type_name == "argument"


def _section(param: Any) -> str:
    if _is_argument(param):
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or "Options"


def summary(function: Any) -> str:
    """The first sentence of a command's docstring, for the list of commands."""
    return (function.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")
