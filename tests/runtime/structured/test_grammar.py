"""Constraints as grammars: what is accepted, what is refused with a message that names the problem."""

from __future__ import annotations

import json

import jsonschema
import pytest

from optkit.runtime.structured import grammar
from optkit.runtime.types import Constraint, ConstraintFailed
from tests.support.constrained import END, encode, vocabulary
from tests.support.tiny_tokenizer import fast_tokenizer


def accepts(constraint: Constraint, text: str) -> bool:
    state = grammar.compiled(constraint, vocabulary())
    ids = encode(text)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint("regex", "a/b[0-9]{2}"), ["a/b12"], ["a/b1", "a/b123", "xa/b12"]),
        (
            Constraint("choice", '["yes", "no", "it\\"s", "tab\\there"]'),
            ["yes", 'it"s', "tab\there"],
            ["y", "yesno"],
        ),
        (Constraint("grammar", 'start: A ("," A)*\nA: /[0-9]/'), ["1", "1,2,3"], ["", "1,", "12"]),
        (Constraint("json_object"), ["{}", '{"a": [1, null, "x"]}'], ["[]", '{"a":1}', '{"a": 1} ']),
        (Constraint("json_schema", '{"type": "integer"}'), ["0", "-12"], ["1.5", "01", '"1"']),
        (Constraint("json_schema", "{}"), ["0", "true", '"x"'], ["x"]),
        (Constraint("regex", "[0-9]", after="end: "), ["free", "free end: 1"], ["free end: x", "end: 12"]),
        (Constraint("choice", '["1"]', after="end: "), ["", "end: 1"], ["end: 2"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else None,
)
def test_constraints_accept_their_texts_and_no_others(
    constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "object", "if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "iri"}, "iri"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"type": "strng"}, "strng"),
        (
            {"type": "object", "x-guidance": {"lenient": True}, "propertyNames": {"maxLength": 3}},
            "propertyNames",
        ),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "'a'"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf is supported only where .* exclude"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ],
    ids=json.dumps,
)
def test_a_refused_schema_names_what_is_wrong(schema: dict[str, object], named: str) -> None:
    with pytest.raises(ConstraintFailed, match=named) as caught:
        grammar.compiled(Constraint("json_schema", json.dumps(schema)), vocabulary())
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= grammar.MAX_ERROR_CHARS


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        (Constraint("regex", "(a"), "unclosed group"),
        (Constraint("regex", r"\bword"), "lookarounds"),
        (Constraint("grammar", "start: nowhere"), "nowhere"),
        (Constraint("json_schema", "[" * 500), "JSON|recursion"),
        (Constraint("json_schema", "true"), "object"),
    ],
    ids=lambda value: value.value[:20] if isinstance(value, Constraint) else None,
)
def test_a_refused_grammar_names_what_is_wrong(constraint: Constraint, named: str) -> None:
    with pytest.raises(ConstraintFailed, match=named):
        grammar.compiled(constraint, vocabulary())


def test_a_bound_of_llguidance_is_named_without_its_source_code() -> None:
    keys = {f"key{i}": {"type": "string"} for i in range(12_000)}
    wide = Constraint("json_schema", json.dumps({"type": "object", "properties": keys}))
    with pytest.raises(ConstraintFailed) as refused:
        grammar.tried(wide, vocabulary())
    assert str(refused.value) == grammar.TOO_LARGE


def test_gbnf_becomes_lark_and_lark_stays() -> None:
    lark = Constraint("grammar", "start: /[ab]/")
    assert grammar.in_lark(lark) == lark
    converted = grammar.in_lark(Constraint("grammar", 'root ::= "yes" | [0-9]+ "x"'))
    assert accepts(converted, "yes") and accepts(converted, "42x") and not accepts(converted, "42")
    with pytest.raises(ConstraintFailed):
        grammar.in_lark(Constraint("grammar", "root ::= ("))


def test_a_rehearsal_finds_first_tokens_that_are_too_complex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "STEP_MAX_ITEMS", 100)
    schema = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(200)}}
    with pytest.raises(ConstraintFailed, match="complex"):
        grammar.rehearse(grammar.compiled(Constraint("json_schema", json.dumps(schema)), vocabulary()))
    grammar.rehearse(grammar.compiled(Constraint("choice", '["a"]'), vocabulary()))


def test_a_special_token_can_be_the_trigger() -> None:
    tokens = grammar.vocabulary(fast_tokenizer().to_str(), 302)
    state = grammar.compiled(Constraint("regex", "[0-9]", after="<|im_start|>"), tokens)
    start = fast_tokenizer().token_to_id("<|im_start|>")
    ids = [*tokens.tokenize_str("so: "), start]
    assert state.try_consume_tokens(ids) == len(ids) and not state.is_accepting()
    assert (
        state.validate_tokens(tokens.tokenize_str("7")) == 1
        and state.validate_tokens(tokens.tokenize_str("x")) == 0
    )


@pytest.mark.parametrize("text", ["🙂 schön", "日本\n", 'a"\\b\t/', "\u2028\x7f"])
def test_any_text_can_be_a_choice_or_a_trigger(text: str) -> None:
    tokens = grammar.vocabulary(fast_tokenizer().to_str(), 302)
    for constraint, whole in (
        (Constraint("choice", json.dumps(["x", text])), text),
        (Constraint("choice", '["1"]', after=text), f"so {text}1"),
    ):
        state, ids = grammar.compiled(constraint, tokens), tokens.tokenize_str(whole)
        assert state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def test_a_tokenizer_that_is_none_is_an_error() -> None:
    with pytest.raises(ConstraintFailed, match="tokenizer"):
        grammar.vocabulary("{}", 100)


# Keyword by keyword: an instance that jsonschema refuses is refused. The other way round a text of the same value may
# be refused, too: keys out of order, another spacing, 1.0 for an integer.
KEYWORDS = [
    ({"type": ["integer", "null"]}, [1, None], [1.5, "1", []]),
    ({"enum": ["a", 1, None, {"x": [1]}]}, ["a", 1, None, {"x": [1]}], ["b", 2, {"x": []}]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12, 100]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.25}, [0.6, 2.25, 1], [0.5, 2.26, 3]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, 49], [1, 48]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a.*[0-9]$"}, ["a1", "abc9"], ["b1", "a", "a1b"]),
    ({"type": "string", "pattern": "b"}, ["abc", "b"], ["acd", ""]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
     [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
     [[1, "a"]], [["a", 1], [1], [1, "a", 2]]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
     [{"a": 1}, {"a": 1, "b": None}], [{}, {"a": "x"}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": [1]}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"x": True}], [{"x": 1}]),
    ({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
     [{"n_a": 1}], [{"n_a": "x"}, {"m": 1}]),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5}]}, ["ab", 5], ["abc", 4]),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [1.5, None]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "required": ["v"], "additionalProperties": False,
      "properties": {"v": {"type": "integer"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}}},
     [{"v": 1}, {"v": 1, "sub": [{"v": 2, "sub": []}]}], [{"sub": []}, {"v": 1, "sub": [{}]}]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-2-9", "today"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "ipv4"}, ["192.168.0.1"], ["192.168.0.256", "1.2.3"]),
    ({"type": "string", "format": "email"}, ["a.b@example.com"], ["a.b.example.com"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), KEYWORDS, ids=lambda value: json.dumps(value)[:40])
def test_keywords_mean_what_jsonschema_says(
    schema: dict[str, object], good: list[object], bad: list[object]
) -> None:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    constraint = Constraint("json_schema", json.dumps(schema))
    for instance in [*good, *bad]:
        valid = checker.is_valid(instance)
        assert valid == any(instance is known for known in good)
        assert accepts(constraint, json.dumps(instance)) == valid, instance


def test_the_end_of_the_vocabulary_is_no_text() -> None:
    state = grammar.compiled(Constraint("regex", "(.|\n)*"), vocabulary())
    assert state.validate_tokens([END]) == 1  # the end itself
    assert not accepts(Constraint("regex", "a"), "a<|end|>")
