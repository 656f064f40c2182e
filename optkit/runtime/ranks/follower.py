"""The process of a rank other than 0: load the rank's share, then run each step of rank 0.

``optkit.runtime.ranks.leader`` starts the process as ``python -m optkit.runtime.ranks.follower``. A failed step ends
the process, and with it the engine: the ranks would be out of step. The process also ends with rank 0: the socket
closes, and on Linux the kernel kills the process.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable

from optkit.errors import UserError
from optkit.machine import logs
from optkit.machine.heap import keep_freed_memory
from optkit.machine.parent import die_with_parent, leave_signals_to_parent
from optkit.runtime.ranks import messages
from optkit.runtime.ranks.messages import Allocate, Failed, Load, Loaded, RankGone, Step

logger = logging.getLogger(__name__)


class Follower:
    """A loaded rank without KV pools."""

    def __init__(self, load: Load, communicator: object) -> None:
        import torch

        from optkit.artifact.open import Artifact
        from optkit.runtime.ranks.model import load_rank

        torch.set_num_threads(load.num_threads)
        artifact = Artifact.open(load.artifact_dir, verify=False)
        self.model = load_rank(artifact, communicator, load.kind, trust_code=load.trust_code)  # type: ignore[arg-type]

    def allocate(self, pools: Allocate) -> Callable[[Step], None]:
        """Allocate KV pools of the rank; the function for a step on the pools."""
        from optkit.graph.kv_layout import layout_of
        from optkit.runtime.runner import ModelRunner

        layout = layout_of(self.model.states, pools.windows)
        runner = ModelRunner(self.model, pools.num_blocks, pools.block_tokens, layout=layout)

        return lambda message: runner.run(message.arrays())


def serve(sock: socket.socket, region_fd: int) -> None:
    """Load, answer, and run steps until the end of rank 0.

    Raises:
        RankGone: rank 0 closed the socket.
    """
    from optkit.runtime.ranks.model import communicator

    load = messages.TO_RANK.decode(messages.receive(sock))
    if not isinstance(load, Load):
        raise RankGone
    try:
        follower = Follower(
            load, communicator(load.rank, load.size, load.num_threads, region_fd, load.meeting)
        )
    except UserError as error:
        messages.send(sock, messages.frame(Failed(error.what, error.where, error.fix)))
        raise RankGone from error
    keep_freed_memory()
    messages.send(sock, messages.frame(Loaded(follower.model.weight_bytes)))
    step: Callable[[Step], None] | None = None
    while True:
        message = messages.TO_RANK.decode(messages.receive(sock))
        if isinstance(message, Allocate):
            step = follower.allocate(message)
        elif isinstance(message, Step) and step is not None:
            step(message)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m optkit.runtime.ranks.follower")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--region", type=int, required=True, help="the inherited shared memory")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    args = parser.parse_args(argv)
    leave_signals_to_parent()
    die_with_parent(args.parent)
    logs.configure(source="rank")
    try:
        serve(socket.socket(fileno=args.fd), args.region)
    except RankGone:
        return 0
    except Exception:
        logger.exception("a rank failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
