"""The page at /demo in headless Chromium; ``make browser`` fetches one, OPTKIT_CHROMIUM names another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page, chromium, opened
from tests.support.serve_fakes import FakeEngine, SteppedEngine, post, served, tiny_app

CHROMIUM = chromium()
WORDS = "one two three four five six seven eight nine ten " * 4
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"
IDLE = "ahead.calls > 0 && ahead.running === null && ahead.timer === null"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make browser")


@contextmanager
def shown(app: Any, profile: Path, path: str = "/demo") -> Iterator[Page]:
    with served(app) as url, opened(str(CHROMIUM), url + path, profile) as page:
        yield page


def write(page: Page, text: str) -> None:
    """Type ``text`` into the empty message, in pieces."""
    page.evaluate("element('message').value = ''; element('message').focus()")
    for start in range(0, len(text), 20):
        page.type_text(text[start : start + 20])


def sent(page: Page) -> list[str]:
    """The newest row of the table, after a click on Send."""
    rows = page.evaluate("element('results').rows.length")
    page.evaluate("element('send').click()")
    page.wait_for(f"element('results').rows.length > {rows}")
    return page.evaluate("[...element('results').rows[0].cells].map(cell => cell.textContent)")


@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_message_is_computed_while_it_is_typed(tmp_path: Path, root: str) -> None:
    app = tiny_app(SteppedEngine(max_model_len=1024), demo=True, max_model_len=1024, root_path=root)
    with shown(app, tmp_path, f"{root}/demo") as page:
        page.evaluate("ahead.interval = 50")
        write(page, WORDS)
        page.wait_for(IDLE)
        first, tokens, found, ahead = sent(page)
        assert first.endswith(" ms") and int(found) > 0.5 * int(tokens) and ahead == "yes"
        answer = page.evaluate("element('answer').textContent")
        page.evaluate("element('ahead').click()")
        calls = page.evaluate("ahead.calls")
        write(page, WORDS[::-1])
        _, tokens, found, ahead = sent(page)
        assert int(found) < 0.5 * int(tokens) and ahead == "no" and page.evaluate("ahead.calls") == calls
        assert page.problems == []
    messages = [
        {"role": "system", "content": "You answer in few words."},
        {"role": "user", "content": WORDS},
    ]
    body = {"messages": messages, "max_tokens": 64, "temperature": 0}
    plain = post(tiny_app(SteppedEngine()), "/v1/chat/completions", body).json()
    assert answer == plain["choices"][0]["message"]["content"]


def test_an_answer_is_shown_as_text(tmp_path: Path) -> None:
    with shown(tiny_app(FakeEngine(HOSTILE), demo=True), tmp_path) as page:
        write(page, HOSTILE)
        sent(page)
        assert page.evaluate("element('answer').textContent") == HOSTILE
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.title") == "optkit: typing ahead" and page.problems == []


def test_a_second_click_does_not_mix_two_answers(tmp_path: Path) -> None:
    engine = FakeEngine("one two three")
    engine.delay = 0.05
    with shown(tiny_app(engine, demo=True), tmp_path) as page:
        write(page, "hello")
        page.evaluate("element('send').click()")
        sent(page)  # clicks again
        assert page.evaluate("element('answer').textContent") == "one two three"
        assert len(engine.requests) == 1 and not page.evaluate("element('send').disabled")


def test_the_policy_holds_for_scripts_and_for_other_places(tmp_path: Path) -> None:
    """Chromium, and not the test, reads the policy."""
    with shown(tiny_app(demo=True), tmp_path) as page:
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.taken = 1'}))"
        )
        assert page.evaluate("window.taken === undefined")
        refused = "fetch('http://localhost:9/').then(() => 'sent', () => 'refused')"
        assert page.evaluate(refused) == "refused"
        page.wait_for("true")
        assert len([problem for problem in page.problems if "Content Security Policy" in problem]) >= 2
        assert page.evaluate("getComputedStyle(element('answer')).display") == "block"  # the style is applied


def test_a_wrong_key_is_told(tmp_path: Path) -> None:
    with shown(tiny_app(demo=True, api_keys=("secret",)), tmp_path) as page:
        page.evaluate("ahead.interval = 20")
        write(page, "hello")
        page.wait_for("ahead.failure")
        page.evaluate("element('send').click()")
        told = page.wait_for("element('state').textContent !== '...' && element('state').textContent")
        assert "key" in told.lower(), json.dumps(told)
