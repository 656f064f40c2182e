"""A page of sections: navigation, style for screens and paper, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optkit.pages.html import Markup, element, items, join, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no script, and nothing is fetched

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2126; --soft: #5a626c; --line: #d9dde2; --card: #f5f6f8;
--good: #17652f; --warn: #805300; --bad: #a02c1c; --inside: #fff;
--c0: #0b62a8; --c1: #b5480a; --c2: #0a7a5c; --c3: #7a3d8f; --c4: #6b6411; --c5: #a3245f;
--c6: #4b5563; --c7: #7a4b1e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e4e7eb; --soft: #a3abb5; --line: #363c44;
--card: #1d2127; --good: #6fcf8b; --warn: #e5b25d; --bad: #ff8f7d; --inside: #14171b;
--c0: #6db6f2; --c1: #f59b62; --c2: #55cba6; --c3: #cf9be0; --c4: #d3c75a; --c5: #f28cb8;
--c6: #b4bcc8; --c7: #d6a878; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem; color: var(--ink);
background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; } h2 { margin: 2.5rem 0 .5rem; padding-top: .5rem;
border-top: 2px solid var(--ink); font-size: 1.3rem; } h3 { margin: 1.5rem 0 .3rem; font-size: 1.05rem; }
p, ul { margin: .4rem 0; } a { color: var(--c0); } .note, figcaption { color: var(--soft); font-size: .9rem; }
figcaption b { color: var(--ink); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; list-style: none; }
nav a { display: inline-block; padding: .2rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)); gap: .6rem;
margin: 1rem 0; padding: 0; } .cards div { background: var(--card); border-left: 4px solid var(--line);
padding: .5rem .7rem; break-inside: avoid; } .cards dt { color: var(--soft); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.35rem; } .cards small { display: block; color: var(--soft); font-size: .82rem; }
.cards .good { border-color: var(--good); } .cards .bad { border-color: var(--bad); }
.scroll { overflow-x: auto; max-width: 100%; margin: .5rem 0 1rem; } .scroll table { overflow-wrap: break-word; }
table { border-collapse: collapse; font-size: .92rem; } caption { text-align: left; color: var(--soft); }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
vertical-align: top; } td { font-variant-numeric: tabular-nums; max-width: 34rem; min-width: 3rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem 2rem; }
.charts > * { min-width: 0; } figure { margin: .8rem 0; break-inside: avoid; max-width: 32rem; }
summary { cursor: pointer; } figure summary { font-size: .85rem; color: var(--soft); }
details.pass { border-bottom: 1px solid var(--line); padding: .45rem 0; } .kept, .chosen { color: var(--good); }
.reduced { color: var(--warn); } .rolled-back, .bad-news { color: var(--bad); } .skipped { color: var(--soft); }
:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
.chart { display: block; width: 100%; height: auto; font: 11.5px system-ui, sans-serif; }
.chart text { fill: var(--ink); } .chart .label { fill: var(--soft); } .chart .name { font-weight: 600; }
.chart .inside { fill: var(--inside); font-size: 10.5px; } .grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 1.8; stroke: currentColor; } .dots, .bar { fill: currentColor; }
.faint { fill-opacity: .5; } .box { fill: currentColor; fill-opacity: .16; }
.hollow { fill: var(--paper); stroke: currentColor; stroke-width: 1.5; }
.median { stroke: var(--ink); stroke-width: 2.2; } .tail { stroke: var(--ink); stroke-dasharray: 2 2; }
.mark { stroke: var(--soft); stroke-dasharray: 4 3; } .between { stroke: var(--soft); stroke-width: 1.5; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.s4 { color: var(--c4); } .s5 { color: var(--c5); } .s6 { color: var(--c6); }
.s7 { color: var(--c7); } .limit { color: var(--soft); stroke-width: 3;
stroke-opacity: .6; }
@media (max-width: 40rem) { .prose, .prose tbody, .prose tr, .prose td { display: block; max-width: none; }
.prose thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.prose tr { padding: .5rem 0; border-bottom: 1px solid var(--line); } .prose td { border: 0; padding: 0; }
.prose td:first-child { font-weight: 600; } .prose td:empty { display: none; }
.prose td:not(:first-child)::before { content: attr(data-label) ": "; color: var(--soft); } }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --card: #fff;
--inside: #fff; --c0: #0b62a8; --c1: #b5480a; --c2: #0a7a5c; --c3: #7a3d8f; --c4: #6b6411; --c5: #a3245f;
--c6: #4b5563; --c7: #7a4b1e; }
body { max-width: none; font-size: 10pt; } nav { display: none; } .scroll { overflow: visible; }
details::details-content { content-visibility: visible; height: auto; } figure details { display: none; }
* { print-color-adjust: exact; } h2, h3 { break-after: avoid; } tr { break-inside: avoid; } }
"""


MOODS = {"": None, "good": "good"}  # classes of cards; of any other word ``bad``


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        key: the anchor, of lower-case letters.
        body: the content; an empty section is left out.
        missing: a line for the end of the page in place of an empty section: the command with the content.
    """

    key: str
    title: str
    body: Sequence[Markup] = ()
    missing: str = ""


@dataclass(frozen=True)
class Card:
    """A number at the top of a page. ``mood`` is ``good``, a word for trouble such as ``worse``, or empty."""

    name: str
    value: str
    note: str = ""
    mood: str = ""


def page(title: str, lead: Sequence[Markup], sections: Sequence[Section]) -> str:
    """The page as a whole document: title, ``lead``, navigation, sections, and what is missing."""
    shown = [section for section in sections if section.body]
    links = [tag("a", section.title, href=f"#{section.key}") for section in shown]
    navigation = tag("nav", items(links), aria_label="Sections") if len(shown) > 1 else None
    missing = [section.missing for section in sections if not section.body and section.missing]
    closing = [element("h2", "Not in this report"), items(missing)] if missing else []
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    parts = [element("h1", title), *lead, *([navigation] if navigation else [])]
    content = tag("main", join([*parts, *map(drawn, shown), *closing], "\n"))
    return f'<!doctype html>\n<html lang="en">{head}\n{tag("body", content)}</html>\n'


def drawn(section: Section) -> Markup:
    heading = tag("h2", section.title, id=f"{section.key}-title")
    return tag(
        "section",
        join([heading, *section.body], "\n"),
        id=section.key,
        aria_labelledby=f"{section.key}-title",
    )


def cards(given: Sequence[Card]) -> list[Markup]:
    """The numbers as a grid; empty without any."""
    shown = [
        tag(
            "div",
            tag("dt", card.name),
            tag("dd", card.value, *(tag("small", line) for line in (card.note, trouble(card)) if line)),
            class_=MOODS.get(card.mood, "bad"),
        )
        for card in given
    ]
    return [tag("dl", *shown, class_="cards")] if shown else []


def trouble(card: Card) -> str:
    """The mood in words, unless all is well: colour alone says nothing."""
    return "" if card.mood in ("", "good") else card.mood
