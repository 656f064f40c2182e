"""An artifact with compiled layers, made once: it is served without a compiler, and only by who made it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optkit.artifact.manifest import write_manifest
from optkit.artifact.open import Artifact
from optkit.cli.main import run as cli
from optkit.errors import UserError
from optkit.lowering.compiled import code_cache
from optkit.lowering.compiled.code_cache import CodeTier
from optkit.lowering.lower import lower
from optkit.machine import seals
from optkit.machine.target import cpu_isa
from optkit.pipeline import aot_compile
from optkit.pipeline.driver import optimize
from optkit.recipe.load import parse_recipe
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
from tests.support.graphs import dense, random_ids
from tests.support.model_directory import VOCABULARY, save_model
from tests.support.quick import quick
from tests.support.target import TARGET

RECIPE = """
schema_version: 1
name: compiled
workload: {prompt_tokens: [24, 40], histogram: [[24, 3], [40, 1]], output_tokens: 4, batch: 2}
runtime: {block_size: 8, max_num_batched_tokens: 32, kv_cache_bytes: 1MiB}
passes:
  fuse_add_rms_norm: {}
  int8: {}
  flash_attention: {}
  compile: {max_buckets: 1}
"""
PROMPTS = [[3 + i % 200 for i in range(n)] for n in (5, 31, 70)]
SERVE = """
import json, sys
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
engine = open_engine(sys.argv[1])
tokens = engine.generate(json.loads(sys.argv[2]), SamplingParams(max_tokens=12, temperature=0.0))
compiler = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
print(json.dumps([engine.runner.model.special is not None, tokens, compiler]))
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache, little text, quick timings, and variants that are kept whatever they were timed at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache") / "optkit"))
        quick(patch.setattr)
        patch.setattr(aot_compile, "NOISE", -1e9)
        import torch._inductor.config as inductor

        patch.setattr(inductor.aot_inductor, "compile_wrapper_opt_level", "O0")  # half of the compile time
        patch.setattr(inductor.cpp, "vec_isa_ok", True)  # or it tries the compiler on each, once a cache
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The artifact: a tiny llama with a bucket and a tail."""
    root = tmp_path_factory.mktemp("compiled")
    model = save_model(root / "tiny")
    optimize(str(model), parse_recipe(RECIPE), root / "artifact", final_tokens=1024)
    return root / "artifact"


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy of one's own."""
    return shutil.copytree(made, tmp_path / "artifact")


@pytest.fixture
def only_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No code in the cache that would do as well as the artifact's."""
    monkeypatch.setattr(code_cache, "cached", lambda fit, plan: tmp_path / "nothing")


def compiled(artifact: Path, **options) -> bool:
    return Artifact.open(artifact).executable(**options).special is not None


def test_the_artifact_has_the_code_and_its_times(made: Path):
    opened = Artifact.open(made)
    assert {n for n in opened.manifest["files"] if "/native/" in n} == {
        f"optkit/native/{n}" for n in ("code.json", "tokens-32.so", "tokens-32.json", "tail.so", "tail.json")
    }
    assert opened.graph().annotations["compile"]["buckets"] == [[2, 32]]
    tier = CodeTier.read(opened.native)
    assert tier is not None and tier.is_ours and not list(tier.problems())
    assert [(v.first, v.last) for v in tier.record.variants] == [(2, 32), (2, None)]
    assert all(v.seconds > 0 and v.uncompiled_seconds > 0 for v in tier.record.variants)
    page = (made / "optkit/report.html").read_text()
    assert "2 to 32" in page and "uncompiled ms" in page


def test_it_computes_what_the_uncompiled_model_does(made: Path):
    opened = Artifact.open(made)
    model, plain = opened.executable(), lower(opened.graph(), TARGET)
    assert model.special is not None
    assert [v.last for v in model.special.region.variants] == [32, None]
    for ids in random_ids([2, 31, 32, 33, 70], VOCABULARY):
        inputs = dense_logits(model, ids), dense_logits(plain, ids)
        torch.testing.assert_close(*inputs, atol=2e-3, rtol=2e-3)  # a flipped int8 rounding is allowed


def dense_logits(model, ids):
    from optkit.lowering.dense import dense_inputs

    return model(dense_inputs([len(ids)], ids, model.kv_specs))


def test_serving_with_an_empty_path_compiles_nothing(made: Path, tmp_path: Path):
    calls = tmp_path / "calls"
    for name in ("g++", "gcc", "c++", "cc", "clang++", "clang", "ld", "as"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {calls}\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": str(tmp_path), "CXX": str(tmp_path / "g++"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SERVE, str(made), json.dumps(PROMPTS)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
    ran_code, tokens, compiler = json.loads(done.stdout.splitlines()[-1])
    assert ran_code and not calls.exists()
    assert compiler == [], "the compiler's modules were imported"
    graph = Artifact.open(made).graph()
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor(prompt + new)
        assert dense(graph, ids, TARGET)[len(prompt) - 1 : -1].argmax(-1).tolist() == new


def test_elsewhere_the_code_is_left_alone_unless_trusted(artifact: Path, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(seals, "machine_id", lambda: "another machine")
    with caplog.at_level(logging.WARNING):
        assert not compiled(artifact)
    assert "not built on this machine by this user" in caplog.text
    assert compiled(artifact, trust_code=True)
    engine = open_engine(str(artifact), trust_artifact_code=True)
    assert engine.generate(PROMPTS[:1], SamplingParams(max_tokens=3, temperature=0.0))


def test_another_users_key_does_not_fit(artifact: Path, monkeypatch, tmp_path):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))
    assert not compiled(artifact)
    assert (tmp_path / "optkit/seal-key").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("only_shipped")
def test_a_forged_record_is_not_ours(artifact: Path):
    """Whoever can write the artifact can write hashes, but no seal."""
    file = artifact / "optkit/native/code.json"
    record = json.loads(file.read_text())
    (artifact / "optkit/native/tail.so").write_bytes(b"\x7fELF evil")
    record["variants"][1]["files"]["tail.so"] = hashlib.sha256(b"\x7fELF evil").hexdigest()
    file.write_text(json.dumps(record))
    rewrite_manifest(artifact)
    assert not compiled(artifact)


@pytest.mark.usefixtures("only_shipped")
def test_a_changed_library_is_refused_by_its_hash(artifact: Path, caplog):
    library = artifact / "optkit/native/tail.so"
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"native/tail\.so was changed"):
        Artifact.open(artifact)
    rewrite_manifest(artifact)  # the manifest may be forged; the sealed record is not
    with caplog.at_level(logging.WARNING):
        assert not compiled(artifact)
        assert not compiled(artifact, trust_code=True)
    assert "tail.so was changed" in caplog.text
    assert cli(["verify", str(artifact)]) == 3


def rewrite_manifest(artifact: Path) -> None:
    manifest = json.loads((artifact / "optkit/manifest.json").read_text())
    (artifact / "optkit/manifest.json").unlink()
    write_manifest(artifact, {k: v for k, v in manifest.items() if k != "files"})


@pytest.mark.usefixtures("only_shipped")
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"fit": 1}', '{"variants": [{"first": 0}]}'])
def test_a_damaged_record_means_no_code(artifact: Path, damage: str, capsys):
    (artifact / "optkit/native/code.json").write_text(damage)
    rewrite_manifest(artifact)
    assert not compiled(artifact, trust_code=True)
    assert cli(["verify", str(artifact)]) == 3
    assert "no readable code.json" in capsys.readouterr().out


def test_a_library_beside_the_record_is_reported(artifact: Path, capsys):
    (artifact / "optkit/native/extra.so").write_bytes(b"")
    rewrite_manifest(artifact)
    assert cli(["verify", str(artifact)]) == 3
    assert "extra.so is not in code.json" in capsys.readouterr().out


def test_code_for_other_versions_or_processors_does_not_fit(artifact: Path, monkeypatch, caplog):
    for name, value, word in (("VERSION", "0.0", "optkit"), ("cpu_model", lambda: "i486", "processor i486")):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(code_cache, name, value)
            assert not compiled(artifact, trust_code=True)
        assert "it was made for" in caplog.text and word.split()[0] in caplog.text
        caplog.clear()


def test_verify_and_inspect_say_whose_it_is(artifact: Path, monkeypatch, capsys):
    assert cli(["verify", str(artifact)]) == 0
    assert "2 compiled variants, built here, by you" in capsys.readouterr().out
    monkeypatch.setattr(seals, "machine_id", lambda: "another machine")
    assert cli(["inspect", str(artifact)]) == 0
    shown = capsys.readouterr().out
    assert "elsewhere: runs only with --trust-artifact-code" in shown
    assert "2 to 32" in shown and "any number" in shown


def test_rebuild_compiles_for_another_machine_into_its_cache(artifact: Path, monkeypatch, tmp_path, capsys):
    """The compiler is stood in for by the artifact's own libraries: compiling is slow and tested already."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))
    before = {f.name: f.read_bytes() for f in (artifact / "optkit/native").iterdir()}

    def compile_region(module, arguments, tokens, destination):
        for suffix in (".so", ".json"):
            shutil.copy(
                artifact / "optkit/native" / (destination.name + suffix), destination.with_suffix(suffix)
            )

    assert not compiled(artifact)
    monkeypatch.setattr(aot_compile, "compile_region", compile_region)
    assert cli(["rebuild", str(artifact)]) == 0
    assert "2 to 32" in capsys.readouterr().out
    assert compiled(artifact)
    assert {f.name: f.read_bytes() for f in (artifact / "optkit/native").iterdir()} == before


def test_nothing_faster_is_nothing_kept(artifact: Path, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))
    monkeypatch.setattr(aot_compile, "NOISE", 1.0)

    def fail(module, arguments, tokens, destination):
        raise aot_compile.CompileError("no such instruction")

    monkeypatch.setattr(aot_compile, "compile_region", fail)
    assert cli(["rebuild", str(artifact), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["compiled"]
    assert [row["reason"] for row in rows] == ["not compiled: no such instruction"] * 2
    assert not compiled(artifact)


def test_isa_is_that_of_the_target():
    assert TARGET.isa == cpu_isa()
