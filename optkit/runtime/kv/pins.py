"""Pins: prefixes whose KV is never evicted.

A pin is an owner of blocks like a block table: it holds a reference to the KV of every node of the prefix that a
request would take over (``BlockManager.share``), and its nodes stay in the tree. In groups of layers with a window a
pin holds the blocks of the last window, so a prompt finds the prefix whole or, if the prompt leaves it earlier, not at
all. Of a recurrent state a pin holds the checkpoint at the end of the prefix, with the same effect.

There are at most ``MAX_PINS`` pins. Together they hold at most ``max_blocks`` blocks, each counted once, and
``max_checkpoints`` checkpoints. A *lease* is a pin with an end: leases give way, the oldest first, when a new pin needs
the room.

Liveness: a request is served only if it fits the pool beside the pins, and a pin is made only if each known request
still fits afterwards (``optkit.runtime.scheduling.prefill_only``). So the first request in rank always advances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.kv.prefix_cache import Node
from optkit.runtime.kv.states import StateSlots
from optkit.runtime.prefill import MAX_PINS, NO_ROOM, TOO_MANY_PINS, PinInfo


class PinRefused(ValueError):
    """There is no room for a pin; the message is fit for the client."""


@dataclass(eq=False)
class Pin:
    """A pinned prefix.

    Attributes:
        cache_salt: of the requests that find the prefix; None for all requests.
        nodes: the whole path from the root of the tree.
        blocks: the blocks held, of all groups of layers.
        end: the time at which a lease ends; None for a pin without an end.
    """

    name: str
    cache_salt: str | None
    nodes: list[Node]
    blocks: list[int]
    created: float
    end: float | None = None

    def info(self, now: float, block_size: int, block_bytes: int) -> PinInfo:
        """The facts about the pin, for blocks of ``block_size`` tokens and ``block_bytes`` bytes."""
        return PinInfo(
            name=self.name,
            cache_salt=self.cache_salt,
            num_tokens=len(self.nodes) * block_size,
            num_bytes=len(self.blocks) * block_bytes,
            age=now - self.created,
            expires_in=None if self.end is None else max(0.0, self.end - now),
        )


class Room:
    """The blocks of pins after a new pin with ``blocks``, without the pins that have gone.

    Attributes:
        num_blocks: blocks of all pins, each counted once.
    """

    def __init__(self, owners: Counter[int], blocks: Sequence[int], gone: Sequence[Pin]) -> None:
        self._owners = owners.copy()
        self._owners.update(blocks)
        self.num_blocks = len(self._owners)
        for pin in gone:
            self.without(pin)

    def without(self, pin: Pin) -> None:
        """Count without ``pin``."""
        for block in pin.blocks:
            self._owners[block] -= 1
            self.num_blocks -= not self._owners[block]


class Pins:
    """The pins of a pool.

    Args:
        max_blocks: most blocks of all pins.
    """

    def __init__(self, blocks: BlockManager, states: StateSlots, max_blocks: int) -> None:
        self._blocks, self._states, self.max_blocks = blocks, states, max_blocks
        self.max_checkpoints = states.num_checkpoints // 2
        self._pins: dict[str, Pin] = {}  # the oldest first
        self._owners: Counter[int] = Counter()  # pins of each block
        self._nodes: Counter[Node] = Counter()  # pins of each node

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    @property
    def num_blocks(self) -> int:
        """Blocks held by pins, each counted once."""
        return len(self._owners)

    @property
    def tables(self) -> list[list[int]]:
        """The blocks of each pin."""
        return [pin.blocks for pin in self._pins.values()]

    def shared_by(self, nodes: Sequence[Node], groups: Sequence[int]) -> int:
        """The blocks held by pins among those of ``nodes`` in ``groups`` of layers."""
        return sum(node.kv[group].block in self._owners for node in nodes for group in groups)

    def up_to_an_end(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """``nodes``, the beginning of a path, up to the last node at which a pin ends."""
        ends = {pin.nodes[-1] for pin in self._pins.values()}
        return nodes[: max((place for place, node in enumerate(nodes, 1) if node in ends), default=0)]

    def add(self, pin: Pin, most: int) -> None:
        """Make ``pin``, in the place of an earlier pin of the name.

        Args:
            most: blocks that pins may hold at this moment, besides ``max_blocks``.

        Raises:
            PinRefused: pins without an end leave too little room, or are too many; an earlier pin of the name stays.
        """
        before = self._pins.get(pin.name)
        gone = [] if before is None else [before]
        leases = (p for p in self._pins.values() if p.end is not None and p is not before)
        room = Room(self._owners, pin.blocks, gone)
        while (
            (too_many := len(self._pins) - len(gone) >= MAX_PINS)
            or room.num_blocks > min(self.max_blocks, most)
            or self._too_many_ends(pin, gone)
        ):
            lease = next(leases, None)
            if lease is None:
                raise PinRefused(TOO_MANY_PINS if too_many else NO_ROOM)
            gone.append(lease)
            room.without(lease)
        for block in pin.blocks:
            self._blocks.share(block)
        self._owners.update(pin.blocks)
        self._nodes.update(pin.nodes)
        for each in gone:
            self.drop(each.name)
        self._pins[pin.name] = pin
        self._mark_checkpoints()

    def _too_many_ends(self, pin: Pin, gone: Sequence[Pin]) -> bool:
        """True where ``pin`` beside the pins without ``gone`` needs more checkpoints than there are."""
        if not self._states.num_slots:
            return False
        left = [other for other in self._pins.values() if other not in gone]
        return len({other.nodes[-1] for other in [*left, pin]}) > self.max_checkpoints

    def drop(self, name: str) -> bool:
        """End a pin; the KV stays cached until the room is needed. False where there is no such pin."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self._owners -= Counter(pin.blocks)
        self._nodes -= Counter(pin.nodes)
        self._mark_checkpoints()
        self._blocks.free(pin.blocks)
        return True

    def _mark_checkpoints(self) -> None:
        """Keep the checkpoints at the ends of pins from being given away."""
        self._states.pinned = {pin.nodes[-1] for pin in self._pins.values()}

    def drop_with(self, node: Node) -> list[str]:
        """End the pins of ``node``, whose KV is not to be used; returns their names."""
        names = [pin.name for pin in self._pins.values() if node in pin.nodes] if node in self else []
        for name in names:
            self.drop(name)
        return names

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        for pin in [p for p in self._pins.values() if p.end is not None and p.end <= now]:
            self.drop(pin.name)

    def check(self, is_in_tree: Callable[[Node], bool]) -> None:
        """Raise AssertionError if the counts disagree, or a pin lost a node or a block."""
        assert self._owners == Counter(block for pin in self._pins.values() for block in set(pin.blocks))
        assert self._nodes == Counter(node for pin in self._pins.values() for node in pin.nodes)
        for pin in self._pins.values():
            assert all(map(is_in_tree, pin.nodes)), "a pinned node left the tree"
            kept = {kv.block for node in pin.nodes for kv in node.kv}
            assert set(pin.blocks) <= kept, "a pin holds a block without content"
            assert self._states.resumes_at(pin.nodes[-1]), "a pin lost its checkpoint"
