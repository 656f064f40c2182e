"""Artifacts with a changed graph.json and correct hashes, and the result of commands on them in child processes.

``python -m tests.support.hostile_artifact DIRECTORY CASE ...`` prints a JSON object: for each case the exit code of
``verify``, and the end of a load and warm-up: the exit code, or minus the number of the fatal signal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from optkit.artifact.manifest import MANIFEST, write_manifest

GRAPH = "optkit/graph.json"
FAR = 50_000_000
REFUSED, NOT_REFUSED = 2, 0
RECIPE = """
schema_version: 1
name: small
target: cpu
runtime: {block_size: 8, max_num_batched_tokens: 32, kv_cache_bytes: 1MiB}
"""


def native_artifact(root: Path, *passes: str) -> Path:
    """Write an artifact of a tiny llama with native attention to ``root``, without reading the artifact back."""
    from optkit.checkpoint.locate import ModelSource
    from optkit.machine.target import DATASHEETS
    from optkit.pipeline.publish import write_artifact
    from optkit.pipeline.records import RunRecord
    from optkit.recipe.load import parse_recipe
    from tests.support.graphs import apply, captured
    from tests.support.model_directory import VOCABULARY, save_model

    (root / "source").mkdir(parents=True)
    save_model(root / "source")
    graph = captured("llama", vocab_size=VOCABULARY, max_position_embeddings=1024)
    for name in (*passes, "flash_attention"):
        apply(graph, name)
    model, run = ModelSource("tiny", root / "source", "0" * 64), RunRecord([], None)
    environment, target = {"optkit": "0"}, DATASHEETS["cuda-h100"]  # not this machine: it is not read back
    write_artifact(
        root / "artifact", graph, model, parse_recipe(RECIPE), run, target, environment, force=False
    )
    return root / "artifact"


def rewrite(directory: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a file in place, and then the manifest to correct hashes."""
    file = directory / name
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    rehash(directory)


def rehash(directory: Path) -> None:
    """Write the present hashes of all files to the manifest."""
    content = json.loads((directory / MANIFEST).read_text())
    for key in ("format", "schema_version", "files", "digest"):
        content.pop(key)
    (directory / MANIFEST).unlink()
    write_manifest(directory, content)


# -- hostile changes -------------------------------------------------------------------------------------


def far_input(position: int, name: str) -> Callable[[Any], None]:
    """A change: attention gets the batch input ``name`` plus a large number as argument ``position``."""

    def change(data: Any) -> None:
        added = {"name": "far", "op": "aten.add.Scalar", "args": [f"%{name}", FAR]}
        for node in data["nodes"]:
            if node["op"] == "attention":
                node["args"][position] = "%far"
        data["nodes"].insert(0, added)

    return change


def smaller(key: str) -> Callable[[Any], None]:
    """A change: the KV specs get 1 for ``key``."""

    def change(data: Any) -> None:
        for spec in data["meta"]["states"]:
            spec[key] = 1

    return change


def elsewhere(op: str) -> Callable[[Any], None]:
    """A change: attention gets queries on the meta device, with address 0."""

    def change(data: Any) -> None:
        i, node = next((i, n) for i, n in enumerate(data["nodes"]) if n["op"] == "attention")
        moved = {"name": "moved", "op": op, "args": [node["args"][0]], "kwargs": {"device": {"str": "meta"}}}
        data["nodes"].insert(i, moved)
        node["args"][0] = "%moved"

    return change


CASES: dict[str, Callable[[Any], None]] = {
    "slots": far_input(5, "slot_mapping"),
    "block tables": far_input(8, "block_tables"),
    "query starts": far_input(6, "query_start"),
    "lengths": far_input(7, "seq_lens"),
    "kv heads": smaller("num_kv_heads"),
    "head dim": smaller("head_dim"),
    "value dim": smaller("v_head_dim"),
    "copied to no memory": elsewhere("aten._to_copy.default"),
    "made in no memory": elsewhere("aten.zeros_like.default"),
}


# -- in processes of their own ---------------------------------------------------------------------------


def import_commands() -> None:
    """Import the code of the child processes once, before the first fork; some shapes need torch._dynamo."""
    for module in ("optkit.cli.main", "optkit.cli.verify", "optkit.runtime.factory", "torch._dynamo"):
        import_module(module)


def ended(work: Callable[[], int]) -> int:
    """The exit code of ``work`` in a child process, or minus the number of the fatal signal."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def verified(directory: Path) -> int:
    """The exit code of ``optkit verify``."""
    from optkit.cli.main import run

    return run(["verify", str(directory)])


def loaded(directory: Path) -> int:
    """Load an engine and compute a prompt and some tokens."""
    from optkit.errors import UserError
    from optkit.runtime.factory import open_engine

    try:
        open_engine(str(directory))
    except UserError:
        return REFUSED
    return NOT_REFUSED


def main(directory: str, *cases: str) -> None:
    """Print the results of all cases as JSON."""
    import_commands()
    torch.set_num_threads(1)
    ends = {}
    for case in cases:
        copy = Path(shutil.copytree(directory, f"{directory}-{case.replace(' ', '-')}"))
        rewrite(copy, GRAPH, CASES[case])
        ends[case] = [ended(lambda: verified(copy)), ended(lambda: loaded(copy))]  # noqa: B023
    sys.stdout.write(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
