"""Time of a router's decision, and memory of the index.

    python -m bench.fleet decision

Each replica has a full prefix cache; each prompt shares a prefix of a random length with each cache. Digests are
made before the clock starts (``--with-digests`` counts the digests), and options to fetch KV from a peer count
(``--local-only``: none). A server writes the log line of a decision once the request has been sent, so its time stands
apart: formatted and written to the null device. Exit code 1 for a p99 of decisions over ``MOST_SECONDS`` or more than
``MOST_BYTES`` a block.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bench.figures import command_line
from optkit.fleet.index import Index
from optkit.fleet.placement import Placement
from optkit.fleet.replica import BlockChanges, Mark, ReplicaReport
from optkit.fleet.router import Router, log_decision
from optkit.runtime.kv.digests import DigestChain, new_secret
from optkit.runtime.types import EngineRequest, SamplingParams

MOST_SECONDS, MOST_BYTES = 0.5e-3, 150.0
BLOCK_SIZE = 32
SIZES = (1_000, 5_000, 20_000, 44_000, 100_000, 700_000)  # some just after the table has grown
PREFILL = (0.006, 0.09, 0.175, 0.35, 0.72)


def full_report(name: str, digests: Sequence[bytes], num_blocks: int, sequence: int) -> ReplicaReport:
    """The first report of a replica with ``digests``."""
    return ReplicaReport(
        replica_id=name,
        version="1",
        queue_seconds=random.random(),
        prefill_seconds=PREFILL,
        kv_blocks_total=num_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=12_288 * BLOCK_SIZE,
        kv_layout="layout",
        peer_address=f"{name}:1",
        num_running=random.randrange(8),
        decode_seconds=0.01,
        changes=BlockChanges(Mark(name, sequence), is_snapshot=True, added=tuple(digests)),
    )


def request(number: int, tokens: Sequence[int]) -> EngineRequest:
    return EngineRequest(
        request_id=f"chatcmpl-{number}",
        prompt_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=64),
        arrival=0.0,
    )


def decision_seconds(
    *,
    replicas: int,
    num_tokens: int,
    num_blocks: int,
    decisions: int,
    with_digests: bool,
    placement: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Seconds [decisions, 2] of each decision and of its log line, by ``clock``."""
    draw, secret = random.Random(0), new_secret()
    chain = DigestChain(BLOCK_SIZE, secret)
    prompts = [[draw.randrange(49152) for _ in range(num_tokens)] for _ in range(64)]
    known = [chain.extend("", tokens, []) for tokens in prompts]
    router = Router(secret, tpot=0.05)
    router.alternatives = Placement(0.05) if placement else None
    for number in range(replicas):
        held = [digest for digests in known for digest in digests[: draw.randrange(len(digests) + 1)]]
        other = [os.urandom(32) for _ in range(num_blocks - len(held))]
        router.update(full_report(f"replica-{number}", held + other, num_blocks, num_blocks), Mark())
    gc.collect()
    gc.freeze()  # as a server does once it is loaded
    times = np.empty((decisions, 2))
    for number in range(decisions):
        tokens = prompts[draw.randrange(len(prompts))]
        prompt = router.prompt(request(number, tokens))
        if not with_digests:
            prompt.digests(BLOCK_SIZE)
        start = clock()
        decision = router.choose(prompt)
        chosen = clock()
        log_decision(decision)
        times[number] = chosen - start, clock() - chosen
        router.answered(decision)
        if number % 50 == 0:  # reports go on, or every replica would be stale
            for name, last in list(router.reports.items()):
                since = router.mark(name)
                mark = Mark(name, since.sequence + 1)
                fresh = BlockChanges(mark, added=(os.urandom(32),), dropped=())
                router.update(msgspec.structs.replace(last, changes=fresh), since)
    return times


def bytes_a_block(num_blocks: int) -> float:
    """Bytes of the index for each block of a replica with ``num_blocks``."""
    changes = BlockChanges(
        Mark("a", 1), is_snapshot=True, added=tuple(os.urandom(32) for _ in range(num_blocks))
    )
    gc.collect()
    tracemalloc.start()
    try:
        index = Index()
        index.apply("a", changes, Mark(), budget=num_blocks, now=0.0)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / len(index)
    finally:
        tracemalloc.stop()


def main(arguments: list[str]) -> int:
    parser = command_line("bench.fleet decision", __doc__)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--blocks", type=int, default=20_000, help="of each replica's cache")
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks of an index to measure")
    parser.add_argument("--with-digests", action="store_true")
    parser.add_argument("--local-only", action="store_true", help="without options to fetch KV")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, for a busy machine")
    args = parser.parse_args(arguments)
    with open(os.devnull, "w", encoding="utf-8") as null:
        logging.basicConfig(level=logging.INFO, stream=null)
        times = decision_seconds(
            replicas=args.replicas,
            num_tokens=args.tokens,
            num_blocks=args.blocks,
            decisions=args.decisions,
            with_digests=args.with_digests,
            placement=not args.local_only,
            clock=time.thread_time if args.cpu_time else time.perf_counter,
        )
    parts = [*times.T, times.sum(axis=1)]
    (p50, p99, worst), line, both = (np.quantile(part, (0.5, 0.99, 1.0)) for part in parts)
    kind = "processor" if args.cpu_time else "wall"
    print(
        f"{args.decisions} decisions, {args.replicas} replicas, {args.tokens} tokens, {kind} time: "
        f"p50 {1e3 * p50:.3f} ms, p99 {1e3 * p99:.3f} ms, longest {1e3 * worst:.2f} ms "
        f"(bound {1e3 * MOST_SECONDS:.1f} ms at p99)"
    )
    print(
        f"log line, once the request has been sent: p50 {1e3 * line[0]:.3f} ms, p99 {1e3 * line[1]:.3f} ms; "
        f"with the decision p50 {1e3 * both[0]:.3f} ms, p99 {1e3 * both[1]:.3f} ms"
    )
    sizes = {count: bytes_a_block(count) for count in args.sizes}
    print("index:", ", ".join(f"{size:.0f} bytes a block of {count:,}" for count, size in sizes.items()))
    return 0 if p99 <= MOST_SECONDS and max(sizes.values()) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
