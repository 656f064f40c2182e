"""State slots: the recurrent states of running requests, and checkpoints of states for the prefix cache.

The pool of a recurrent state has ``num_slots`` slots, a slot for each running request, and further ``num_checkpoints``
slots with copies. A recurrent state has no rows for single tokens, but stands for all tokens so far, and only a
copy taken at the right token serves another request. So a checkpoint belongs to a ``Node`` of the prefix cache, as the
state after the node's last token, and lives no longer than the node. A hit ends at a node with a checkpoint; the KV of
nodes behind it is computed again (``num_lost`` counts the tokens).

A checkpoint is taken where a request stands at the end of a published block:

- at the last full block of the prompt before the final token; the scheduler cuts a chunk to end there (``cut``);
- where the prompt left the prompts before it: as many tokens as KV was found for, without a checkpoint. The next prompt
  with the same beginning finds a checkpoint;
- in the answer, at each end of a block, in the place of the request's checkpoint before: the next turn begins there.

When all are taken the least recently used checkpoint is given away, unless it is pinned (``optkit.runtime.kv.pins``).
Plain bookkeeping: copies are listed, in order, and the runner makes the copies before the next step. The order
suffices: nothing but a copy or a step writes to a slot.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from optkit.runtime.kv.prefix_cache import Node
from optkit.runtime.types import NO_SLOT, Request, StateCopy

logger = logging.getLogger(__name__)


class StateSlots:
    """The slots of all requests; a model without recurrent states has ``num_slots`` 0, and nothing is done.

    Args:
        num_slots: requests that run at once.
        num_checkpoints: checkpoints kept; 0 for an engine without a prefix cache.
        block_size: tokens of a node of the prefix cache.

    Attributes:
        pinned: nodes whose checkpoints are not given away.
        changed: called with a node that got or lost a checkpoint.
    """

    def __init__(self, num_slots: int, num_checkpoints: int, block_size: int) -> None:
        self.num_slots, self.block_size = num_slots, block_size
        self.num_checkpoints = num_checkpoints if num_slots else 0
        self.num_lost, self.pinned = 0, set[Node]()
        self.changed: Callable[[Node], None] = _ignore
        self._free = list(range(num_slots))[::-1]
        self._unused = list(range(num_slots, num_slots + self.num_checkpoints))[::-1]
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by checkpoint, the least recently used first
        self._copies: list[StateCopy] = []
        self._told = False

    @property
    def num_used(self) -> int:
        """Slots of running requests."""
        return self.num_slots - len(self._free)

    @property
    def num_saved(self) -> int:
        """Checkpoints with content."""
        return len(self._nodes)

    @property
    def is_full(self) -> bool:
        """True where a request that needs a slot would get none."""
        return bool(self.num_slots) and not self._free

    def resumes_at(self, node: Node) -> bool:
        """True where a request can take over a cached prefix that ends at ``node``."""
        return not self.num_slots or node.checkpoint is not None

    def assign(self, request: Request, found: int) -> None:
        """Give ``request``, admitted with ``request.nodes``, a slot with the state after them.

        Args:
            found: blocks with KV in the cache, with or without a checkpoint.
        """
        if not self.num_slots:
            return
        request.state_slot = self._free.pop()
        if request.nodes:
            checkpoint = request.nodes[-1].checkpoint
            assert checkpoint is not None, "a hit without a state"
            self._nodes.move_to_end(checkpoint)
            self._copies.append(StateCopy(checkpoint, request.state_slot))
        request.num_lost = (found - len(request.nodes)) * self.block_size
        last = (len(request.token_ids) - 1) // self.block_size * self.block_size
        borders = {found * self.block_size, last} if request.num_lost else {last}
        request.borders = tuple(sorted(borders)) if self.num_checkpoints else ()

    def cut(self, request: Request, num_new: int) -> int:
        """``num_new`` tokens of a chunk, or as many as end at the next place for a checkpoint."""
        if not request.borders:
            return num_new
        ahead = (border - request.num_computed for border in request.borders)
        return min([num_new, *(distance for distance in ahead if distance > 0)])

    def save(self, request: Request, num_computed: int) -> None:
        """Take a checkpoint if ``request`` stands at the end of a published block where one is wanted."""
        nodes = request.nodes
        if not request.borders or not nodes or len(nodes) * self.block_size != num_computed:
            return
        node, in_answer = nodes[-1], num_computed > request.borders[-1]
        if node.checkpoint is not None:
            self._nodes.move_to_end(node.checkpoint)
        elif in_answer or num_computed in request.borders:
            if in_answer and request.rolling is not None and request.rolling not in self.pinned:
                self.drop(request.rolling)
            self._take(node, request.state_slot)
            request.rolling = node if in_answer else None

    def drop(self, node: Node) -> None:
        """Forget the checkpoint of ``node``, if there is one."""
        if node.checkpoint is not None:
            del self._nodes[node.checkpoint]
            self._unused.append(node.checkpoint)
            node.checkpoint = None
            self.changed(node)

    def release(self, request: Request) -> None:
        """Take the slot of ``request``; its checkpoints stay."""
        if request.state_slot != NO_SLOT:
            self._free.append(request.state_slot)
            request.state_slot, request.borders, request.rolling = NO_SLOT, (), None

    def count(self, request: Request) -> None:
        """Count the tokens of a new request with cached KV but no checkpoint; log the first case."""
        self.num_lost += request.num_lost
        if request.num_lost and not self._told:
            self._told = True
            logger.info(
                "%d cached tokens of a prompt are computed again: there is no checkpoint of the recurrent state so "
                "far on (optkit:prefix_cache_lost_tokens_total counts them; --state-checkpoints keeps more)",
                request.num_lost,
            )

    def take_copies(self) -> tuple[StateCopy, ...]:
        """The copies to make before the next step of the model, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if a slot is lost or owned twice."""
        if not self.num_slots:
            return
        owned = [request.state_slot for request in requests]
        assert sorted([*owned, *self._free]) == list(range(self.num_slots))
        checkpoints = range(self.num_slots, self.num_slots + self.num_checkpoints)
        assert sorted([*self._nodes, *self._unused]) == list(checkpoints)
        assert all(node.checkpoint == slot for slot, node in self._nodes.items())

    def _take(self, node: Node, slot: int) -> None:
        """Copy the state in ``slot`` to a checkpoint of ``node``."""
        if not self._unused:
            self.drop(next(kept for kept in self._nodes.values() if kept not in self.pinned))
        node.checkpoint = self._unused.pop()
        self._nodes[node.checkpoint] = node
        self._copies.append(StateCopy(slot, node.checkpoint))
        self.changed(node)


def _ignore(node: Node) -> None:
    """The default of ``StateSlots.changed``."""
