"""Baked prefixes of an artifact in an engine: copied into the KV pool, published for all requests, and pinned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from optkit.artifact.prefix import (
    BakedPrefix,
    GroupEntry,
    LayoutEntry,
    has_prefix,
    mismatch,
    read_blocks,
    read_facts,
    weights_digest,
)
from optkit.graph.states import KV_DTYPES
from optkit.runtime.kv.pins import PinRefused

if TYPE_CHECKING:
    from optkit.artifact.open import Artifact
    from optkit.runtime.engine import Engine
    from optkit.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

PIN = "artifact:"  # begins the names of the pins
COMPILED = "compiled layers round otherwise, and run in steps of some sizes alone"


def is_compiled(runner: ModelRunner) -> bool:
    """True where compiled layers run some of the steps."""
    return getattr(runner.model, "special", None) is not None


def layout_entry(runner: ModelRunner) -> LayoutEntry:
    """The layout of the runner's KV cache as data."""
    layout, block_size = runner.layout, runner.block_size
    specs = [spec for group in layout.groups for spec in group.layers]
    if runner.pools.device == "cpu":
        order = "interleaved" if any(spec.is_interleaved(block_size) for spec in specs) else "rows"
    else:
        order = "planes" if any(KV_DTYPES[spec.dtype][1] for spec in specs) else "rows"
    groups = [
        GroupEntry(window=g.window, fraction=g.fraction, layers=[spec.layer for spec in g.layers])
        for g in layout.groups
    ]
    slots = [list(slot) for slot in layout.slots]
    return LayoutEntry(block_size=block_size, dtype=runner.kv_dtype, order=order, groups=groups, slots=slots)


def adopt_baked(engine: Engine, artifact: Artifact, runner: ModelRunner) -> None:
    """Pin the baked prefixes of ``artifact`` in ``engine``; a line in the log where they can't be used.

    Raises:
        UserError: the files are damaged.
    """
    if not has_prefix(artifact.directory):
        return
    facts = read_facts(artifact.directory)
    layout = layout_entry(runner)
    reason = mismatch(facts, weights_digest(artifact.manifest), layout)
    if reason is None and is_compiled(runner):
        reason = COMPILED
    if reason is None and not engine.config.max_pinned_blocks:
        reason = "nothing may be pinned (--no-enable-prefix-caching, or --pinned-cache-share 0)"
    if reason is not None:
        logger.warning("the baked KV of known prompts is not used: %s", reason)
        return
    prefix = read_blocks(artifact.directory, facts, runner.vocab_size)
    for prompt in facts.prompts:
        try:
            adopt_prompt(engine, runner, prefix, f"{PIN}{prompt.name}", prompt.node)
        except PinRefused as refusal:
            fix = "raise --kv-cache-bytes or --pinned-cache-share"
            logger.warning("the baked KV of %s is not used: %s; %s", prompt.name, refusal, fix)


def adopt_prompt(engine: Engine, runner: ModelRunner, prefix: BakedPrefix, name: str, last: int) -> None:
    """Pin the prefix that ends at node ``last`` under ``name``.

    Raises:
        PinRefused: there is no room.
    """
    kv, numbers = engine.scheduler.kv, prefix.path(last)
    nodes = [prefix.nodes[number] for number in numbers]
    path = [(node.tokens, [row >= 0 for row in node.rows]) for node in nodes]
    new = {id(place) for place in kv.adopt(name, path, engine.scheduler.clock())}
    pinned = next(pin for pin in kv.pins if pin.name == name)
    for node, baked in zip(pinned.nodes, nodes, strict=True):
        for group, place in enumerate(node.kv):
            if id(place) in new and place.block is not None:
                runner.write_block(place.block, prefix.kv[group][baked.rows[group]].numpy())
