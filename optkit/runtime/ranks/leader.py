"""Rank 0: starts the other ranks, sends each step, and ends when another rank ends."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optkit.cancellation import uncancellable
from optkit.errors import UserError
from optkit.graph.kv_layout import KVLayout
from optkit.kernels.collectives import Communicator
from optkit.kernels.cpu import native
from optkit.runtime.ranks import messages
from optkit.runtime.ranks.messages import Allocate, Failed, Load, RankGone, Step
from optkit.runtime.ranks.model import RankModel
from optkit.runtime.ranks.size import Sharing
from optkit.runtime.runner import ModelRunner
from optkit.runtime.types import Batch, EngineLost

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0


@dataclass
class Ranks:
    """The processes of ranks 1 to ``size`` - 1.

    Attributes:
        weight_bytes: of all ranks, rank 0 included.
        folder: of ``meeting``, private; None for ranks with shared memory.
        lost: the reason for the unwanted end of a rank.
    """

    size: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    weight_bytes: int = 0
    folder: tempfile.TemporaryDirectory[str] | None = None
    lost: str | None = None
    communicator: Communicator | None = None
    closing: bool = False

    @staticmethod
    def start(
        artifact_dir: str, shared: Sharing, threads: int, region_fd: int, *, trust_code: bool = False
    ) -> Ranks:
        """Start the processes, which load their shares meanwhile."""
        ranks = Ranks(shared.size)
        if not native.available():
            ranks.folder = tempfile.TemporaryDirectory("-optkit")
        for rank in range(1, shared.size):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", "optkit.runtime.ranks.follower", f"--fd={theirs.fileno()}"]
            command += [f"--region={region_fd}", f"--parent={os.getpid()}"]
            with theirs:
                inherited = [theirs.fileno(), region_fd]
                process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=2)
            ranks.processes.append(process)
            ranks.sockets.append(ours)
            threading.Thread(target=ranks.watch, args=(rank, process), daemon=True).start()
            load = Load(artifact_dir, rank, shared.size, threads, trust_code, ranks.meeting, shared.kind)
            messages.send(ours, messages.frame(load))
        return ranks

    @property
    def meeting(self) -> str:
        """The file in which ranks without shared memory meet, or nothing."""
        return os.path.join(self.folder.name, "meeting") if self.folder else ""

    def watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a rank; then exchanges of rank 0 fail at once."""
        code = process.wait()
        if not self.closing and self.lost is None:
            self.lost = f"rank {rank} ended with code {code}"
            fail = getattr(self.communicator, "fail", None)
            if fail is not None:
                fail()

    def wait_loaded(self) -> int:
        """Wait until all ranks have loaded; the bytes of all their weights.

        Raises:
            UserError: a rank could not load its share.
        """
        total = 0
        for rank, sock in enumerate(self.sockets, 1):
            try:
                answer = messages.FROM_RANK.decode(messages.receive(sock))
            except RankGone:
                raise UserError(f"rank {rank} ended while it loaded", where="ranks") from None
            if isinstance(answer, Failed):
                raise UserError(answer.what, where=answer.where, fix=answer.fix)
            total += answer.weight_bytes
        return total

    def send(self, message: Allocate | Step) -> None:
        """Send ``message`` to all ranks.

        Raises:
            EngineLost: a rank is gone.
        """
        data = messages.frame(message)
        self.check()
        try:
            for sock in self.sockets:
                messages.send(sock, data)
        except RankGone:
            raise EngineLost(self.lost or "a rank closed its socket") from None

    def check(self) -> None:
        """Raise EngineLost where a rank has ended."""
        if self.lost is not None:
            raise EngineLost(self.lost)

    def close(self, *, at_once: bool = False) -> None:
        """End the ranks, which leave by themselves unless ``at_once``."""
        self.closing = True
        for sock in self.sockets:
            sock.close()
        for process in self.processes:
            if at_once or self.lost is not None:
                process.kill()  # it may wait for the lost rank in an exchange
            try:
                process.wait(JOIN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.folder:
            self.folder.cleanup()


class RankedRunner(ModelRunner):
    """The runner of rank 0: each step also runs in the other ranks.

    Working memory is that of rank 0 for each rank, and so are KV pools, unless ``kv_bytes`` has the bytes of all.
    """

    def __init__(
        self,
        model: RankModel,
        num_blocks: int,
        block_size: int,
        ranks: Ranks,
        layout: KVLayout,
        kv_bytes: int | None = None,
    ) -> None:
        super().__init__(model, num_blocks, block_size, layout=layout)
        self.ranks, self.num_ranks, self.weight_bytes = ranks, ranks.size, ranks.weight_bytes
        self.kv_bytes = self.kv_bytes * ranks.size if kv_bytes is None else kv_bytes
        self.workspace_bytes = lambda num_tokens, num_rows: (
            ranks.size * model.workspace_bytes(num_tokens, num_rows)
        )
        self.is_multi_step = False  # the other ranks take each step from here
        ranks.send(Allocate(num_blocks, block_size, self.kv_windows))

    def execute(self, batch: Batch) -> Any:
        """See ``ModelRunner.execute``. A step is not cancelled, since the other ranks run to the end.

        Raises:
            EngineLost: a rank is gone, or the step failed.
        """
        try:
            with uncancellable():
                return super().execute(batch)
        except Exception as error:
            if self.ranks.lost is None:  # else the reason is known, and is no fault of the step
                logger.exception("a step of %d ranks failed", self.ranks.size)
            raise EngineLost(self.ranks.lost or f"a step failed: {error}") from error

    def run(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Run the graph in all ranks."""
        self.ranks.send(Step.of(arrays))
        return super().run(arrays)
