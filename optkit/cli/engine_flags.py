"""The flags of ``optkit serve`` for the engine, made from ``optkit.recipe.engine_options``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from optkit.errors import UserError
from optkit.recipe.engine_options import DEFAULTS, NAMES, bounds, checked, fact, facts, flag, value_type

SIZE = "_bytes"  # a suffix: the value is a number of bytes
PATHS = ("kv_offload_dir",)
ONLY_ON = ("trust_artifact_code",)  # flags without a --no- spelling


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with a flag for each option of the engine, in the place of its ``**`` parameter.

    ``command`` gets the given options, by name, as values of ``EngineOptions``.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    flags = [parameter(name) for name in NAMES if fact(name, "flag")]
    first = [p for p in own if not _group(p)]

    def filled(**values: Any) -> None:
        given = {p.name: values.pop(p.name) for p in flags}
        given = {name: parsed(name, value) for name, value in given.items() if value is not None}
        checked(given)
        command(**values, **given)

    filled.__doc__, filled.__name__ = command.__doc__, command.__name__
    ordered = [*first, *flags, *(p for p in own if _group(p))]
    filled.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    return filled


def _group(p: inspect.Parameter) -> str | None:
    """The heading of a parameter in ``--help``."""
    return next((found for mark in p.annotation.__metadata__ if (found := mark.rich_help_panel)), None)


def parameter(name: str) -> inspect.Parameter:
    """The parameter of one option; None without the flag."""
    limits = bounds(name)
    option = typer.Option(
        *([flag(name)] if name in ONLY_ON else []),
        min=limits.get("ge"),
        max=limits.get("le") if "ge" in limits else None,
        metavar=_metavar(name),
        rich_help_panel=fact(name, "group"),
        help=f"{facts(name).description}{_default(name)}",
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[cli_type(name) | None, option])


def _metavar(name: str) -> str | None:
    """The value in ``--help``: the choices, or the unit; None where the type says enough."""
    found = value_type(name)
    words = "|".join(get_args(found)) if get_origin(found) is Literal else fact(name, "unit")
    return f"<{words}>" if words else None


def _default(name: str) -> str:
    """The sentence of the help text with the default."""
    default: Any = getattr(DEFAULTS, name)
    if fact(name, "recipe"):
        return " Default: the recipe's."
    if default is None or name in ONLY_ON:
        return ""
    words = {True: "on", False: "off"}
    return f" Default: {words[default] if isinstance(default, bool) else default}."


def cli_type(name: str) -> Any:
    """The type of the flag's value on the command line."""
    if name in PATHS:
        return Path
    found = value_type(name)
    return str if name.endswith(SIZE) or get_origin(found) is Literal else found


def parsed(name: str, value: Any) -> Any:
    """``value`` of the command line as a value of the option.

    Raises:
        UserError: not a size.
    """
    if name in PATHS:
        return str(value.absolute())
    return size(value, flag(name)) if name.endswith(SIZE) else value


def size(value: str, where: str) -> int:
    """The bytes of a size on the command line, as the value of the flag ``where``.

    Raises:
        UserError: not a size.
    """
    from optkit.recipe.schema import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as error:
        raise UserError(str(error), where=where, fix="write it as 512MiB or 1GiB") from error
