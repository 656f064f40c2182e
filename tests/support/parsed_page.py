"""A page read by a parser of HTML: elements, attributes and words."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta"}
FETCHING = {
    "script",
    "link",
    "img",
    "iframe",
    "object",
    "embed",
    "base",
    "form",
    "use",
    "image",
    "foreignobject",
}
ACTIVE = {"src", "style", "srcset", "xlink:href", "action"}


class ParsedPage(HTMLParser):
    """Collects elements, attributes, links and text; fails where elements are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.ids: list[str] = []
        self.words = ""
        self.text = text
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value or "" for name, value in attrs if name == "href"}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def assert_self_contained(self) -> None:
        """Nothing is fetched, nothing runs, and links lead to places of the page."""
        assert self.tags.isdisjoint(FETCHING)
        assert self.attributes.isdisjoint(ACTIVE)
        assert not [name for name in self.attributes if name.startswith("on")]
        assert {link.removeprefix("#") for link in self.links} <= set(self.ids)
        assert len(self.ids) == len(set(self.ids))
        assert not re.search(r"url\(|@import", self.text)
