"""Prefix cache: the KV blocks of the beginnings of prompts.

KV of a token depends only on the token and the tokens before it. So a *full* block with computed KV can serve every
request with the same first tokens. Shared blocks form a tree: a ``Node`` is the tokens of a block after the parent's.
A new request walks the tree from the root, as far as the tokens agree.

A node is found by a digest, chained over the parent's digest and the block's tokens (``optkit.runtime.kv.digests``).
The chain begins with a secret and the request's *salt*, so digests reveal nothing to others, and requests of
different salts (tenants) share neither KV nor the time saved. A digest is only a shortcut: on a hit the node's tokens
and the identity of the parent are compared, so two prompts with equal digests can cost each other a hit, but never
get each other's KV (as in CVE-2025-25183).

*Common* nodes, of prefixes in the artifact, belong to no salt: every request finds them, by the tokens. Nodes after a
common node have digests with a salt again, so tenants share the artifact's own prefixes and nothing else.

The KV of a node is in a block for each group of layers (``optkit.graph.kv_layout``), a ``NodeKV``: in a ``block`` of
the pool, in a ``host_block`` of the offload store, in both, or lost. A node lives while a group has the KV, or while a
later node of the path lives: a prompt needs the whole path, and of layers with a window only the KV at the path's
end. Nodes without a parent in the tree cannot be reached, and age out of the pool like every unused node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optkit.runtime.kv.digests import COMMON_SALT, Digest, DigestChain, sha256


@dataclass(eq=False, slots=True)
class NodeKV:
    """The places of the KV of ``node`` in the layers of a group."""

    node: Node
    block: int | None = None
    host_block: int | None = None

    @property
    def is_kept(self) -> bool:
        """True where the KV is in the pool or in the offload store."""
        return self.block is not None or self.host_block is not None


@dataclass(eq=False, slots=True)
class Node:
    """A full block of tokens after ``parent``'s, and the places of the KV. The parent of a first block is the salt.

    Attributes:
        kv: the places of the KV, for each group of layers.
        checkpoint: the slot with the recurrent state after the last token, if there is one.
        num_children: nodes in the tree with this node as the parent.
        is_held: a prompt can take the node over; as last told to the log of changes (``optkit.runtime.kv.changes``).

    Nodes are compared by identity: a node made again after a drop is another node.
    """

    digest: bytes
    parent: Node | str
    tokens: tuple[int, ...]
    kv: tuple[NodeKV, ...] = field(default=(), repr=False)
    checkpoint: int | None = None
    num_children: int = 0
    is_held: bool = False


class PrefixCache:
    """The tree of nodes, without the owners of the blocks.

    Args:
        block_size: tokens of a node.
        digest: the hash; tests use a colliding hash.
        num_groups: groups of layers, each with KV of its own.
    """

    def __init__(self, block_size: int, digest: Digest = sha256, num_groups: int = 1) -> None:
        self.block_size, self.num_groups = block_size, num_groups
        self._digest, self._chain = digest, DigestChain(block_size, digest=digest)
        self._nodes: dict[bytes, Node] = {}
        self._common: dict[tuple[Node | None, tuple[int, ...]], Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def digests(self, salt: str, token_ids: Sequence[int], known: list[bytes]) -> list[bytes]:
        """Digests of all full blocks of ``token_ids``. Extends ``known``, the digests of the first blocks."""
        return self._chain.extend(salt, token_ids, known)

    def rekey(self, secret: bytes) -> None:
        """Begin the chain with ``secret``, shared with other processes, instead of a random secret.

        Raises:
            ValueError: the secret has a wrong length, or requests have added nodes.
        """
        chain, nodes = DigestChain(self.block_size, secret, self._digest), self.nodes
        if not all(map(self.is_common, nodes)):
            raise ValueError("the digests of cached prompts cannot change")
        self._chain, self._nodes = chain, {}
        for node in nodes:  # each after its parent
            before = node.parent.digest if isinstance(node.parent, Node) else chain.root(node.parent)
            node.digest = chain.after(before, node.tokens)
            self._nodes[node.digest] = node

    def get(self, digest: bytes) -> Node | None:
        """The node with ``digest``, of any parent; for a caller that compares the tokens by itself."""
        return self._nodes.get(digest)

    def find(self, digest: bytes, parent: Node | str, tokens: tuple[int, ...]) -> Node | None:
        """The node of ``tokens`` after ``parent``, or None; never another prompt's."""
        node = self._nodes.get(digest)
        return node if node and node.parent == parent and node.tokens == tokens else None

    def add(self, digest: bytes, parent: Node | str, tokens: tuple[int, ...]) -> Node | None:
        """A new node for a newly filled block; None if the digest belongs to another node."""
        if digest in self._nodes:
            return None
        node = self._nodes[digest] = Node(digest, parent, tokens)
        node.kv = tuple(NodeKV(node) for _ in range(self.num_groups))
        if isinstance(parent, Node):
            parent.num_children += 1
        return node

    def add_common(self, parent: Node | None, tokens: tuple[int, ...]) -> Node:
        """A new node for all requests, after the common ``parent``; the node that is there, if there is one."""
        found = self.find_common(parent, tokens)
        if found is None:
            before = parent.digest if parent is not None else self._chain.root(COMMON_SALT)
            digest = self._chain.after(before, tokens)
            found = self.add(digest, COMMON_SALT if parent is None else parent, tokens)
            assert found is not None, "two nodes with a digest"
            self._common[parent, tokens] = found
        return found

    def find_common(self, parent: Node | None, tokens: tuple[int, ...]) -> Node | None:
        """The common node of ``tokens`` after the common ``parent``, or None."""
        return self._common.get((parent, tokens)) if self._common else None

    def is_common(self, node: Node) -> bool:
        """True for a node for all requests."""
        parent = node.parent if isinstance(node.parent, Node) else None
        return self.find_common(parent, node.tokens) is node

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.digest) is node

    def orphan(self, digest: bytes) -> Node | None:
        """The node of ``digest`` if the parent is not in the tree: unreachable, but in the way of a new node."""
        node = self._nodes.get(digest)
        return node if node and isinstance(node.parent, Node) and node.parent not in self else None

    def drop(self, node: Node) -> None:
        """Take ``node`` out of the tree; dropping twice is harmless."""
        if node in self:
            del self._nodes[node.digest]
            if self.is_common(node):
                del self._common[node.parent if isinstance(node.parent, Node) else None, node.tokens]
            if isinstance(node.parent, Node):
                node.parent.num_children -= 1

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the tree."""
        return list(self._nodes.values())
