"""Sixty schemas in the manner of clients: records, tools, extraction, unions, recursion, bounds, patterns, formats."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int = 24, least: int = 0) -> Schema:
    return {"type": "string", "maxLength": most} | ({"minLength": least} if least else {})


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def record(**properties: Any) -> Schema:
    """A closed object with all properties required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def loose(**properties: Any) -> Schema:
    """An object with all properties required, and perhaps more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def defined(schema: Schema, **definitions: Schema) -> Schema:
    return schema | {"$defs": definitions}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def some(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def format_(name: str) -> Schema:
    return {"type": "string", "format": name}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


FLAG: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
PERSON = record(
    name=text(20), age=whole(0, 120), city=text(20), email=text(30), active=FLAG, score=number(0, 10)
)
TREE = defined(ref("node"), node=record(value=whole(0, 99), left=either(ref("node"), NOTHING)))
CIRCLE = record(kind={"const": "circle"}, r=number(0, 9))
BOX = record(kind={"const": "box"}, w=number(0, 9), h=number(0, 9))
OPTIONAL = {"a": whole(0, 9), "b": text(8), "c": FLAG}
TOOL = record(
    name={"const": "get_weather"}, arguments=record(city=text(20), unit=one_of("celsius", "fahrenheit"))
)

SCHEMAS: dict[str, Schema] = {
    "person": PERSON,
    "people": some(PERSON, 2, 1),
    "tree": TREE,
    "tool": TOOL,
    "tools": {"anyOf": [TOOL, record(name={"const": "add"}, arguments=record(x=number(-9, 9), y=number(-9, 9)))]},
    "sentiment": record(label=one_of("positive", "negative", "neutral"), confidence=number(0, 1)),
    "labels": some(one_of("sport", "politics", "science", "art", "other"), 3, 1),
    "entities": record(entities=some(record(text=text(16), kind=one_of("person", "place", "time")), 3)),
    "relations": some(record(head=text(12), relation=one_of("part of", "made by", "near"), tail=text(12)), 2),
    "summary": record(title=text(40, 3), bullets=some(text(40, 3), 3, 1)),
    "answer": record(steps=some(record(thought=text(40), result=text(20)), 2, 1), final=text(20)),
    "quiz": record(question=text(40), choices=some(text(16), 4, 4), answer=whole(0, 3)),
    "recipe": record(name=text(24), minutes=whole(1, 240), parts=some(record(what=text(16), grams=whole(1, 999)), 3)),
    "invoice": record(number=pattern("^INV-[0-9]{4}$"), lines=some(record(item=text(16), price=number(0, 999)), 3, 1)),
    "order": record(id=whole(1, 99999), status=one_of("new", "paid", "sent"), note=either(text(24), NOTHING)),
    "address": record(street=text(24), zip=pattern("^[0-9]{5}$"), country=pattern("^[A-Z]{2}$")),
    "contact": record(email=format_("email"), phone=pattern(r"^\+[1-9][0-9]{6,12}$")),
    "event": record(title=text(24), start=format_("date-time"), all_day=FLAG),
    "date": record(day=format_("date")),
    "time": record(at=format_("time")),
    "duration": record(takes=format_("duration")),
    "uuid": record(id=format_("uuid")),
    "ipv4": record(host=format_("ipv4"), port=whole(1, 65535)),
    "ipv6": record(host=format_("ipv6")),
    "hostname": record(host=format_("hostname")),
    "uri": record(url=format_("uri")),
    "semver": record(version=pattern(r"^[0-9]+\.[0-9]+\.[0-9]+$")),
    "colour": record(hex=pattern("^#[0-9a-f]{6}$"), name=one_of("red", "green", "blue", None)),
    "slug": record(slug=pattern("^[a-z0-9]+(-[a-z0-9]+){0,4}$")),
    "price": record(amount=number(0.01, 1e6), currency=one_of("EUR", "USD", "JPY")),
    "temperature": number(-273.15, 1000),
    "percent": whole(0, 100),
    "even": {"type": "integer", "multipleOf": 2, "minimum": -100, "maximum": 100},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "negative": {"type": "integer", "maximum": -1},
    "flag": FLAG,
    "nothing": NOTHING,
    "constant": {"const": {"kind": "fixed", "values": [1, 2.5, None, "x"]}},
    "scalars": {"type": ["string", "integer", "boolean", "null"], "maxLength": 12},
    "optional": {"type": "object", "properties": OPTIONAL, "additionalProperties": False},
    "open": loose(id=whole(0, 9)) | {"additionalProperties": text(8)},
    "map": {"type": "object", "additionalProperties": whole(0, 99), "maxProperties": 4},
    "prefixes": {"type": "object", "patternProperties": {"^x_[a-z]{1,6}$": whole(0, 9)}, "additionalProperties": False},
    "pair": {"type": "array", "prefixItems": [text(8), whole(0, 9)], "items": False, "minItems": 2},
    "points": some({"type": "array", "prefixItems": [number(0, 1), number(0, 1)], "items": False, "minItems": 2}, 4, 1),
    "matrix": some(some(whole(0, 9), 3, 3), 3, 3),
    "union": either(record(cat=text(8)), record(dog=text(8), age=whole(0, 20))),
    "tagged": record(shape=either(CIRCLE, BOX)),
    "nullable": record(value=either(number(0, 9), NOTHING), reason=either(text(20), NOTHING)),
    "merged": {"allOf": [loose(a=whole(0, 9)), loose(b=text(8))]},
    "shared": defined(record(start=ref("p"), end=ref("p")), p=record(x=whole(0, 9), y=whole(0, 9))),
    "list": defined(ref("l"), l=either(NOTHING, record(head=whole(0, 9), tail=ref("l")))),
    "deep": record(a=record(b=record(c=record(d=record(e=record(f=some(FLAG, 2))))))),
    "wide": record(**{f"field_{i}": whole(0, 9) for i in range(24)}),
    "long_keys": record(**{"a_rather_long_name_of_a_property_" + c: FLAG for c in "abc"}),
    "escapes": record(**{'key "quoted"': text(8), "tab\tkey": one_of('a"b', "c\\d", "e\nf")}),
    "unicode": record(grüße=one_of("schön", "日本", "🙂"), naïve=text(12)),
    "exact": record(code={"type": "string", "minLength": 6, "maxLength": 6}, letters=pattern("[xyz]")),
    "free_text": record(text={"type": "string"}),
    "any_object": {"type": "object"},
}  # fmt: skip
assert len(SCHEMAS) == 60
