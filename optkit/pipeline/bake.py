"""KV of known prompts for an artifact (the pass ``bake_prefix``): computed by the artifact's own runtime, twice.

A new process opens the written artifact as a server does and computes each prompt at low priority, as
``POST /v1/cache/warm`` does. Then the cache is emptied, and an ordinary request with the prompt computes the KV again,
in steps of other sizes, alone in its batch. Both must agree in every bit; KV that depends on the steps would make
answers depend on where the KV came from, and is not stored. The memory of the process is the KV of the prompts beside
the weights.

``python -m optkit.pipeline.bake DIRECTORY THREADS`` is the new process: prompts as JSON on standard input, the result
on standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from optkit.errors import UserError
from optkit.text.prompt_files import KnownPrompt, prefix_ids, read_prompts
from optkit.text.stable_prefix import whole_blocks

if TYPE_CHECKING:
    from optkit.artifact.open import Artifact
    from optkit.passes.resolve import Resolved
    from optkit.pipeline.records import PassRecord
    from optkit.runtime.engine import Engine
    from optkit.runtime.runner import ModelRunner

PASS = "bake_prefix"
TEMPLATE = "chat template"
TIMEOUT_SECONDS = 3600
LEAST_STEP, MOST_STEP = 101, 160  # tokens of the second computation's steps: unlike those of the first
STEP_TOKENS = 2048
DEPENDS = "depends on the steps that compute it, as PyTorch's layers and attention may: use native kernels"

Blocks = list[list[np.ndarray | None]]  # of each block of a prompt: the bytes of each group, or None


def check_prompts(resolved: Sequence[Resolved], directory: Path) -> None:
    """Refuse prompts that can't be baked, before a run.

    Args:
        directory: the model; without a ``tokenizer.json`` only the files of prompts are checked.

    Raises:
        UserError: a file is missing or is no prompt, there are too many, or the chat template refuses one.
    """
    from optkit.artifact.prefix import MAX_PROMPTS
    from optkit.passes.resolve import members
    from optkit.text.tokenizer import Tokenizer

    files: list[str] = []
    for item in resolved:
        for entry in members(item):
            files += entry.config.prompts if entry.pass_class.name == PASS else ()
    prompts = read_prompts(list(dict.fromkeys(files)))
    if len(prompts) >= MAX_PROMPTS:
        raise UserError(f"{len(prompts)} prompts, at most {MAX_PROMPTS - 1} can be baked", where=PASS)
    if prompts and (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_directory(directory)
        for prompt in prompts:
            prefix_ids(tokenizer, prompt)


def baked_records(records: Sequence[PassRecord]) -> list[PassRecord]:
    """The records of ``bake_prefix`` in effect."""
    return [record for record in records if record.name.partition("@")[0] == PASS and record.in_effect]


def planned_prompts(records: Sequence[PassRecord]) -> list[KnownPrompt]:
    """The prompts to compute, by the passes in effect.

    Raises:
        UserError: as ``read_prompts``.
    """
    files = dict.fromkeys(file for record in records for file in record.config["prompts"])
    template = any(record.config["template"] for record in records)
    return [*read_prompts(list(files)), *[KnownPrompt(TEMPLATE, [])] * template]


def bake(directory: Path, prompts: Sequence[KnownPrompt]) -> dict[str, Any]:
    """Compute the KV of ``prompts`` by the artifact in ``directory``, and write it there.

    Returns:
        For the record: tokens by prompt and bytes; or ``refusal``, the reason why nothing was written.

    Raises:
        UserError: the artifact can't be run, or its chat template refuses a prompt.
    """
    command = [sys.executable, "-m", "optkit.pipeline.bake", str(directory), str(torch.get_num_threads())]
    text = json.dumps([prompt._asdict() for prompt in prompts]).encode()
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the KV of known prompts took more than {TIMEOUT_SECONDS} s", where=PASS) from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise UserError(f"the KV of known prompts could not be computed: {reason[:300]}", where=PASS)
    return json.loads(done.stdout)


# -- the new process -----------------------------------------------------------------------------------------


def compute(directory: Path, prompts: Sequence[KnownPrompt], threads: int) -> dict[str, Any]:
    """Compute, compare and write; the result of ``bake``."""
    from optkit.artifact.open import Artifact
    from optkit.artifact.prefix import read_prefix
    from optkit.runtime.baked import COMPILED, is_compiled
    from optkit.text.tokenizer import Tokenizer

    artifact = Artifact.open(directory, verify=False)
    size, longest = artifact.recipe.runtime.block_size, artifact.meta().max_model_len
    tokenizer = Tokenizer.from_directory(directory)
    ids = {prompt.name: whole_blocks(prefix_ids(tokenizer, prompt), size) for prompt in prompts}
    for name, tokens in ids.items():
        if len(tokens) >= longest:
            what = f"the prompt has {len(tokens)} tokens, the model's context {longest}"
            raise UserError(what, where=name, fix="leave it out of bake_prefix")
    counts = {name: len(tokens) for name, tokens in ids.items()}
    ids = {name: tokens for name, tokens in ids.items() if tokens}
    if not ids:
        return {"tokens": counts, "refusal": f"no prompt fills a block of {size} tokens"}
    engine = engine_for(artifact, max(map(len, ids.values())), threads)
    if is_compiled(runner_of(engine)):
        return {"tokens": counts, "refusal": COMPILED}
    tree = Tree(len(engine.config.kv_windows))
    for name, tokens in ids.items():
        first, second = warmed(engine, tokens), computed_again(engine, tokens)
        if not equal(first, second):
            return {"tokens": counts, "refusal": f"the KV of {name} {DEPENDS}"}
        tree.add(name, tokens, first)
    num_bytes = tree.write(artifact, engine)
    read_prefix(directory, engine.runner.vocab_size)  # what a server will check
    return {"tokens": counts, "kv_bytes": num_bytes}


def engine_for(artifact: Artifact, num_tokens: int, threads: int) -> Engine:
    """The engine of the artifact, with room for a prompt of ``num_tokens`` tokens."""
    from optkit.graph.kv_layout import kv_layout
    from optkit.recipe.engine_options import engine_options
    from optkit.runtime.factory import load_engine

    layout, size = kv_layout(artifact.meta().states), artifact.recipe.runtime.block_size
    blocks = 4 * len(layout.groups) * (num_tokens // size + STEP_TOKENS // size + 2)
    given = {
        "kv_cache_bytes": layout.num_bytes(blocks, size),
        "max_num_seqs": 1,
        "max_num_batched_tokens": STEP_TOKENS,
        "enable_prefix_caching": True,
        "pinned_cache_share": 0.9,
        "scheduling_policy": "fcfs",
        "enforce_ttft_slo": False,
        "queue_timeout": 0,
        "saved_start": False,  # the directory gets another manifest
        "kv_offload_bytes": 0,
        "speculative_model": "none",
        "threads": threads,
    }
    return load_engine(str(artifact.directory), engine_options(artifact.recipe, given))


def runner_of(engine: Engine) -> ModelRunner:
    """The runner of an engine on a CPU."""
    from optkit.runtime.runner import ModelRunner

    if not isinstance(engine.runner, ModelRunner):
        raise UserError("KV is stored for CPUs alone", where=PASS)
    return engine.runner


def warmed(engine: Engine, ids: Sequence[int]) -> Blocks:
    """The KV of ``ids`` by a request without an answer; the cache is empty afterwards.

    Raises:
        UserError: the KV could not be computed whole.
    """
    from optkit.runtime.prefill import Prefill
    from optkit.runtime.types import EngineRequest, SamplingParams

    sampling, prefill = SamplingParams(max_tokens=1), Prefill(pin=PASS)
    engine.add_request(
        EngineRequest(
            request_id=PASS,
            prompt_ids=tuple(ids),
            sampling=sampling,
            arrival=time.monotonic(),
            prefill=prefill,
        )
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (end,) = outputs
    if end.error or end.num_prefilled != len(ids):
        what = end.error or f"{end.num_prefilled} of {len(ids)} tokens were kept"
        raise UserError(f"the KV could not be computed: {what}", where=PASS)
    (pin,) = engine.scheduler.kv.pins
    held, runner = set(pin.blocks), runner_of(engine)
    found: Blocks = [
        [
            read(runner, kv.block, group) if kv.block is not None and kv.block in held else None
            for group, kv in enumerate(node.kv)
        ]
        for node in pin.nodes
    ]
    engine.unpin(PASS)
    engine.reset_prefix_cache()
    return found


def read(runner: ModelRunner, block: int, group: int) -> np.ndarray:
    """The bytes of ``block`` with the KV of ``group``; rows without a layer have 0, and not those of earlier owners."""
    data = runner.read_block(block)
    found = np.zeros_like(data)
    for part in runner.layout.bytes_of(group, runner.block_size):
        found[part] = data[part]
    return found


def computed_again(engine: Engine, ids: Sequence[int]) -> Blocks:
    """The KV of ``ids`` by an ordinary request, in steps of another size."""
    from optkit.runtime.types import SamplingParams

    scheduler, few = engine.scheduler, engine.config.few_tokens
    total, least = len(ids) + 1, max(LEAST_STEP, 2 * few)
    sizes = range(least, max(MOST_STEP, 2 * least))
    step = next((size for size in sizes if total % size == 0 or total % size > few), least)
    whole = scheduler.config
    scheduler.config = msgspec.structs.replace(whole, max_num_batched_tokens=step)
    try:
        engine.generate([[*ids, ids[0]]], SamplingParams(max_tokens=1, temperature=0.0))
    finally:
        scheduler.config = whole
    return warmed(engine, ids)  # found in the cache


def equal(first: Blocks, second: Blocks) -> bool:
    """True where all bytes agree."""
    return all(
        (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


class Tree:
    """The blocks of prompts, shared where prompts begin alike."""

    def __init__(self, num_groups: int) -> None:
        self.tokens: list[tuple[int, ...]] = []
        self.parents: list[int] = []
        self.rows: list[list[int]] = []  # of each node: the row in each group
        self.kv: list[list[np.ndarray]] = [[] for _ in range(num_groups)]
        self.ends: dict[str, int] = {}
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(self, name: str, ids: Sequence[int], blocks: Blocks) -> None:
        """Add the prompt ``name``."""
        size, node = len(ids) // len(blocks), -1
        for place, kv in enumerate(blocks):
            key = (node, tuple(ids[place * size : (place + 1) * size]))
            node = self._numbers.setdefault(key, len(self.tokens))
            if node == len(self.tokens):
                self.parents.append(key[0])
                self.tokens.append(key[1])
                self.rows.append([-1] * len(self.kv))
            for group, data in enumerate(kv):
                if data is not None and self.rows[node][group] < 0:
                    self.rows[node][group] = len(self.kv[group])
                    self.kv[group].append(data)
        self.ends[name] = node

    def write(self, artifact: Artifact, engine: Engine) -> int:
        """Write the files of the artifact; returns the bytes of the KV."""
        from optkit.artifact.prefix import (
            BakedNode,
            PrefixFacts,
            PromptEntry,
            computed_here,
            weights_digest,
            write_prefix,
        )
        from optkit.runtime.baked import layout_entry

        runner = runner_of(engine)
        each = zip(self.tokens, self.parents, map(tuple, self.rows), strict=True)
        nodes = [BakedNode(tokens, parent, rows) for tokens, parent, rows in each]
        facts = PrefixFacts(
            version=1,
            weights=weights_digest(artifact.manifest),
            computed_by=computed_here(),
            layout=layout_entry(runner),
            prompts=[
                PromptEntry(name=name, tokens=self.length(node) * runner.block_size, node=node)
                for name, node in self.ends.items()
            ],
        )
        write_prefix(artifact.directory, facts, nodes, self.kv)
        return sum(block.nbytes for group in self.kv for block in group)

    def length(self, node: int) -> int:
        """Blocks from the root to ``node``."""
        count = 0
        while node >= 0:
            node, count = self.parents[node], count + 1
        return count


def main(directory: str, threads: str) -> None:
    """Run as the new process. Standard output has the result alone; prints of libraries go to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        torch.set_num_threads(int(threads))
        prompts = [KnownPrompt(**prompt) for prompt in json.load(sys.stdin)]
        try:
            out.write(json.dumps(compute(Path(directory), prompts, int(threads))))
        except UserError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
