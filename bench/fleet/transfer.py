"""KV blocks from one engine to another: bytes a second of a core, and the fate of flipped bits.

    python -m bench.fleet.transfer                    # 1 core for both engines, blocks as of SmolLM2-135M with int8 KV
    python -m bench.fleet.transfer --dtype float32 --cores 2 --flips 1000

The source is another process. Both engines have KV pools of the real size, filled with random bytes, and no
model: nothing is computed. A round fetches a prefix of ``--tokens`` tokens over a new connection, with proofs,
checksums and leases, into an emptied cache. *MB a core second* are the bytes of KV by the
processor time of both processes: the work of a core, also on a busy machine; *MB/s* is the median by the clock, where
``--cores 1`` has both processes on a core.

For the flips a relay between the engines flips a random bit of the stream in each connection. Each block in the
target's cache is compared with the source's. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from optkit.fleet.kv_wire import Identity, TransferError
from optkit.fleet.transfer import Pulled, TransferClient, TransferServer, parse_address
from optkit.graph.states import KVSpec
from optkit.runtime.engine import Engine
from optkit.runtime.kv.exchange import BlockExchange, BlockKV, Incoming
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.serve.supervisor import cpu_seconds

SECRET, IDENTITY = b"b" * 32, Identity("bench", "bench", 32)
BLOCK_SIZE = 32
SECONDS = 30.0
LEAST = {"MB a core second": 600.0}
MOST = {"corrupt blocks used": 0.0}


def engine(layers: int, dtype: str, num_tokens: int) -> Engine:
    """An engine with the KV pool of a model of 3 heads of 64 channels, and without the model."""
    states = tuple(KVSpec(layer, 3, 64, 64, dtype) for layer in range(layers))
    model: Any = SimpleNamespace(
        states=states, kv_specs=states, vocab_size=49152, max_model_len=8192, weight_bytes=0, device="cpu",
        workspace_bytes=lambda tokens, rows: 0,
    )  # fmt: skip
    num_blocks = 2 * num_tokens // BLOCK_SIZE + 8
    config = SchedulerConfig(max_model_len=8192, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    made = Engine(ModelRunner(model, num_blocks, BLOCK_SIZE), config)
    made.share_digests(SECRET)
    return made


@cache
def prompt(num_tokens: int) -> list[int]:
    """The tokens of the prefix, and a token to compute."""
    dice = random.Random(num_tokens)
    return [dice.randrange(49152) for _ in range(num_tokens + 1)]


def data_of(number: int, size: int) -> np.ndarray:
    """The KV of a block: random bytes, the same in both processes."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def fill(made: Engine, num_tokens: int) -> None:
    """Publish the blocks of the prefix."""
    exchange = BlockExchange(made)
    incoming = Incoming(exchange, "", prompt(num_tokens))
    tokens, size = prompt(num_tokens), exchange.block_bytes[0]
    for number in range(len(incoming.wanted)):
        ids = tuple(tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
        incoming.accept(number, BlockKV(b"", ids, (0,), data_of(number, size)))
    incoming.close()


def serve(layers: int, dtype: str, num_tokens: int) -> None:
    """The source: prints the address, and ends with standard input."""
    made = engine(layers, dtype, num_tokens)
    fill(made, num_tokens)
    print(TransferServer(BlockExchange(made), SECRET, IDENTITY).address, flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def source(layers: int, dtype: str, num_tokens: int) -> Iterator[tuple[str, int]]:
    """A source in another process; gives the address and the process id."""
    sizes = [f"--layers={layers}", f"--dtype={dtype}", f"--tokens={num_tokens}"]
    command = [sys.executable, "-m", "bench.fleet.transfer", "--serve", *sizes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.stdin.close()


def fetch(made: Engine, address: str, num_tokens: int, seconds: float = SECONDS) -> Pulled:
    """Fetch the prefix into the cache of ``made``."""
    exchange = BlockExchange(made)
    incoming = Incoming(exchange, "", prompt(num_tokens))
    try:
        client = TransferClient(exchange, address, SECRET, IDENTITY, SECONDS)
        try:
            return client.pull(incoming, seconds)
        finally:
            client.close()
    except (OSError, TransferError) as error:
        return Pulled(reason=str(error))
    finally:
        incoming.close()


def wrong_blocks(made: Engine, num_tokens: int) -> int:
    """The blocks in the cache whose KV is not the source's."""
    exchange = BlockExchange(made)
    cache = exchange.kv.cache
    assert cache is not None
    wrong = 0
    for number, digest in enumerate(cache.digests("", prompt(num_tokens)[:-1], [])):
        node = cache.get(digest)
        block = None if node is None else exchange.read(node, (0,))
        wrong += block is not None and bool((block.data != data_of(number, exchange.block_bytes[0])).any())
    return wrong


class Relay:
    """Passes bytes on to ``address``, and flips a bit of the answer in each connection.

    Args:
        places: bit of the stream to flip, for each connection; -1 flips none.
    """

    def __init__(self, address: str, places: Iterator[int]) -> None:
        self._address, self._places = parse_address(address), places
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_passed = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for place in self._places:
            ours, _ = self._listener.accept()
            theirs = socket.create_connection(self._address)
            threading.Thread(target=self._pass, args=(ours, theirs), daemon=True).start()
            self._flip(theirs, ours, place)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def _flip(self, source: socket.socket, target: socket.socket, place: int) -> None:
        passed = 0
        with contextlib.suppress(OSError), source, target:
            while part := bytearray(source.recv(1 << 16)):
                if passed <= place // 8 < passed + len(part):
                    part[place // 8 - passed] ^= 1 << place % 8
                target.sendall(part)
                passed += len(part)
        self.num_passed = passed


def speed(layers: int, dtype: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """The rate of ``rounds`` fetches, at the median."""
    made = engine(layers, dtype, num_tokens)
    with source(layers, dtype, num_tokens) as (address, pid):
        fetch(made, address, num_tokens)
        rates: list[float] = []
        before = cpu_seconds(pid) + time.process_time()
        for _ in range(rounds):
            made.reset_prefix_cache()
            pulled = fetch(made, address, num_tokens)
            if pulled.reason:
                raise RuntimeError(pulled.reason)
            rates.append(pulled.num_bytes / pulled.seconds / 1e6)
        used = cpu_seconds(pid) + time.process_time() - before
    assert not wrong_blocks(made, num_tokens)
    return {
        "MB a core second": rounds * pulled.num_bytes / used / 1e6,
        "MB/s": statistics.median(rates),
        "slowest MB/s": min(rates),
        "MB a round": pulled.num_bytes / 1e6,
    }


def flips(number: int, num_tokens: int = 256) -> dict[str, Any]:
    """Fetch ``number`` times, each time with a flipped bit."""
    made, dice = engine(1, "int8", num_tokens), random.Random(3)
    with source(1, "int8", num_tokens) as (address, _):
        plain = Relay(address, iter([-1]))
        fetch(made, plain.address, num_tokens)
        while not plain.num_passed:
            threading.Event().wait(0.01)
        relay = Relay(address, (dice.randrange(8 * plain.num_passed) for _ in range(number)))
        wrong = used = rejected = 0
        for _ in range(number):
            made.reset_prefix_cache()
            pulled = fetch(made, relay.address, num_tokens, seconds=0.2)
            wrong += wrong_blocks(made, num_tokens)
            used += pulled.num_blocks
            rejected += pulled.num_rejected
    return {
        "flips": number,
        "corrupt blocks used": wrong,
        "whole blocks used": used,
        "found by checksum": rejected,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line("bench.fleet.transfer", __doc__)
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (30)")
    parser.add_argument("--dtype", default="int8", help="of the KV: int8, float32, bfloat16 (int8)")
    parser.add_argument("--tokens", type=int, default=1920, help="tokens of the prefix (1920)")
    parser.add_argument("--rounds", type=int, default=21, help="fetches (21)")
    parser.add_argument("--cores", type=int, default=1, help="cores for both processes together (1)")
    parser.add_argument("--flips", type=int, default=1000, help="flipped bits (1000); 0: none")
    parser.add_argument("--save-result", type=Path, help="write the figures to a JSON file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(list(arguments))


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.serve:
        serve(args.layers, args.dtype, args.tokens)
        return 0
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    result = speed(args.layers, args.dtype, args.tokens, args.rounds)
    if args.flips:
        result |= flips(args.flips)
    missed = beyond(result, MOST, LEAST)
    print_numbers(result, missed, 24, "10.1f", MOST)
    if args.save_result:
        args.save_result.write_text(
            json.dumps({"arguments": vars(args) | {"save_result": None}} | result, indent=1)
        )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
