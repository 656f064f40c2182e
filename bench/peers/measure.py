"""Start the servers and take the rounds.

Servers start in sequence, with the variables of the run's instruction set in their environment. Each start is timed
to the first token, then the server is frozen until its turn. Rounds go workload by workload and, within a workload,
server by server (A B C, A B C, ...). Compared runs lie within a minute or two, and the machine's drift cancels in
ratios taken within a round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from bench.peers.isa import with_variables
from bench.peers.peer import Model, Peer, Progress, reason
from bench.peers.process_group import freeze, peak_memory, thaw, used_avx512
from bench.peers.result import Measured, ServerReport
from bench.peers.workloads import START, warmup
from optkit.bench import client, servers, workload
from optkit.bench.environment import busy, environment
from optkit.bench.records import clock
from optkit.bench.result import BenchResult, Turn
from optkit.bench.run import SETTLE
from optkit.errors import UserError
from optkit.machine.load import load_average
from optkit.machine.target import usable_cores

AWAKE_TIMEOUT = 10.0  # seconds that a thawed server gets to answer again
PROBE = workload.WorkloadConfig(num_prompts=1, input_len=1, output_len=1, seed=6)
SLOW_START = 30.0  # seconds; a server that needs longer is started once
STARTS = 3
QUIET_TIMEOUT = 600.0  # seconds to wait for a quiet machine


@dataclass
class Live:
    """A running server."""

    name: str
    server: servers.RunningServer
    model: str
    batches: bool = True
    warm_since: float = 0.0  # on the clock of the records

    @property
    def group(self) -> int:
        return self.server.process.pid

    def takes(self, config: workload.WorkloadConfig) -> bool:
        """False for a workload with several clients on a server that answers one request at a time."""
        return self.batches or config.max_concurrency == 1

    def send(self, load: workload.RequestSchedule) -> list[Any]:
        return client.run_workload(self.server.url, self.model, load)

    @contextmanager
    def turn(self) -> Any:
        """Let the server run for the body; otherwise the server is frozen.

        Yields the reason for a missing answer, or None.
        """
        with suppress(ProcessLookupError):
            thaw(self.group)
        problem = self._wait_awake()
        time.sleep(SETTLE)
        try:
            yield problem
        finally:
            with suppress(ProcessLookupError):
                freeze(self.group)

    def _wait_awake(self) -> str | None:
        """Wait until /health and a completion of a single token are answered. Return the last reason for a failure, or
        None.

        A thawed server may take its own processes for dead until the processes have answered.
        """
        deadline = clock() + AWAKE_TIMEOUT
        while (problem := self._asleep()) and clock() < deadline:
            time.sleep(0.05)
        return problem

    def _asleep(self) -> str | None:
        if self.server.process.poll() is not None:
            return f"the server exited with code {self.server.process.returncode}"
        if not servers.healthy(self.server.url):
            return "/health does not answer 200"
        (record,) = self.send(workload.build(PROBE, range(8)))
        return None if record.ok else f"a completion of one token fails: {record.error or 'no token'}"


class Run:
    """A run over all servers. Each server is started ``starts`` times at most, once a round."""

    def __init__(
        self,
        model: Model,
        workloads: Mapping[str, workload.WorkloadConfig],
        rounds: int,
        ids: Sequence[int],
        progress: Progress,
        starts: int = STARTS,
    ) -> None:
        self.model, self.workloads, self.ids, self.progress = model, workloads, ids, progress
        self.rounds, self.starts = rounds, min(rounds, starts)

    def measure(self, peers: Sequence[Peer], skipped: Mapping[str, str]) -> Measured:
        """Start every peer, take every round, stop everything.

        A peer that does not start is added to ``skipped``. The requests of a peer that dies later fail.

        Raises:
            UserError: no server could be started.
        """
        measured = Measured(self.model.name, environment(), dict(skipped))
        with self.serving(peers, measured) as live:
            self._rounds(live, measured)
        return measured

    @contextmanager
    def serving(self, peers: Sequence[Peer], measured: Measured) -> Iterator[list[Live]]:
        """Every peer's server, warmed up and frozen; settings, start times and peak memory go into ``measured``.

        Raises:
            UserError: no server could be started.
        """
        with ExitStack() as stack:
            live = [server for peer in peers if (server := self._try_start(peer, stack, measured))]
            if not live:
                raise UserError(f"no server could be started: {'; '.join(measured.skipped.values())}")
            yield live
            for server in live:
                report = measured.servers[server.name]
                report.peak_memory = peak_memory(server.group)
                report.used_avx512 = used_avx512(server.group, clock() - server.warm_since)

    def _rounds(self, live: Sequence[Live], measured: Measured) -> None:
        """Take all rounds into ``measured.results``."""
        for name, config in self.workloads.items():
            sides = [server.name for server in live if server.takes(config)]
            measured.results[name] = BenchResult(config, sides, environment=measured.environment)
        for round_ in range(self.rounds):
            for name, config in self.workloads.items():
                load = workload.build(config, self.ids, round_)
                for server in live:
                    if server.takes(config):
                        self.progress(f"round {round_ + 1} of {self.rounds}, {name}: {server.name}")
                        measured.results[name].turns.append(take(server, round_, load))

    def _try_start(self, peer: Peer, stack: ExitStack, measured: Measured) -> Live | None:
        try:
            return self._start(peer, stack, measured)
        except UserError as error:
            measured.skipped[peer.name] = reason(error)
            self.progress(f"{peer.name}: skipped, {measured.skipped[peer.name]}")
            return None

    def _start(self, peer: Peer, stack: ExitStack, measured: Measured) -> Live:
        """Start ``peer`` ``starts`` times, or once if starting takes long.

        The last start stays, warmed up and frozen.
        """
        seconds: list[float] = []
        while True:
            self.progress(f"{peer.name}: start {len(seconds) + 1}")
            with ExitStack() as attempt:
                live, taken = self._first_token(peer, attempt, len(seconds))
                seconds.append(taken)
                if len(seconds) < self.starts and taken < SLOW_START:
                    continue
                settings = peer.settings(self.model, live.server.url)
                measured.servers[peer.name] = ServerReport(
                    settings, seconds, options=dict(peer.options), trials=dict(peer.trials)
                )
                self.progress(f"{peer.name}: warm-up")
                for config in filter(live.takes, self.workloads.values()):
                    live.send(workload.build(warmup(config), self.ids))
                live.warm_since = clock()
                stack.push(attempt.pop_all())
            stack.callback(_thaw, live)
            freeze(live.group)
            return live

    def _first_token(self, peer: Peer, stack: ExitStack, attempt: int) -> tuple[Live, float]:
        """A started server, and the seconds from the start of the process to the first token."""
        port = servers.free_port()
        command = with_variables(peer.command(self.model, port), peer.isa)
        begin = clock()
        server = stack.enter_context(servers.started(command, port))
        live = Live(peer.name, server, servers.model_name(server.url), peer.batches)
        (record,) = live.send(workload.build(START, self.ids, attempt))
        if record.first_token is None or not record.ok:
            raise UserError(f"its first request failed: {record.error}", where=peer.name)
        return live, record.first_token - begin


def wait_until_quiet(progress: Progress) -> None:
    """Wait until the load average is that of an idle machine, or until ``QUIET_TIMEOUT`` has passed.

    The result repeats the load average, with a warning on a busy machine.
    """
    deadline = clock() + QUIET_TIMEOUT
    while (warning := busy({"load_average": load_average(), "cores": usable_cores()})) and clock() < deadline:
        progress(f"waiting for a quiet machine: {warning}")
        time.sleep(10)


def _thaw(live: Live) -> None:
    """Thaw a server before stopping: a frozen process does not receive SIGTERM."""
    with suppress(ProcessLookupError):
        thaw(live.group)


def take(server: Live, round_: int, load: workload.RequestSchedule) -> Turn:
    """A workload of a round on a server."""
    with server.turn() as asleep:
        average = load_average()
        records = server.send(load)
    return Turn(server.name, round_, average, records, [*waited(asleep), *client.problems(records, load)])


def waited(asleep: str | None) -> list[str]:
    """The problem of a server that did not answer at the begin of its turn, if any."""
    return [f"after {AWAKE_TIMEOUT:g} s of its turn it did not answer: {asleep}"] if asleep else []
