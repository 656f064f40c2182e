"""Baked prefixes of an artifact: KV blocks of known prompts, and the facts for and against their use (data).

``optkit/prefix.json`` has the facts, ``optkit/prefix.safetensors`` the blocks. Prompts that begin alike share blocks,
so the blocks form a tree: node i has the tokens of a block and a parent of a smaller number, or -1.

==========  ============================  ======================================================
tensor      shape, dtype                  content
==========  ============================  ======================================================
``tokens``  [nodes, block_size] int32     token ids of each node
``parent``  [nodes] int32                 the node before, or -1
``rows.g``  [nodes] int32                 row of the node's KV in ``kv.g``, or -1 behind a window
``kv.g``    [rows, block bytes] uint8     KV of the layers of group g (``optkit.graph.kv_layout``)
==========  ============================  ======================================================

All numbers are checked before a block reaches native code, which indexes by block numbers of the engine alone. KV bytes
are values: wrong bytes give wrong answers and no wild access. The KV is used only with equal facts: the weights (a
digest), the layout of the KV cache, and the versions of the runtime; else a line in the log names the difference.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from optkit.artifact.manifest import INTERNAL
from optkit.errors import UserError
from optkit.untrusted_json import Name, Schema, Size, check, parse_bounded, read_bounded

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FACTS, BLOCKS = "prefix.json", "prefix.safetensors"
FACTS_FILE, BLOCKS_FILE = f"{INTERNAL}/{FACTS}", f"{INTERNAL}/{BLOCKS}"
MAX_FACTS_BYTES = 1 << 20
MAX_NODES = 1 << 16
MAX_PROMPTS = 64
WEIGHTS = re.compile(r"(?:optkit/(?:packed|constants)|[^/]+)\.safetensors|optkit/graph\.json", re.ASCII)

Small = Annotated[int, Field(ge=0, le=1 << 20)]


class GroupEntry(Schema):
    """A group of layers with a common block table."""

    window: Size
    fraction: Annotated[int, Field(ge=1, le=1 << 20)]
    layers: Annotated[list[Small], Field(max_length=4096)]


class LayoutEntry(Schema):
    """The KV cache: tokens of a block, groups of layers, bytes of a token in each buffer.

    ``order`` is the order of the bytes in a block; files without it were written when there were rows alone on CPUs.
    """

    block_size: Annotated[int, Field(ge=1, le=1024)]
    dtype: Name
    order: Name = "rows"
    groups: Annotated[list[GroupEntry], Field(min_length=1, max_length=4096)]
    slots: Annotated[list[Annotated[list[Size], Field(max_length=2)]], Field(max_length=4096)]


class PromptEntry(Schema):
    """A baked prompt: the name, the tokens of its whole blocks, and the last node."""

    name: Name
    tokens: Size
    node: Annotated[int, Field(ge=0, lt=MAX_NODES)]


class PrefixFacts(Schema):
    """``optkit/prefix.json``."""

    version: Literal[1]
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    computed_by: dict[Name, Name]
    layout: LayoutEntry
    prompts: Annotated[list[PromptEntry], Field(min_length=1, max_length=MAX_PROMPTS)]


@dataclass(frozen=True)
class BakedNode:
    """A block of tokens: ``parent`` is a smaller number or -1, ``rows`` the row of each group or -1."""

    tokens: tuple[int, ...]
    parent: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class BakedPrefix:
    """The baked prefixes of an artifact, checked.

    Attributes:
        kv: the rows [rows, block bytes] uint8 of each group, mapped from the file.
    """

    facts: PrefixFacts
    nodes: tuple[BakedNode, ...]
    kv: tuple[Tensor, ...]

    def path(self, node: int) -> list[int]:
        """The nodes from a root to ``node``."""
        found = [node]
        while self.nodes[found[-1]].parent >= 0:
            found.append(self.nodes[found[-1]].parent)
        return found[::-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV."""
        return sum(kv.nbytes for kv in self.kv)


def weights_digest(manifest: Mapping[str, Any]) -> str:
    """A hash of the artifact's graph and weights, by the manifest's hashes of their files."""
    files = {name: entry["sha256"] for name, entry in manifest["files"].items() if is_weights(name)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def is_weights(name: str) -> bool:
    """True for the name of a file with weights or the graph."""
    return WEIGHTS.fullmatch(name) is not None


def computed_here() -> dict[str, str]:
    """The versions that decide on the bits of KV: of optkit, torch and the instruction set of the kernels."""
    from optkit.artifact.measured_on import kernels_here
    from optkit.machine.target import torch_version
    from optkit.version import VERSION

    return {"optkit": VERSION, "torch": torch_version(), "kernels": kernels_here()}


def has_prefix(directory: Path) -> bool:
    """True where an artifact has baked prefixes."""
    return (directory / FACTS_FILE).is_file()


def read_facts(directory: Path) -> PrefixFacts:
    """The facts about the baked prefixes of an artifact.

    Raises:
        UserError: the file is missing or damaged.
    """
    file = directory / FACTS_FILE
    data = parse_bounded(
        read_bounded(file, MAX_FACTS_BYTES), str(file), "the baked prefixes can't be read: it is"
    )
    facts = check(PrefixFacts, data, str(file), "the baked prefixes can't be read")
    if len({prompt.name for prompt in facts.prompts}) < len(facts.prompts):
        raise damaged(file, "two prompts have the same name")
    return facts


def read_prefix(directory: Path, vocab_size: int) -> BakedPrefix:
    """The baked prefixes of an artifact for a model of ``vocab_size`` token ids.

    Raises:
        UserError: a file is missing or damaged, or the numbers contradict each other.
    """
    return read_blocks(directory, read_facts(directory), vocab_size)


def read_blocks(directory: Path, facts: PrefixFacts, vocab_size: int) -> BakedPrefix:
    """``read_prefix`` with the ``facts`` read before.

    Raises:
        UserError: as ``read_prefix``.
    """
    from safetensors import SafetensorError, safe_open

    from optkit.checkpoint.safetensors_header import read_header

    file = directory / BLOCKS_FILE
    groups = range(len(facts.layout.groups))
    expected = {"tokens": "I32", "parent": "I32"}
    expected |= {f"rows.{g}": "I32" for g in groups} | {f"kv.{g}": "U8" for g in groups}
    found = {name: info.dtype for name, info in read_header(file).items()}
    if found != expected:
        raise damaged(file, "it has other tensors than its groups of layers need")
    try:
        with safe_open(file, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise damaged(file, f"{error!s:.200}") from error
    nodes = checked_nodes(tensors, facts, vocab_size, file)
    for prompt in facts.prompts:
        if prompt.node >= len(nodes):
            raise damaged(file, f"the prompt {prompt.name!r:.100} ends at a node that does not exist")
    prefix = BakedPrefix(facts, nodes, tuple(tensors[f"kv.{g}"] for g in groups))
    for prompt in facts.prompts:
        if len(prefix.path(prompt.node)) * facts.layout.block_size != prompt.tokens:
            raise damaged(file, f"the prompt {prompt.name!r:.100} has another number of tokens")
    return prefix


def checked_nodes(
    tensors: Mapping[str, Tensor], facts: PrefixFacts, vocab_size: int, file: Path
) -> tuple[BakedNode, ...]:
    """The nodes in ``tensors``.

    Raises:
        UserError: a shape, a parent, a row or a token is out of range.
    """
    tokens, parent = tensors["tokens"], tensors["parent"]
    size, count = facts.layout.block_size, tokens.shape[0] if tokens.ndim else 0
    if not 0 < count <= MAX_NODES or tokens.shape != (count, size) or parent.shape != (count,):
        raise damaged(file, "tokens and parents have wrong shapes")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise damaged(file, f"a token is not in the vocabulary of {vocab_size}")
    parents = parent.tolist()
    if any(not -1 <= before < node for node, before in enumerate(parents)):
        raise damaged(file, "a block does not follow an earlier one")
    block_bytes = size * sum(map(sum, facts.layout.slots))
    rows = []
    for group in range(len(facts.layout.groups)):
        row, kv = tensors[f"rows.{group}"], tensors[f"kv.{group}"]
        kept = sorted(number for number in row.tolist() if number != -1) if row.shape == (count,) else [-2]
        if kv.ndim != 2 or kv.shape[1] != block_bytes or kept != list(range(kv.shape[0])):
            raise damaged(file, f"the rows of group {group} do not fit the blocks")
        rows.append(row.tolist())
    return tuple(
        BakedNode(tuple(ids), before, tuple(of))
        for ids, before, of in zip(tokens.tolist(), parents, zip(*rows, strict=True), strict=True)
    )


def damaged(file: Path, what: str) -> UserError:
    return UserError(what, where=str(file), fix="make the artifact again; do not serve this one")


def mismatch(facts: PrefixFacts, weights: str, layout: LayoutEntry) -> str | None:
    """The reason why baked KV must not be used with such weights, KV layout and versions, or None."""
    if facts.weights != weights:
        return "the weights are not those that computed it"
    mine, given = facts.layout, layout
    if mine.block_size != given.block_size:
        return f"it has blocks of {mine.block_size} tokens, the server's KV cache of {given.block_size}"
    if mine.dtype != given.dtype:
        return f"it is {mine.dtype}, the server's KV cache {given.dtype}"
    if mine.order != given.order:
        return f"its bytes lie in the order '{mine.order}', those of the server's KV cache '{given.order}'"
    if mine != given:
        return "the layers lie otherwise in the server's KV cache"
    here = computed_here()
    for name in here:
        made = facts.computed_by.get(name, "unknown")
        if made != here[name]:
            return f"it was computed with {name} {made}, here is {here[name]}"
    return None


def write_prefix(
    directory: Path,
    facts: PrefixFacts,
    nodes: list[BakedNode],
    kv: list[list[np.ndarray]],
) -> None:
    """Write the baked prefixes to the artifact in ``directory``; ``kv`` has the rows [block bytes] of each group."""
    import numpy as np
    import torch

    from optkit.checkpoint.safetensors_writer import save_tensors

    tensors = {
        "tokens": torch.tensor([node.tokens for node in nodes], dtype=torch.int32),
        "parent": torch.tensor([node.parent for node in nodes], dtype=torch.int32),
    }
    block_bytes = facts.layout.block_size * sum(map(sum, facts.layout.slots))
    for group, rows in enumerate(kv):
        tensors[f"rows.{group}"] = torch.tensor([node.rows[group] for node in nodes], dtype=torch.int32)
        stacked = np.stack(rows) if rows else np.zeros((0, block_bytes), np.uint8)
        tensors[f"kv.{group}"] = torch.from_numpy(stacked)
    save_tensors(tensors, directory / BLOCKS_FILE)
    text = json.dumps(facts.model_dump(), indent=1) + "\n"
    (directory / FACTS_FILE).write_text(text, "utf-8")
