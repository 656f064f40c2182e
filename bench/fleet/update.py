"""A rolling update on a Ray cluster under load: no failed request, no mixed answer, and times to first token.

    python -m bench.fleet update                                     # mock engines
    python -m bench.fleet update --slow-canary 3                     # the new version is slower: rolled back
    python -m bench.fleet update --old artifact/ --new artifact-edge/    # two artifacts, over HTTP, by optkit deploy

A head node on loopback runs the replicas of an old version. A quarter into random arrivals the update begins: a new
replica beside the old ones, a test, a comparison with an old replica, then replica after replica. Every answer must be
the answer of one version. Requests go on until the update is over. Exit code 1: a bound is missed. Needs an environment
with Ray (``make fleet`` makes ``.fleet``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.fleet.failover import p95
from bench.fleet.ray_clusters import Head, free_port, head_node
from bench.fleet.rollout import MOST, OLD, OUTPUT, asked
from optkit.fleet.config import FleetConfig
from optkit.fleet.engine import FleetEngine
from optkit.fleet.manifests import http_options, replicas, replicas_name
from optkit.fleet.mock import MOCK_FACTORY, MockModel
from optkit.fleet.rollout import Phase, Rollout
from optkit.fleet.router import Router
from optkit.fleet.secrets import digest_secret
from optkit.fleet.update import ClusterControl, deployed, update

KINDS = 20  # prompts of real artifacts, again and again
KEY = "key-of-the-bench"


class Heard(NamedTuple):
    """An answer; ``version`` is failed, mixed, or that of the answer."""

    at: float
    ttft: float
    version: str


Ask = Callable[[int], Awaitable[Heard]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("bench.fleet update", __doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--slow-canary", type=float, default=1.0, help="seconds of a mock, in those of the old"
    )
    parser.add_argument("--bound", type=float, default=1.1, help="of the comparison")
    parser.add_argument("--old", type=Path, help="artifact")
    parser.add_argument("--new", type=Path, help="artifact")
    parser.add_argument("--output-tokens", type=int, default=OUTPUT)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    if (args.old is None) != (args.new is None):
        parser.error("--old and --new belong together")
    more = {} if args.old is None else {"OPTKIT_API_KEY": KEY}
    with head_node(args.replicas + 1, **more) as head:
        os.environ.update(head.environment)
        result = asyncio.run(mocks(args, head) if args.old is None else artifacts(args, head))
    missed = beyond(result, MOST)
    print_numbers(result, missed, 30, ".3f", MOST)
    if args.save_result:
        args.save_result.write_text(
            json.dumps({"kind": "fleet-update", **result, "missed": missed}, indent=1) + "\n"
        )
    return 1 if missed else 0


async def under_load(
    args: argparse.Namespace, ask: Ask, change: Callable[[], Awaitable[bool]]
) -> dict[str, Any]:
    """The figures of ``change`` under random arrivals; ``change`` returns True for the expected end."""
    dice, streams = random.Random(1), list[asyncio.Task[Heard]]()
    changing: asyncio.Task[bool] | None = None
    begun = ended = 0.0

    async def timed() -> bool:
        nonlocal ended
        try:
            return await change()
        finally:
            ended = time.monotonic()

    while len(streams) < args.requests or (changing is not None and not changing.done()):
        if len(streams) == args.requests // 4:
            begun = time.monotonic()
            changing = asyncio.create_task(timed())
        streams.append(asyncio.create_task(ask(len(streams))))
        await asyncio.sleep(dice.expovariate(args.rate))
    heard = await asyncio.gather(*streams)
    assert changing is not None
    is_expected = await changing
    before = [each.ttft for each in heard if each.at < begun and each.version != "failed"]
    during = [each.ttft for each in heard if begun <= each.at <= ended and each.version != "failed"]
    ends = [each.version for each in heard]
    return {
        "requests": float(len(ends)),
        "failed": float(ends.count("failed")),
        "mixed answers": float(ends.count("mixed")),
        "answers of the new version": float(ends.count("new")),
        "requests during the update": float(sum(begun <= each.at <= ended for each in heard)),
        "seconds": ended - begun,
        "ttft p50 before, s": sorted(before)[len(before) // 2],
        "ttft p50 during, s": sorted(during)[len(during) // 2],
        "ttft p95 before, s": p95(before),
        "ttft p95 during, s": p95(during),
        "ttft p95, ratio": p95(during) / p95(before),
        "other end than expected": float(not is_expected),
    }


# -- mock engines -------------------------------------------------------------------------------------------


def mock_versions(slow: float) -> dict[str, MockModel]:
    new = msgspec.structs.replace(
        OLD,
        answers=7,
        step_seconds=OLD.step_seconds * slow,
        prompt_tokens_per_second=OLD.prompt_tokens_per_second / slow,
    )
    return {"old": OLD, "new": new}


def mock_config(model: MockModel, digest: str, count: int) -> FleetConfig:
    text = msgspec.json.encode(model).decode()
    return FleetConfig(artifact=text, digest=digest, replicas=count, factory=MOCK_FACTORY, drain_seconds=60.0)


async def mocks(args: argparse.Namespace, head: Head) -> dict[str, Any]:
    """An update of mock engines, with this process as the server."""
    import ray

    from optkit.fleet.ray_handle import RayMembers
    from optkit.fleet.ray_replica import NAMESPACE

    models, port, cluster = mock_versions(args.slow_canary), free_port(), head.cluster
    old, new = (
        mock_config(models[name], digit * 64, args.replicas) for name, digit in (("old", "0"), ("new", "1"))
    )
    cluster.deploy({**http_options(old, port), "applications": [replicas(old)]})
    cluster.wait([replicas_name(old)], 300.0)
    ray.init(address=head.address, namespace=NAMESPACE, logging_level="ERROR")
    engine = FleetEngine(RayMembers(old.name), Router(digest_secret(old.name)))
    await engine.start(60.0)
    while len(engine.ready_ids) < args.replicas:
        await asyncio.sleep(0.1)

    async def ask(index: int) -> Heard:
        request, tokens, first = asked(f"r{index}", index), list[int](), 0.0
        async with aclosing(engine.failover.generate(request)) as outputs:
            async for output in outputs:
                first = first or time.monotonic()
                if output.error is not None:
                    print(f"failed: {output.error}", file=sys.stderr)
                    return Heard(request.arrival, 0.0, "failed")
                tokens += output.token_ids
        right = [name for name, model in models.items() if tokens == model.answer(request.prompt_ids, OUTPUT)]
        return Heard(request.arrival, first - request.arrival, right[0] if right else "mixed")

    async def change() -> bool:
        present = deployed(await asyncio.to_thread(cluster.applications), old.name)
        control = ClusterControl(cluster, present, new, port, args.bound)
        rollout = Rollout(control.old, control.new, args.replicas)
        begun = time.monotonic()
        await update(
            control,
            rollout,
            lambda line: print(f"{time.monotonic() - begun:6.1f} s  {line}", file=sys.stderr),
        )
        print(f"{rollout.phase.value} {rollout.reason}", file=sys.stderr)
        return rollout.phase is (Phase.DONE if args.slow_canary <= args.bound else Phase.FAILED)

    try:
        await asyncio.gather(*(ask(index) for index in range(8)))  # warm
        return await under_load(args, ask, change)
    finally:
        await engine.stop()
        ray.shutdown()


# -- artifacts over HTTP ------------------------------------------------------------------------------------


async def artifacts(args: argparse.Namespace, head: Head) -> dict[str, Any]:
    """An update from artifact to artifact by ``optkit deploy``, with clients over HTTP."""
    port, dice = free_port(), random.Random(3)
    prompts = [[dice.randrange(1000, 20000) for _ in range(64)] for _ in range(KINDS)]
    options = ("--host", "127.0.0.1", "--port", str(port), "--replicas", str(args.replicas), "--threads", "1")

    def deploy(artifact: Path) -> bool:
        done = head.deploy(str(artifact), *options, "--canary-bound", str(args.bound))
        print(done.stderr, file=sys.stderr)
        return done.returncode == 0

    if not await asyncio.to_thread(deploy, args.old):
        raise SystemExit("the fleet did not start")
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {KEY}"}
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(
        base_url=base, timeout=300.0, limits=limits, trust_env=False, headers=headers
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def text_of(prompt: list[int]) -> tuple[float, str]:
            body = {"model": model, "prompt": prompt, "max_tokens": args.output_tokens, "temperature": 0}
            text, first = "", 0.0
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as lines:
                if lines.status_code != 200:
                    raise httpx.HTTPError(f"{lines.status_code}: {(await lines.aread()).decode()}")
                async for line in lines.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    found = json.loads(line[6:])
                    if "error" in found:
                        raise httpx.HTTPError(str(found["error"]))
                    first = first or time.monotonic()
                    text += found["choices"][0]["text"]
            return first, text

        answers: dict[str, list[str]] = {"old": [(await text_of(prompt))[1] for prompt in prompts]}
        told: dict[int, str] = {}

        async def ask(index: int) -> Heard:
            begun = time.monotonic()
            try:
                first, told[index] = await text_of(prompts[index % KINDS])
            except httpx.HTTPError as error:
                print(f"failed: {error!r}", file=sys.stderr)
                return Heard(begun, 0.0, "failed")
            version = "old" if told[index] == answers["old"][index % KINDS] else "other"
            return Heard(begun, first - begun, version)

        async def change() -> bool:
            return await asyncio.to_thread(deploy, args.new)

        result = await under_load(args, ask, change)
        answers["new"] = [(await text_of(prompt))[1] for prompt in prompts]
    kinds = [[told[index] == answers[name][index % KINDS] for name in ("old", "new")] for index in told]
    result["mixed answers"] = float(sum(not any(kind) for kind in kinds))
    result["answers of the new version"] = float(sum(new and not old for old, new in kinds))
    return result


if __name__ == "__main__":
    sys.exit(main())
