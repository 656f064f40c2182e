"""Chat templates: render messages to a prompt text with the Jinja program of the model.

The program is untrusted code and runs in Jinja's immutable sandbox: no attribute with a leading underscore, no
loader, and as globals only the names in use by published templates (``range``, ``dict``, ``namespace``,
``raise_exception``, ``strftime_now``). All else equals the environment of ``transformers.apply_chat_template``
(trimmed blocks, loop controls, ``tojson``), so the same messages give the same text.

A sandbox does not stop a program from looping or allocating: ``optkit.text.template_trial`` tries every template in a
process with limits. Templates in requests are never accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from optkit.errors import UserError

MAX_RENDERED_CHARS = 8 * 1024 * 1024
MAX_POWER_BITS = 4096


class TemplateFailure(Exception):
    """The template refused the messages, or failed on them."""


class ChatTemplate:
    """A chat template, compiled at the first use.

    Call ``template_trial.check_template`` before: Jinja evaluates constant expressions while compiling.

    Args:
        source: the Jinja text.
        special_tokens: variables for the template, for example ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        self.source, self.special_tokens = source, special_tokens or {}

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template does not compile: {error}", where="chat_template") from error

    def tree(self) -> jinja2.nodes.Template:
        """The program as Jinja parses it, without optimizations.

        Raises:
            UserError: it has an error.
        """
        try:
            return _environment().parse(self.source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template does not compile: {error}", where="chat_template") from error

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt text, up to the start of the assistant's answer.

        Raises:
            TemplateFailure: the template raised, left the sandbox or wrote more than ``MAX_RENDERED_CHARS``
                characters.
        """
        names = {"add_generation_prompt": True, "tools": None, "documents": None}
        names |= self.special_tokens | variables
        template = self._template
        try:
            return _join(template.generate(messages=messages, **names))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateFailure(_reason(error)) from error

    def render_open(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt text up to the end of the last message's content: the model continues the message.

        The same as ``continue_final_message`` in transformers.

        Raises:
            TemplateFailure: as ``render``, or the rendered text does not contain the content unchanged.
        """
        content = str(messages[-1]["content"]).rstrip()
        text = self.render(messages, **(variables | {"add_generation_prompt": False}))
        end = text.rfind(content)
        if not content or end < 0:
            raise TemplateFailure("the chat template does not end with the last message's content")
        end += len(content)
        rest = str(messages[-1]["content"])[len(content) :]  # white space that the template may have kept
        return text[:end] + (rest if text.startswith(rest, end) else "")


def _join(pieces: Any) -> str:
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise TemplateFailure("the chat template writes too much")
        parts.append(piece)
    return "".join(parts)


def _reason(error: Exception) -> str:
    """The error text for the client: the template's own ``raise_exception`` text, and a fixed text for other errors."""
    if isinstance(error, _Raised):
        return str(error)[:300]
    return "the chat template cannot render these messages"


# -- the sandbox ------------------------------------------------------------------------------------


class _Raised(jinja2.TemplateError):
    """``raise_exception`` in a template."""


class _Environment(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with a bound on the results of ``*`` and ``**``."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _length(left).bit_length() * _length(right) > MAX_POWER_BITS:
            raise SecurityError("power too large")
        if operator == "*" and _length(left) * _length(right) > MAX_RENDERED_CHARS:
            raise SecurityError("product too large")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise SecurityError at once. Jinja would return an undefined value, which prints as nothing."""
        raise SecurityError(f"access to {attribute!r} is unsafe")


def _length(value: Any) -> int:
    if isinstance(value, (str, list, tuple)):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without underscore names, which would reach interpreter internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError("underscore names are not allowed")
        super().__setitem__(name, value)


def _namespace(**names: Any) -> _Namespace:
    if any(name.startswith("_") for name in names):
        raise SecurityError("underscore names are not allowed")
    return _Namespace(names)


class _Generation(jinja2.ext.Extension):
    """The ``{% generation %}`` block, a marker of assistant text for training; serving renders the content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def strftime_now(pattern: str) -> str:
    """The local time in the form ``pattern``."""
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """Plain JSON as in transformers, without Jinja's HTML escaping."""
    known = {name: options.get(name) for name in ("separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)  # type: ignore[arg-type]


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    keep: dict[str, Callable[..., Any]] = {"range": environment.globals["range"]}  # type: ignore[dict-item]
    keep |= {"dict": lambda *args, **names: dict(*args, **names), "namespace": _namespace}
    keep |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
    environment.globals.clear()
    environment.globals.update(keep)
    environment.filters["tojson"] = _tojson
    return environment
