"""Publisher of KV events over ZMQ, in the engine process (``optkit.runtime.kv.events`` has the format).

A message has three parts: topic, number (8 bytes, big-endian), and the batch. Numbers count up from 0. A gap in the
numbers is a loss; a receiver sends the first missing number to the replay endpoint and gets the kept messages, and
last the number -1. The engine's thread only puts changes into a queue. When the queue is full, changes are dropped and
a number is left out, so receivers notice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

import msgspec

from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.runtime.kv.events import (
    OPTION,
    AllBlocksCleared,
    EventBatch,
    KVEventsConfig,
    events_of,
    parse_config,
)
from optkit.runtime.kv.prefix_cache import Node

if TYPE_CHECKING:
    from optkit.runtime.engine import Engine

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
GATHER_SECONDS = 0.002  # changes of a step go into one message
MOST_CHANGES = 4096  # of a message
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """A thread that publishes changes of blocks.

    Raises:
        UserError: an endpoint cannot be used, or the package is not installed.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        need_extra("kv-events", OPTION)
        import zmq

        self._config, self._topic = config, config.topic.encode()
        self._changes: Queue[tuple[Node, bool]] = Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._lost = threading.Event()
        self._ends = threading.Event()
        context: Any = zmq.Context.instance()
        self._sockets: list[Any] = []
        try:
            self._socket = context.socket(zmq.PUB)
            self._sockets.append(self._socket)
            self._socket.set_hwm(config.hwm)
            (self._socket.bind if config.binds else self._socket.connect)(config.endpoint)
            self._replay: Any = None
            if config.replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._sockets.append(self._replay)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._close()
            what = f"the endpoint can't be used: {error}"
            raise UserError(what, where=f"{OPTION} {config.endpoint}", fix="choose another port") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def note(self, node: Node, held: bool) -> None:
        """Publish a change of a block soon; called by the engine's thread, never waits."""
        try:
            self._changes.put_nowait((node, held))
        except Full:
            self._lost.set()

    def close(self) -> None:
        """Publish what waits, and end the thread."""
        self._ends.set()
        self._thread.join(timeout=2.0)
        self._close()

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=200)

    def _run(self) -> None:
        self._send(EventBatch(time.time(), [AllBlocksCleared()]))
        while not (self._ends.is_set() and self._changes.empty()):
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._answer()
                changes = self._gathered()
                if self._lost.is_set():
                    self._lost.clear()
                    self._number += 1
                    logger.warning(
                        "KV events were lost: the queue of %d was full", self._config.max_queue_size
                    )
                if changes:
                    self._send(EventBatch(time.time(), events_of(changes)))
            except Exception:
                logger.exception("KV events could not be published")
                time.sleep(POLL_SECONDS)

    def _gathered(self) -> list[tuple[Node, bool]]:
        """The waiting changes, and the changes of the next moment; none after ``POLL_SECONDS`` without a change."""
        try:
            found = [self._changes.get(timeout=POLL_SECONDS)]
        except Empty:
            return []
        time.sleep(GATHER_SECONDS)
        while len(found) < MOST_CHANGES:
            try:
                found.append(self._changes.get_nowait())
            except Empty:
                break
        return found

    def _send(self, batch: EventBatch) -> None:
        number, body = self._number, msgspec.msgpack.encode(batch)
        self._number += 1
        self._kept.append((number, body))
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), body))

    def _answer(self) -> None:
        """Send the messages from the asked number on again."""
        parts = self._replay.recv_multipart()
        if len(parts) != 3 or len(parts[2]) != 8:
            logger.warning("a request to replay KV events was not understood")
            return
        receiver, first = parts[0], int.from_bytes(parts[2], "big")
        for number, body in self._kept:
            if number >= first:
                self._replay.send_multipart((receiver, b"", number.to_bytes(8, "big"), body))
        self._replay.send_multipart((receiver, b"", END, b""))


def publish(engine: Engine, config_text: str) -> Publisher | None:
    """Publish the KV events of ``engine`` from now on, by the text of an option; None where the text turns them off.

    Raises:
        UserError: a wrong configuration, a model without such events, or an endpoint that cannot be used.
    """
    config = parse_config(config_text)
    if not config.is_on:
        return None
    if not engine.config.enable_prefix_caching:
        raise UserError("KV events need the prefix cache", where=OPTION, fix="leave one of the options out")
    if engine.config.num_state_slots:
        raise UserError(
            "KV events do not describe recurrent states, by which this model continues a prompt", where=OPTION
        )
    publisher = Publisher(config)
    logger.warning("KV events, with the token ids of prompts, go to whoever listens at %s", config.endpoint)
    for node in engine.scheduler.kv.held_nodes():
        publisher.note(node, True)
    engine.scheduler.kv.log.listener = publisher.note
    return publisher
