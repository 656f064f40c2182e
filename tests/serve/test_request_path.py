"""The path of a request and of a token: how many types, how many nested generators, and each thing done once."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args, get_type_hints

import pytest
from starlette.requests import Request as HttpRequest

from optkit.runtime.engine import Engine
from optkit.runtime.process import ipc
from optkit.runtime.process.client import EngineClient
from optkit.runtime.sampling.sampler import sample
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import EngineRequest, Request, ScheduledRequest, TokenOutput
from optkit.serve import quarantine
from optkit.serve.http import body
from optkit.serve.openai import generation, jobs, parsing, prompts, stream
from optkit.serve.openai.generation import Delta
from optkit.serve.openai.jobs import ChoiceJob
from optkit.serve.openai.protocol import GenerationRequest
from optkit.serve.supervisor import EngineSupervisor
from optkit.text.tokenizer import Tokenizer
from tests.support.serve_fakes import FakeEngine, client, create_app, settings
from tests.support.tiny_tokenizer import tiny_tokenizer

MAX_TYPES_DOWN, MAX_TYPES_UP, MAX_GENERATORS = 6, 4, 3
Hop = tuple[Any, Any, Any]  # a type, the function that takes it (or the class that holds it), the next type

DOWN: tuple[Hop, ...] = (
    (HttpRequest, body.read_body, bytes),
    (bytes, parsing.parse_request, GenerationRequest),
    (GenerationRequest, prompts.PromptReader.jobs, ChoiceJob),
    (ChoiceJob, ChoiceJob, EngineRequest),
    (EngineRequest, Request, Request),
    (Request, ScheduledRequest, ScheduledRequest),
)
UP: tuple[Hop, ...] = (
    (int, sample, int),
    (int, Scheduler.update, TokenOutput),
    (TokenOutput, EngineClient.generate, TokenOutput),
    (ChoiceJob, generation.generate_text, Delta),
    (Delta, stream.ChunkWriter.chunk, bytes),
)


def mentions(hint: Any, wanted: type) -> bool:
    """True when ``wanted``, or a subclass or type variable of it, is somewhere in ``hint``."""
    bound = getattr(hint, "__bound__", None)
    if bound is not None:
        return mentions(bound, wanted)
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return hint is wanted
    return any(mentions(part, wanted) for part in get_args(hint))


def hints_of(hop: Any) -> tuple[list[Any], Any]:
    """The types that a function takes and gives; a class takes and holds the types of its fields."""
    for_checkers_only = {"Node": object, "Positions": object, "TokenCounts": object}
    hints = get_type_hints(hop, localns=for_checkers_only)
    if inspect.isclass(hop):
        return list(hints.values()), hop
    return [hint for name, hint in hints.items() if name != "return"], hints["return"]


@pytest.mark.parametrize(("taken", "hop", "given"), [*DOWN, *UP[1:]])
def test_each_hop_takes_the_type_before_and_gives_the_next(taken: Any, hop: Any, given: Any) -> None:
    takes, gives = hints_of(hop)
    if hop is EngineClient.generate:
        taken = EngineRequest
    if hop is ChoiceJob:
        assert any(mentions(hint, given) for hint in takes)
        return
    assert any(mentions(hint, taken) for hint in takes)
    assert mentions(gives, given)


def test_the_message_to_the_engine_is_the_request_and_back_its_outputs_in_no_envelope() -> None:
    assert EngineRequest in get_args(ipc.ToWorker)
    assert ipc.Outputs in get_args(ipc.FromWorker) and get_args(ipc.Outputs)[0] is TokenOutput
    for message in (*get_args(ipc.ToWorker), *get_args(ipc.FromWorker)):
        for hint in get_type_hints(message).values() if isinstance(message, type) else ():
            assert not mentions(hint, EngineRequest) and not mentions(hint, TokenOutput)
    assert mentions(get_type_hints(Engine.add_request)["request"], EngineRequest)


def test_types_of_a_request_are_few() -> None:
    """The body's bytes are the HTTP request's; its JSON does not leave ``parse_request``."""
    worn = {kind for taken, _, given in DOWN for kind in (taken, given)} - {bytes}
    assert worn == {HttpRequest, GenerationRequest, ChoiceJob, EngineRequest, Request, ScheduledRequest}
    assert len(worn) <= MAX_TYPES_DOWN


def test_types_of_a_token_are_few() -> None:
    worn = {given for _, _, given in UP}
    assert worn == {int, TokenOutput, Delta, bytes}
    assert len(worn) <= MAX_TYPES_UP


class WatchedClient(FakeEngine):
    """As ``EngineClient``, one async generator; counts those that are nested when a token comes."""

    def __init__(self, depths: list[int]) -> None:
        super().__init__()
        self.depths = depths
        self.on_death: Callable[..., None] = lambda casualties: None

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        for output in self._outputs(request):
            await asyncio.sleep(0)
            self.depths.append(nested_generators())
            yield output


def nested_generators() -> int:
    """Async generators of optkit and this file on the stack."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        ours = "optkit" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
        count += bool(frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR) and ours
        frame = frame.f_back  # type: ignore[assignment]
    return count


def ask(body: dict[str, Any]) -> list[int]:
    """The depths at each token of one request, through the supervisor."""
    depths: list[int] = []
    supervisor: Any = EngineSupervisor(lambda: WatchedClient(depths))  # type: ignore[arg-type, return-value]
    app = create_app(supervisor, tiny_tokenizer(), settings())

    async def go() -> int:
        async with client(app) as http:
            return (
                await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5} | body)
            ).status_code

    assert asyncio.run(go()) == 200
    return depths


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_token_passes_few_nested_generators(stream: bool, n: int) -> None:
    depths = ask({"stream": stream, "n": n})
    assert len(depths) == 5 * n
    # with several choices a queue stands between these and one more, which merges them
    assert max(depths) == 2 <= MAX_GENERATORS - (n > 1)


def test_a_request_is_parsed_checked_and_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, wrapper)

    counted(parsing, "parse_object")
    counted(Tokenizer, "encode")
    counted(prompts.PromptReader, "check_token_ids")
    counted(quarantine, "fingerprint")
    counted(GenerationRequest, "sampling")
    counted(jobs, "ChoiceJob")
    ask({"n": 3})
    assert counts == {"parse_object": 1, "encode": 1, "check_token_ids": 1, "sampling": 3, "ChoiceJob": 3}
