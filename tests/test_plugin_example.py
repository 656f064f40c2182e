"""The plug-in in ``examples/plugin``, installed by pip into a folder of its own, in new processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.model_directory import save_model

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """\
schema_version: 1
name: small
extends: soft-cap-cpu
workload: {prompt_tokens: [16], output_tokens: 2}
runtime: {block_size: 8, max_num_batched_tokens: 64, kv_cache_bytes: 1MiB}
passes: {smoothquant: false, int8: false, kv_int8: false, select_logits_rows: false, fuse_add_rms_norm: false}
accept: {max_kld: null, min_top1: null}
"""
# Each work is done by a fork, which imports the plug-in anew: the import of torch takes longer than all else. Only the
# first artifact is read back by a new process.
PROGRAM = """
import json, os, sys
from pathlib import Path
import optkit
from optkit.cli.main import run
from optkit.pipeline import driver
from tests.support.quick import quick, reopen_here
quick()

def done(work):
    told = []
    result = optkit.optimize(work["model"], work["recipe"], work["out"], quality_tokens=1024, force=True,
        progress=lambda event: told.append(event.text))
    found = {"decisions": result.decisions, "told": told, "kl": result.kl_divergence}
    if work["load"]:
        found["doctor"] = run(["doctor"])
        with result.load(threads=1) as llm:
            found["tokens"] = llm.generate([[5, 6, 7]], max_tokens=6, temperature=0, ignore_eos=True)[0].token_ids
    print("RESULT " + json.dumps(found), flush=True)

for number, work in enumerate(json.load(sys.stdin)):
    if work["edited"]:
        source = Path(work["edited"])
        source.write_text(source.read_text() + "\\n# edited\\n")
    if number:
        reopen_here()
    child = os.fork()
    if child == 0:
        done(work)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the installed plug-in. The source is copied: a build leaves files beside it."""
    tree = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(ROOT / "examples" / "plugin", tree, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    pip += ["--disable-pip-version-check", "--target", str(target), str(tree)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "gemma2", "gemma2")


def start(
    words: list[str], cache: Path, packages: Path | None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words``, with the plug-in installed or not."""
    paths = [str(ROOT), *([str(packages)] if packages else [])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OPTKIT_CACHE": str(cache),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **variables},
        cwd=cache,
    )


def optimized(works: list[dict[str, object]], cache: Path, packages: Path) -> list[dict[str, object]]:
    done = start(["-c", PROGRAM], cache, packages, json.dumps(works))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [{**json.loads(line.removeprefix("RESULT ")), "stdout": done.stdout} for line in lines]


def test_the_example_plug_in_is_installed_used_cached_by_its_source_and_missed_when_it_is_gone(
    packages: Path, model: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (tmp_path / "small.yaml").write_text(RECIPE)
    work: dict[str, object] = {"model": str(model), "recipe": "small.yaml", "out": "made"}
    source = packages / "optkit_soft_cap" / "ops.py"
    works = [work | {"load": True, "edited": ""}, work | {"load": False, "edited": str(source)}]
    first, again = optimized(works, tmp_path, packages)
    assert first["decisions"]["fuse_soft_cap"] == "kept"  # type: ignore[index]
    assert first["kl"] < 1e-6  # type: ignore[operator]
    assert "fuse_soft_cap: rewriting 1 sites" in first["told"]  # type: ignore[operator]
    assert first["doctor"] == 0 and "optkit.ops of optkit-soft-cap 0.1.0" in str(first["stdout"])
    assert "FAILED" not in str(first["stdout"])
    graph = json.loads((tmp_path / "made" / "optkit" / "graph.json").read_text())
    assert [node["op"] for node in graph["nodes"]][-1] == "soft_cap.soft_cap"
    manifest = json.loads((tmp_path / "made" / "optkit" / "manifest.json").read_text())
    assert manifest["plugins"] == {"soft_cap": {"package": "optkit-soft-cap", "version": "0.1.0"}}

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
    assert first["tokens"] == out[0, 3:].tolist()

    assert "fuse_soft_cap: rewriting 1 sites" in again["told"]  # type: ignore[operator]
    assert "fuse_qkv: rewriting 2 sites" not in again["told"]  # type: ignore[operator]

    gone = start(["-m", "optkit.cli.main", "inspect", "made", "--graph"], tmp_path, None)
    assert gone.returncode == 2
    for part in ("soft_cap.soft_cap", "plug-in 'soft_cap'", "not installed", "optkit-soft-cap", "0.1.0"):
        assert part in gone.stderr
