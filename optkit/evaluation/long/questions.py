"""Questions about paragraphs of the held-out text, with answers in the paragraph's own words."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from optkit.text.corpora import load_text


class Fact(NamedTuple):
    """A question; ``start`` are the first words of the only paragraph with the answer; ``answer`` is quoted."""

    start: str
    question: str
    answer: str


FACTS = (
    Fact(
        "Fossil version 2.5 and later",
        "Which command of the sqlite3 shell creates an SQL archive?",
        ".archive",
    ),
    Fact(
        "Beginning in late 2018, SQLite has been", "What is SQLite's proprietary fuzzer called?", "dbsqlfuzz"
    ),
    Fact(
        "The SQLite core, including the unix VFS",
        "Which extensions are excluded from the analysis of branch test coverage?",
        "FTS3 and RTree",
    ),
    Fact(
        "The SQLite core contains 6548", "How many assert() statements does the SQLite core contain?", "6548"
    ),
    Fact("The latest checklists contain", "About how many items do the latest checklists contain?", "200"),
    Fact("An SQLite database connection defaults to", "What is the default journal mode?", "DELETE"),
    Fact(
        "Older versions of SQLite could not read",
        "Which version of SQLite was the first to read a WAL-mode database that is read-only?",
        "3.22.0",
    ),
    Fact(
        "Another example of corruption caused by using",
        "Engineers of which company reported corruption in a blog post?",
        "facebook",
    ),
    Fact(
        "Another example of this error was reported against",
        "Against which program was the error with the file descriptor for debugging output reported?",
        "Fossil",
    ),
    Fact(
        "Beginning with SQLite version 3.7.17",
        "Which message is sent to the error log if a database file is unlinked while it is in use?",
        "SQLITE_WARNING",
    ),
    Fact(
        "For maximum reliability and for robustness",
        "What is the default synchronous setting of SQLite?",
        "FULL",
    ),
    Fact(
        "Jim was only human",
        "What did Aunt Polly hold in her hand when she retired from the field?",
        "slipper",
    ),
    Fact("Mary gave him a tin basin", "What did Mary give him together with a piece of soap?", "tin basin"),
    Fact(
        "\"Yes, that's it, Huck--that's it; though", "Which town has Joe Harper nearly been to?", "Coonville"
    ),
    Fact(
        "The old lady was bending down, Tom watching", "With what did Aunt Polly crack his head?", "thimble"
    ),
    Fact('"Huck Finn the Red-Handed, and', "What is the title of Joe Harper?", "Terror of the Seas"),
    Fact("The Red-Handed made no response", "What did the Red-Handed gouge out?", "cob"),
    Fact('"The Lord giveth and the Lord hath', "What did Joe bust right under her nose?", "firecracker"),
    Fact(
        "\"Yes, that's so. And they get slathers", "Who says that they get most a dollar a day?", "Ben Rogers"
    ),
    Fact(
        "Not long after, as Tom, all undressed",
        "By the light of what did Tom survey his garments?",
        "tallow dip",
    ),
    Fact(
        "THE sun rose upon a tranquil world",
        "A grim chapter of which law did Aunt Polly deliver?",
        "Mosaic Law",
    ),
)


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of the held-out text."""
    return tuple(line for line in load_text("evaluation").split("\n") if line.strip())


def paragraph_of(fact: Fact) -> str:
    """The paragraph with the answer."""
    return next(paragraph for paragraph in paragraphs() if paragraph.startswith(fact.start))
