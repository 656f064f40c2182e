"""The documents hold together: each link leads to a file, and to a heading of that name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import checkout
from tests.support.checkout import ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor of a heading by GitHub's rule: lower case, no punctuation, a dash for each space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    """The anchors of all headings of ``document``."""
    text = FENCE.sub("", document.read_text("utf-8"))
    return {anchor(heading) for heading in HEADING.findall(text)}


def broken_links(document: Path) -> list[str]:
    """Links of ``document`` to files or headings that do not exist; links to other sites are not tried."""
    text = CODE.sub("", FENCE.sub("", document.read_text("utf-8")))
    return [link for link in LINK.findall(text) if not link.startswith("http") and is_broken(document, link)]


def is_broken(document: Path, link: str) -> bool:
    """Return True for a link without a target."""
    name, _, heading = link.partition("#")
    target = document.parent / name if name else document
    if not target.exists():
        return True
    return bool(heading) and heading not in anchors(target)


@pytest.mark.parametrize("document", checkout.files(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_lead_to_files_and_headings(document: Path) -> None:
    assert broken_links(document) == []


def test_broken_links_are_found_when_file_or_heading_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n[a](#one-two) [b](#three) [c](page.md#one-two) [d](no.md) `[e](no.md)`\n")
    assert broken_links(page) == ["#three", "no.md"]


def test_the_index_of_the_lab_notes_names_every_entry() -> None:
    document = ROOT / "docs" / "lab-notes.md"
    index = LINK.findall(document.read_text("utf-8").partition("\n## 20")[0])
    entries = {f"#{found}" for found in anchors(document) if found.startswith("20")}
    assert set(index) == entries
