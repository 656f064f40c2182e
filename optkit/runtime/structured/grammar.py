"""Grammars: a ``Constraint`` in llguidance's own form, compiled for a vocabulary, within bounds.

Only this module imports llguidance, and only behind a check of the extra. The bounds (``limits``) end a hostile
constraint by an error in place of a long step: the fuel of the lexer and the items of the parser bound the time of a
mask, the number of lexer states bounds the memory of a sequence. The time of compiling is bounded elsewhere
(``optkit.serve.constraints``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from optkit.runtime.structured.schemas import unenforceable
from optkit.runtime.types import Constraint, ConstraintFailed

TOO_LARGE = "it is too large for a grammar; simplify it"
MAX_ERROR_CHARS = 300
STEP_LEXER_FUEL = 60_000  # about 4 ms of a mask; llguidance's own default is 200,000
STEP_MAX_ITEMS = 20_000  # about 1 ms; by default 50,000
MAX_LEXER_STATES = 20_000  # up to 2 kB each; by default 250,000
OVERLAPPING = re.compile(r"oneOf constraints are not supported\. Enable.*")
NO_OVERLAP = "oneOf is supported only where its schemas exclude each other; anyOf has no such rule"
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_TEXT = r"/(.|\n)*/"
NOTHING_FITS = "NoExtension"  # in llguidance's reason of a stop


def vocabulary(tokenizer_json: str, vocab_size: int) -> LLTokenizer:
    """The tokens of a tokenizer in llguidance's form; a quarter of a second for 49,152 tokens.

    Args:
        tokenizer_json: the text of the Hugging Face tokenizer's file.
        vocab_size: width of the model's logits.

    Raises:
        ConstraintFailed: llguidance can't read the tokenizer.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size)
    except ValueError as error:
        raise ConstraintFailed(f"this model's tokenizer has no grammars: {shortened(error)}") from error


def limits() -> LLParserLimits:
    """The bounds of a grammar."""
    return LLParserLimits(
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def compiled(constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
    """The matcher of ``constraint`` before the first token.

    Raises:
        ConstraintFailed: the constraint is wrong, has unsupported parts, or is beyond the limits.
    """
    try:
        grammar = grammar_text(constraint, tokens)
    except (ValueError, RecursionError) as error:
        raise ConstraintFailed(shortened(error)) from error
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise ConstraintFailed(shortened(matcher.get_error()))
    return matcher


def tried(constraint: Constraint, tokens: LLTokenizer) -> Constraint:
    """``constraint`` with a grammar in Lark, after compiling and the first steps of an answer.

    Raises:
        ConstraintFailed: as ``compiled``, ``in_lark`` and ``rehearse``.
    """
    constraint = in_lark(constraint)
    rehearse(compiled(constraint, tokens))
    return constraint


def rehearse(matcher: LLMatcher) -> None:
    """Take the first steps of an answer with ``matcher``: a mask, the forced tokens, another mask.

    Raises:
        ConstraintFailed: a step is beyond the limits.
    """
    matcher.compute_bitmask()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = shortened(matcher.get_error())
        if NOTHING_FITS in reason:
            raise ConstraintFailed("no finite text satisfies it")
        raise ConstraintFailed(f"its first tokens are too complex: {reason}")


def in_lark(constraint: Constraint) -> Constraint:
    """``constraint`` with a grammar of llama.cpp's form (GBNF) converted to Lark.

    Raises:
        ConstraintFailed: the grammar is of neither form.
    """
    if constraint.kind != "grammar":
        return constraint
    try:
        return msgspec.structs.replace(constraint, value=any_to_lark(constraint.value))
    except (GbnfToLarkError, RecursionError) as error:
        raise ConstraintFailed(shortened(error)) from error


def grammar_text(constraint: Constraint, tokens: LLTokenizer) -> str:
    """``constraint`` as the JSON text of llguidance's grammars.

    Raises:
        ValueError: the value of the constraint is not the necessary JSON, or has keywords beyond a grammar.
        RecursionError: the JSON is nested too deep.
    """
    body = _without_trigger(constraint)
    if not constraint.after:
        return json.dumps({"grammars": [body]})
    before = {"lark_grammar": _triggered(constraint.after, tokens)}
    return json.dumps({"grammars": [before, {**body, "name": "body"}]})


def _without_trigger(constraint: Constraint) -> dict[str, Any]:
    """The grammar of the constrained text."""
    match constraint.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}', constraint.whitespace)
        case "json_schema":
            if reason := unenforceable(_parsed(constraint.value)):
                raise ValueError(reason)
            return _json_grammar(constraint.value, constraint.whitespace)
        case "regex":
            return json.loads(LLMatcher.grammar_from_regex(constraint.value))["grammars"][0]
        case "choice":
            texts = json.loads(constraint.value)
            return {"lark_grammar": "start: " + " | ".join(map(_quoted, texts))}
        case "grammar":
            return {"lark_grammar": constraint.value}


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ValueError(f"the schema is not valid JSON: {error}") from None


def _json_grammar(schema: str, whitespace: str) -> dict[str, Any]:
    style: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else dict(COMPACT)
    overrides: Any = {"lenient": False, "coerce_one_of": False, **style}
    return json.loads(LLMatcher.grammar_from_json_schema(schema, overrides=overrides))["grammars"][0]


def _triggered(trigger: str, tokens: LLTokenizer) -> str:
    """A grammar of any text, and of ``@body`` after the first ``trigger``."""
    ids = tokens.tokenize_str(trigger, parse_special=True)
    if len(ids) == 1 and tokens.is_special_token(ids[0]):  # no part of a text
        head = f"head: TEXT <[{ids[0]}]>"
    else:
        head = f"head[lazy]: TEXT {_quoted(trigger)}"
    return f"start: TEXT | head body\n{head}\nTEXT: {ANY_TEXT}\nbody: @body\n"


def _quoted(text: str) -> str:
    """A string of Lark, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def shortened(error: object) -> str:
    """The message of ``error`` on a single line, for the client.

    Without the indented pictures of the wrong place, and without the words of llguidance about a bound of its own.
    """
    if str(error).startswith("panic"):
        return TOO_LARGE
    lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith(" ")]
    text = OVERLAPPING.sub(NO_OVERLAP, " ".join(lines))
    return text.removesuffix("<non-verbose/>").rstrip()[:MAX_ERROR_CHARS]
