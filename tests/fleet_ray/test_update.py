"""Rolling updates by Ray Serve: replicas of mock engines are replaced under load, or a bad version leaves again."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

import pytest

from bench.fleet.ray_clusters import Head, head_node
from bench.fleet.update import mocks
from tests.support.fleet import on_loop

ARGS = Namespace(requests=60, rate=3.0, replicas=2, slow_canary=1.0, bound=1.6)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    with head_node(3) as found:
        for name, value in found.environment.items():
            monkeypatch.setitem(os.environ, name, value)
        yield found


@on_loop
async def test_an_update_under_load_fails_no_request_and_mixes_no_answer(head: Head) -> None:
    found = await mocks(ARGS, head)
    assert (found["failed"], found["mixed answers"], found["other end than expected"]) == (0, 0, 0)
    assert found["answers of the new version"] > 0


@on_loop
async def test_a_slow_version_is_rolled_back(head: Head) -> None:
    found = await mocks(Namespace(**vars(ARGS) | {"slow_canary": 4.0}), head)
    assert (found["failed"], found["mixed answers"], found["other end than expected"]) == (0, 0, 0)
