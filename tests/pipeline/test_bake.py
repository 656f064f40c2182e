"""KV of known prompts in an artifact: the same answers as without, and refused where it does not fit."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optkit.artifact.manifest import MANIFEST, write_manifest
from optkit.artifact.open import Artifact
from optkit.artifact.prefix import BLOCKS_FILE, FACTS_FILE, read_prefix
from optkit.errors import UserError
from optkit.graph.kv_layout import kv_layout
from optkit.graph.states import KVSpec
from optkit.lowering.lower import Executable
from optkit.passes.resolve import resolve_passes
from optkit.pipeline import bake, publish
from optkit.pipeline.bake import Tree, check_prompts, equal
from optkit.runtime.baked import layout_entry
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.types import EngineRequest, SamplingParams
from optkit.text.prompt_files import KnownPrompt, prefix_ids
from optkit.text.tokenizer import Tokenizer
from tests.support.chat_templates import QWEN
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.small_runs import recipe, run

pytestmark = pytest.mark.usefixtures("quickly")
SYSTEM = "You answer in few words, politely, and never guess. " * 4
KV_INT8 = "  flash_attention: {}\n  kv_int8: {}\n"


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    """Little text and quick timings: what a pass gains is not tested."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch.setattr)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    save_model(directory)
    (directory / "chat_template.jinja").write_text(QWEN)
    return directory


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "system.txt"
    file.write_text(SYSTEM)
    return file


@pytest.fixture(scope="module")
def baked(source: Path, system: Path, tmp_path_factory: pytest.TempPathFactory, quickly: None) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "baked"
    record = run(source, out, f"passes:\n{KV_INT8}  bake_prefix: {{prompts: [{system}]}}\n")
    assert record.passes[-1].decision == "kept" and record.passes[-1].stats["tokens"]["system.txt"] > 100
    return out


def prompt(artifact: Path) -> list[int]:
    tokenizer = Tokenizer.from_directory(artifact)
    assert tokenizer.chat_template is not None
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello there"}]
    return tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)


def answer(engine: Engine, ids: list[int]) -> list[int]:
    (tokens,) = engine.generate([ids], SamplingParams(max_tokens=12, temperature=1.0, seed=3))
    return tokens


def test_the_first_request_finds_the_prompt_and_answers_as_without(baked: Path) -> None:
    ids, without = prompt(baked), open_engine(str(baked), pinned_cache_share=0.0)
    expected = answer(without, ids)
    assert without.stats().prefix_cache_hits == 0
    engine = open_engine(str(baked))
    assert answer(engine, ids) == expected
    (pin,) = [pin for pin in engine.pins() if pin.name == "artifact:system.txt"]
    assert engine.stats().prefix_cache_hits == pin.num_tokens > 0.8 * len(ids)
    assert pin.cache_salt is None
    engine.scheduler.check()
    engine.reset_prefix_cache()
    assert answer(engine, ids) == expected and engine.pins()


def test_the_stored_bytes_are_those_of_a_request(baked: Path) -> None:
    """Against the pool of an engine that computed the prompt with a request."""
    prefix = read_prefix(baked, 1 << 20)
    engine, ids = open_engine(str(baked), pinned_cache_share=0.0), prompt(baked)
    (end,) = [entry.node for entry in prefix.facts.prompts if entry.name == "system.txt"]
    path = prefix.path(end)
    assert [token for node in path for token in prefix.nodes[node].tokens] == ids[: 8 * len(path)]
    engine.generate([ids], SamplingParams(max_tokens=1))
    cached = {node.tokens: node for node in engine.scheduler.kv.cache.nodes}  # type: ignore[union-attr]
    for number in path:
        node = prefix.nodes[number]
        block = cached[node.tokens].kv[0].block
        stored = prefix.kv[0][node.rows[0]].numpy()
        assert block is not None and (engine.runner.read_block(block) == stored).all()


def test_prompts_that_begin_alike_share_blocks(baked: Path) -> None:
    prefix = read_prefix(baked, 1 << 20)
    assert {entry.name for entry in prefix.facts.prompts} <= {"system.txt", "chat template"}
    assert len({(node.parent, node.tokens) for node in prefix.nodes}) == len(prefix.nodes)
    assert prefix.num_bytes == sum(kv.numel() for kv in prefix.kv)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"block_size": 16}, "it has blocks of 8 tokens, the server's KV cache of 16"),
        ({"enable_prefix_caching": False}, "nothing may be pinned"),
        ({"pinned_cache_share": 0.03}, "the pinned prefixes leave no room"),
    ],
)
def test_other_options_start_without_it_and_say_so(
    baked: Path, given: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = open_engine(str(baked), **given)
    lines = [record.getMessage() for record in caplog.records if "baked KV" in record.getMessage()]
    assert lines and reason in lines[0]
    assert not [pin for pin in engine.pins() if pin.name.endswith("system.txt")]
    engine.scheduler.check()


def copy(baked: Path, to: Path) -> Path:
    return Path(shutil.copytree(baked, to))


def resealed(directory: Path) -> None:
    """Write correct hashes."""
    old = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).unlink()
    written = ("files", "digest", "format", "schema_version")
    write_manifest(directory, {key: value for key, value in old.items() if key not in written})


def test_other_weights_start_without_it(
    baked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    other = copy(baked, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, other / "model.safetensors")
    resealed(other)
    with caplog.at_level(logging.WARNING):
        engine = open_engine(str(other))
    assert not engine.pins()
    assert any("the weights are not those that computed it" in r.getMessage() for r in caplog.records)


def changed(directory: Path, **tensors: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / BLOCKS_FILE
    found = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(found | {name.replace("_", "."): value for name, value in tensors.items()}, file)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"tokens": torch.full((2, 8), 1 << 30, dtype=torch.int32)}, "wrong shapes"),
        ({"parent": torch.tensor([0], dtype=torch.int32)}, "wrong shapes"),
        ({"rows_0": torch.tensor([5], dtype=torch.int32)}, "do not fit"),
        ({"kv_0": torch.zeros((3, 4), dtype=torch.uint8)}, "do not fit"),
        ({"parent": torch.zeros(1, dtype=torch.int64)}, "other tensors"),
        ({"more": torch.zeros(1)}, "other tensors"),
    ],
)
def test_hostile_blocks_are_refused_before_they_are_used(
    baked: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    other = copy(baked, tmp_path / "other")
    changed(other, **tensors)
    with pytest.raises(UserError, match=reason):
        read_prefix(other, 1000)
    resealed(other)
    with pytest.raises(UserError):
        open_engine(str(other))


def test_hostile_values_in_range_are_refused(baked: Path, tmp_path: Path) -> None:
    prefix = read_prefix(baked, 1 << 20)
    count = len(prefix.nodes)
    tokens = torch.tensor([node.tokens for node in prefix.nodes], dtype=torch.int32)
    cases = {
        "not in the vocabulary": {"tokens": tokens + (1 << 20)},
        "not in the vocabulary of": {"tokens": -tokens - 1},
        "does not follow": {"parent": torch.arange(count, dtype=torch.int32)},
        "do not fit": {"rows_0": torch.zeros(count, dtype=torch.int32)},
        "number of tokens": {"parent": torch.full((count,), -1, dtype=torch.int32)},
    }
    for number, (reason, tensors) in enumerate(cases.items()):
        other = copy(baked, tmp_path / str(number))
        changed(other, **tensors)
        with pytest.raises(UserError, match=reason):
            read_prefix(other, 1000)


def test_a_damaged_file_of_facts_is_refused(baked: Path, tmp_path: Path) -> None:
    other = copy(baked, tmp_path / "other")
    (other / FACTS_FILE).write_text('{"version": 2}')
    with pytest.raises(UserError, match="prefixes can't be read"):
        read_prefix(other, 1000)
    with pytest.raises(UserError, match=r"changed|bytes"):
        Artifact.open(other)


def test_a_missing_prompt_is_refused_before_the_run(tmp_path: Path) -> None:
    resolved = resolve_passes(recipe(f"passes:\n  bake_prefix: {{prompts: [{tmp_path / 'none.txt'}]}}\n"))
    with pytest.raises(UserError, match="the prompt can't be read"):
        check_prompts(resolved, tmp_path)


def test_a_prompt_that_the_template_refuses_is_refused_before_the_run(source: Path, tmp_path: Path) -> None:
    model, prompts = copy(source, tmp_path / "model"), tmp_path / "examples.json"
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    prompts.write_text(json.dumps([{"role": "system", "content": "Be kind."}]))
    resolved = resolve_passes(recipe(f"passes:\n  bake_prefix: {{prompts: [{prompts}]}}\n"))
    with pytest.raises(UserError, match="no system here"):
        check_prompts(resolved, model)
    check_prompts(resolved, tmp_path)  # without a tokenizer there


def test_kv_that_depends_on_the_steps_is_not_stored(
    baked: Path, system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy(baked, tmp_path / "other")
    (other / FACTS_FILE).unlink()
    again = bake.computed_again

    def another_bit(engine: Engine, ids: list[int]) -> bake.Blocks:
        found = again(engine, ids)
        block = found[-1][0]
        assert block is not None
        found[-1][0] = block ^ 1
        return found

    monkeypatch.setattr(bake, "computed_again", another_bit)
    result = bake.compute(other, [KnownPrompt("x", [{"role": "system", "content": SYSTEM}])], 1)
    assert result["refusal"].startswith("the KV of x depends on the steps that compute it")
    assert not (other / FACTS_FILE).exists()


def test_a_refusal_rolls_the_pass_back(
    source: Path, system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"tokens": {"system.txt": 9}, "refusal": "no prompt fills a block of 32 tokens"}
    monkeypatch.setattr(publish, "bake", lambda directory, prompts: dict(refused))
    record = run(source, tmp_path / "out", f"passes:\n  bake_prefix: {{prompts: [{system}]}}\n")
    assert record.passes[-1].decision == "rolled back"
    assert Artifact.open(tmp_path / "out").manifest["files"].keys().isdisjoint({FACTS_FILE, BLOCKS_FILE})


def test_tenants_share_the_prompts_of_the_artifact_and_nothing_behind(baked: Path) -> None:
    engine, ids = open_engine(str(baked)), prompt(baked)
    (pin,) = [pin for pin in engine.pins() if pin.name == "artifact:system.txt"]
    found = []
    for number, salt in enumerate(("a:", "b:", "a:")):
        before = engine.stats().prefix_cache_hits
        sampling = SamplingParams(max_tokens=1)
        more = [*ids, *ids[:40]]  # blocks of a tenant's own
        engine.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_ids=tuple(more),
                sampling=sampling,
                arrival=0.0,
                cache_salt=salt,
            )
        )
        while engine.has_work:
            engine.step()
        found.append(engine.stats().prefix_cache_hits - before)
    assert found[0] == found[1] == pin.num_tokens < found[2]


def test_kv_that_differs_in_a_bit_is_not_equal() -> None:
    import numpy as np

    block = np.arange(8, dtype=np.uint8)
    assert equal([[block, None]], [[block.copy(), None]])
    assert not equal([[block, None]], [[block ^ 1, None]])
    assert not equal([[block, None]], [[block, block]])
    tree = Tree(2)
    tree.add("a", [1, 2, 3, 4], [[block, None], [block, block]])
    tree.add("b", [1, 2, 5, 6], [[block, None], [block, block]])
    assert tree.parents == [-1, 0, 0] and tree.rows == [[0, -1], [1, 0], [2, 1]]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed without a new process, which imports torch for seconds; ``baked`` has one."""
    monkeypatch.setattr(publish, "bake", lambda directory, prompts: bake.compute(directory, prompts, 1))


@pytest.mark.usefixtures("in_this_process")
def test_layers_with_windows_find_the_last_window_of_the_prompt(system: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "gemma3_text")
    (model / "chat_template.jinja").write_text(QWEN)
    out = tmp_path / "out"
    record = run(model, out, f"passes:\n  flash_attention: {{}}\n  bake_prefix: {{prompts: [{system}]}}\n")
    assert record.passes[-1].decision == "kept"
    prefix = read_prefix(out, 1 << 20)
    rows = sorted(map(len, prefix.kv))
    assert rows[0] < rows[-1] == len(prefix.nodes)  # few of the layers with a window
    ids, without = prompt(out), open_engine(str(out), pinned_cache_share=0.0)
    expected, engine = answer(without, ids), open_engine(str(out))
    assert answer(engine, ids) == expected
    (pin,) = [pin for pin in engine.pins() if pin.name == "artifact:system.txt"]
    assert engine.stats().prefix_cache_hits == pin.num_tokens > 0.8 * len(ids)
    engine.scheduler.check()


@pytest.mark.usefixtures("in_this_process")
def test_a_block_with_rows_of_no_layer_is_compared_without_them(system: Path, tmp_path: Path) -> None:
    """Two full layers in a block with room for three: the third row has what an earlier owner of the block wrote."""
    local, full = "sliding_attention", "full_attention"
    kinds = {"num_hidden_layers": 5, "layer_types": [local, full, local, full, local]}
    model = save_model(tmp_path / "model", "gemma3_text", **kinds)
    (model / "chat_template.jinja").write_text(QWEN)
    out = tmp_path / "out"
    record = run(model, out, f"passes:\n  flash_attention: {{}}\n  bake_prefix: {{prompts: [{system}]}}\n")
    assert record.passes[-1].decision == "kept", record.passes[-1].reason
    prefix = read_prefix(out, 1 << 20)
    layout = kv_layout(Artifact.open(out).meta().states)
    assert [len(group.layers) for group in layout.groups] == [2, 3]
    used = layout.bytes_of(0, 8)[-1].stop
    assert not prefix.kv[0][:, used:].any() and prefix.kv[1][:, used:].any()


def test_a_prompt_file_of_messages(source: Path) -> None:
    tokenizer = Tokenizer.from_directory(source)
    found = prefix_ids(tokenizer, KnownPrompt("x", [{"role": "system", "content": "hello"}]))
    text = tokenizer.decode(found, skip_special_tokens=False)
    assert "hello" in text and text.endswith("user\n")


def test_inspect_and_verify_know_baked_prompts(baked: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from optkit.cli.main import application

    app = application(("inspect", "verify"))
    shown = CliRunner().invoke(app, ["inspect", str(baked), "--json"])
    assert json.loads(shown.stdout)["baked"]["prompts"]["system.txt"] > 100
    other = copy(baked, tmp_path / "other")
    assert CliRunner().invoke(app, ["verify", str(other)]).exit_code == 0
    changed(other, parent=torch.tensor([0], dtype=torch.int32))
    resealed(other)
    assert CliRunner().invoke(app, ["verify", str(other)]).exit_code == 3


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "baked KV" in record.getMessage()]


def test_blocks_that_do_not_fit_are_not_read(
    baked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The facts are small and bounded; the lists of a block file for another server need not be."""
    other = copy(baked, tmp_path / "other")
    (other / BLOCKS_FILE).write_bytes(b"no tensors")
    with caplog.at_level(logging.WARNING):
        assert not open_engine(str(other), block_size=16).pins()
    assert "blocks of 8 tokens" in lines_of(caplog)[0]
    with pytest.raises(UserError, match="not a safetensors file"):
        open_engine(str(other))


def test_blocks_of_another_order_of_bytes_are_not_read(
    baked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = copy(baked, tmp_path / "other")
    facts = json.loads((other / FACTS_FILE).read_text())
    assert facts["layout"].pop("order") == "rows"
    (other / FACTS_FILE).write_text(json.dumps(facts))
    assert open_engine(str(other)).pins()  # written before there were other orders
    facts["layout"]["order"] = "interleaved"
    (other / FACTS_FILE).write_text(json.dumps(facts))
    with caplog.at_level(logging.WARNING):
        assert not open_engine(str(other)).pins()
    assert "its bytes lie in the order 'interleaved'" in lines_of(caplog)[0]


@pytest.mark.parametrize(
    ("spec", "block_size", "device", "order"),
    [
        (KVSpec(0, 2, 64, 64, "int8"), 32, "cpu", "interleaved"),
        (KVSpec(0, 2, 64, 64, "int8"), 8, "cpu", "rows"),
        (KVSpec(0, 2, 64, 64), 32, "cpu", "rows"),
        (KVSpec(0, 1, 64, 32, "int8", latent=True), 32, "cpu", "rows"),
        (KVSpec(0, 2, 64, 64, "int8"), 32, "cuda", "planes"),
        (KVSpec(0, 2, 64, 64, "float16"), 32, "cuda", "rows"),
    ],
)
def test_the_order_of_bytes_is_a_part_of_the_layout(
    spec: KVSpec, block_size: int, device: str, order: str
) -> None:
    runner: Any = SimpleNamespace(
        layout=kv_layout([spec]),
        block_size=block_size,
        kv_dtype=spec.dtype,
        pools=SimpleNamespace(device=device),
    )
    assert layout_entry(runner).order == order


def test_two_prompts_of_a_name_are_refused(baked: Path, tmp_path: Path) -> None:
    other = copy(baked, tmp_path / "other")
    facts = json.loads((other / FACTS_FILE).read_text())
    facts["prompts"].append(facts["prompts"][0])
    (other / FACTS_FILE).write_text(json.dumps(facts))
    with pytest.raises(UserError, match="two prompts have the same name"):
        read_prefix(other, 1 << 20)


def test_kv_is_neither_baked_nor_used_with_compiled_layers(
    baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They run on the machine that made them, in some steps, and agree with the rest up to rounding."""
    monkeypatch.setattr(Executable, "special", object())
    with caplog.at_level(logging.WARNING):
        assert not open_engine(str(baked)).pins()
    assert "compiled layers" in lines_of(caplog)[0]
    other = copy(baked, tmp_path / "other")
    for name in (FACTS_FILE, BLOCKS_FILE):
        (other / name).unlink()
    messages = [{"role": "system", "content": SYSTEM}]
    found = bake.compute(other, [KnownPrompt("system.txt", messages)], 1)
    assert "compiled layers" in found["refusal"] and found["tokens"]["system.txt"] > 100
    assert not (other / FACTS_FILE).exists()
