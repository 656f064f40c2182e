"""``best_of``: the likeliest of several answers, by a ranking of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import SteppedEngine, post, tiny_app

SAMPLED = {"max_tokens": 8, "seed": 3, "temperature": 1.5}


def choices(path: str, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    body = {**(HELLO if path == CHAT else {"prompt": ["ab", "cd"]}), **SAMPLED, **fields}
    answer = post(tiny_app(SteppedEngine()), path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"], answer.json()["usage"]


def test_best_answers_of_each_prompt_are_returned_likeliest_first() -> None:
    every, spent = choices(COMPLETIONS, n=6, logprobs=0)
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in every]
    wanted = []
    for first in (0, 6):
        ranked = sorted(range(first, first + 6), key=lambda i: -means[i])
        wanted += [every[i]["text"] for i in ranked[:2]]
    assert len({round(mean, 9) for mean in means}) == 12
    best, usage = choices(COMPLETIONS, n=2, best_of=6)
    assert [choice["text"] for choice in best] == wanted
    assert [choice["index"] for choice in best] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best)
    assert usage["completion_tokens"] == spent["completion_tokens"]


def test_logprobs_and_ids_are_those_of_the_returned_answers() -> None:
    [best], _ = choices(CHAT, best_of=4, logprobs=True, return_token_ids=True)
    assert len(best["logprobs"]["content"]) == len(best["token_ids"]) == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 0}, "best_of"),
    ],
)
def test_wrong_best_of_is_refused(fields: dict[str, Any], param: str) -> None:
    answer = post(tiny_app(), CHAT, {**HELLO, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_best_of_equal_to_n_streams() -> None:
    assert post(tiny_app(), CHAT, {**HELLO, "best_of": 2, "n": 2, "stream": True}).status_code == 200
