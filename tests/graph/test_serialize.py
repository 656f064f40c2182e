"""graph.json: text to graph and back, and files that somebody damaged or wrote with ill intent."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.checkpoint.tensors import build
from optkit.errors import UserError
from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.graph.ops import OPS
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.states import RecurrentSpec
from optkit.graph.verify import verify
from optkit.lowering.lower import lower
from tests.support.graphs import apply, captured, checkpoint, dense, random_ids
from tests.support.sample_artifact import small_graph
from tests.support.target import TARGET

ALL_PASSES = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "int8", "flash_attention", "kv_int8")


def read(text: str, graph: Graph) -> Graph:
    """The graph of ``text``, with the weights of ``graph``."""
    return graph_from_json(text, lambda name, origin, dtype: graph.weights[name].value)


def assert_round_trip(graph: Graph) -> None:
    text = graph_to_json(graph)
    again = read(text, graph)
    verify(again)
    assert graph_to_json(again) == text
    assert again.meta == graph.meta
    assert {n: w.origin for n, w in again.weights.items()} == {n: w.origin for n, w in graph.weights.items()}
    (ids,) = random_ids([19])
    assert torch.equal(dense(again, ids, TARGET), dense(graph, ids, TARGET))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_round_trip(name: str) -> None:
    assert_round_trip(captured(name))


def test_an_annotation_that_could_not_be_read_again_is_not_written() -> None:
    graph = captured("llama").clone()
    graph.annotations["density_of_a_new_pass"] = 0.5
    with pytest.raises(UserError, match="no place for density_of_a_new_pass"):
        graph_to_json(graph)


@pytest.mark.parametrize("symmetric", [False, True])
def test_round_trip_of_int4_weights(symmetric: bool) -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    apply(graph, "w4a8", symmetric=symmetric)
    assert_round_trip(graph)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_round_trip_of_an_optimized_graph(name: str) -> None:
    graph = captured(name)
    for row in ALL_PASSES:
        apply(graph, row)
    assert_round_trip(graph)
    kernels = {n.name: n.meta.get("kernel") for n in graph.fx.nodes if n.op == "call_function"}
    again = read(graph_to_json(graph), graph)
    assert {n.name: n.meta.get("kernel") for n in again.fx.nodes if n.op == "call_function"} == kernels
    assert set(kernels.values()) > {None}


def test_weights_are_asked_for_by_origin_and_dtype() -> None:
    graph = captured("gpt2")
    asked: dict[str, tuple[Origin | None, torch.dtype]] = {}

    def load(name: str, origin: Origin | None, dtype: torch.dtype) -> torch.Tensor:
        asked[name] = (origin, dtype)
        return graph.weights[name].value

    graph_from_json(graph_to_json(graph), load)
    assert asked == {n: (w.origin, w.value.dtype) for n, w in graph.weights.items()}
    assert any(origin is not None and origin.transposed for origin, _ in asked.values())


def test_non_finite_and_text_arguments() -> None:
    graph = small_graph()
    output = next(n for n in graph.fx.nodes if n.op == "output")
    with graph.fx.inserting_before(output):
        gelu = graph.fx.call_function(
            OPS["aten.gelu.default"], (output.args[0],), {"approximate": 'tanh"\\\n'}
        )
        clamp = graph.fx.call_function(OPS["aten.clamp.default"], (gelu, float("-inf"), float("inf")))
    output.args = (clamp,)
    text = graph_to_json(graph)
    assert "Infinity" not in text
    assert graph_to_json(read(text, graph)) == text
    (again,) = [n for n in read(text, graph).fx.nodes if n.target is OPS["aten.gelu.default"]]
    assert again.kwargs == {"approximate": 'tanh"\\\n'}


# -- damaged files ---------------------------------------------------------------------------------------


@functools.cache
def small() -> Graph:
    """Every form of argument in few lines: one layer after all passes."""
    graph = captured("llama", num_hidden_layers=1)
    for row in ALL_PASSES:
        apply(graph, row)
    return graph


@functools.cache
def small_text() -> str:
    return graph_to_json(small())


def read_small(text: str) -> Graph:
    """As an artifact is read: weights are put together from checkpoint tensors."""
    tensors, constants = checkpoint(small()), {n: w.value for n, w in small().weights.items() if not w.origin}
    return graph_from_json(
        text,
        lambda name, origin, dtype: constants[name] if origin is None else build(origin, tensors, dtype),
        where="a/graph.json",
    )


def changed(change: Callable[[Any], Any]) -> str:
    data = json.loads(small_text())
    change(data)
    return json.dumps(data)


DAMAGE: dict[str, Callable[[Any], Any]] = {
    "unknown op": lambda d: d["nodes"][0].update(op="os.system"),
    "op by attribute": lambda d: d["nodes"][0].update(op="aten.load.default"),
    "op is a list": lambda d: d["nodes"][0].update(op=["linear"]),
    "unknown node": lambda d: d["nodes"][0].update(args=["%nowhere"]),
    "node before it is computed": lambda d: d["nodes"][0].update(args=[f"%{d['nodes'][5]['name']}"]),
    "unknown weight": lambda d: d["nodes"][0].update(args=["@nowhere"]),
    "reference without a mark": lambda d: d["nodes"][0].update(args=["input_ids"]),
    "empty reference": lambda d: d["nodes"][0].update(args=[""]),
    "unknown input": lambda d: d["inputs"].append("secrets"),
    "input that is code": lambda d: d["inputs"].append("x=print('run')"),
    "input of a layer that is not there": lambda d: d["inputs"].append("k_cache_9"),
    "input twice": lambda d: d["inputs"].append("input_ids"),
    "input is a number": lambda d: d["inputs"].append(3),
    "keyword that is code": lambda d: d["nodes"][0].update(kwargs={"x=print('run'), y": 1}),
    "keyword is a keyword": lambda d: d["nodes"][0].update(kwargs={"lambda": 1}),
    "name is a number": lambda d: d["nodes"][0].update(name=5),
    "name is missing": lambda d: d["nodes"][0].pop("name"),
    "name twice": lambda d: d["nodes"][1].update(name=d["nodes"][0]["name"]),
    "name of an input": lambda d: d["nodes"][0].update(name="input_ids"),
    "name that is code": lambda d: d["nodes"][0].update(name="a\nprint('run')"),
    "args are text": lambda d: d["nodes"][0].update(args="%input_ids"),
    "args are missing": lambda d: d["nodes"][0].pop("args"),
    "literal of no kind": lambda d: d["nodes"][0].update(args=[{"code": "1"}]),
    "literal of two kinds": lambda d: d["nodes"][0].update(args=[{"str": "a", "float": "1"}]),
    "literal of none": lambda d: d["nodes"][0].update(args=[{}]),
    "dtype is no dtype": lambda d: d["nodes"][0].update(args=[{"dtype": "load"}]),
    "dtype is a number": lambda d: d["nodes"][0].update(args=[{"dtype": 7}]),
    "float is a list": lambda d: d["nodes"][0].update(args=[{"float": []}]),
    "weight of another shape": lambda d: next(iter(d["weights"].values())).update(shape=[1, "2"]),
    "weight of another dtype": lambda d: next(iter(d["weights"].values())).update(dtype="nn"),
    "weight without origin": lambda d: next(iter(d["weights"].values())).pop("from"),
    "parts that do not stack": lambda d: next(iter(d["weights"].values())).update(
        {"from": [["model.embed_tokens.weight", 128], ["model.norm.weight", 64]]}
    ),
    "rows without end": lambda d: next(iter(d["weights"].values())).update({"from": [["a", 1e999]]}),
    "weights are a list": lambda d: d.update(weights=[]),
    "nodes are missing": lambda d: d.pop("nodes"),
    "output is missing": lambda d: d.pop("output"),
    "output is unknown": lambda d: d.update(output="%nowhere"),
    "meta is missing": lambda d: d.pop("meta"),
    "meta has another key": lambda d: d["meta"].update(code=1),
    "meta lacks a key": lambda d: d["meta"].pop("vocab_size"),
    "a pool has another key": lambda d: d["meta"]["states"][0].update(code=1),
    "a pool of unknown dtype": lambda d: d["meta"]["states"][0].update(dtype="int7"),
    "a pool's dtype is a list": lambda d: d["meta"]["states"][0].update(dtype=["int8"]),
    "pools are null": lambda d: d["meta"].update(states=None),
    "two states of one pool": lambda d: d["meta"]["states"].append(dict(d["meta"]["states"][0])),
    "a state of no kind": lambda d: d["meta"]["states"][0].pop("kind"),
    "a state of another kind": lambda d: d["meta"]["states"][0].update(kind="code"),
    "a recurrent state without a size": lambda d: d["meta"]["states"].append(RECURRENT | {"shape": []}),
    "a recurrent state with a name that is code": lambda d: d["meta"]["states"].append(
        RECURRENT | {"name": "a()"}
    ),
    "states and KV specs": lambda d: d["meta"].update(kv_specs=[]),
    "neither states nor KV specs": lambda d: d["meta"].pop("states"),
    "plan is a list": lambda d: d.update(plan=[1]),
    "another format": lambda d: d.update(format="other"),
    "a later version": lambda d: d.update(version=2),
    "version is text": lambda d: d.update(version="1"),
}


RECURRENT = {"kind": "recurrent", "layer": 3, "name": "conv_state", "shape": [6, 3], "dtype": "float32"}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_user_error(name: str) -> None:
    text = changed(DAMAGE[name])
    with pytest.raises(UserError, match=r"a/graph\.json"):
        read_small(text)


def test_what_is_not_damaged_is_read() -> None:
    assert graph_to_json(read_small(small_text())) == small_text()


def test_pools_keep_their_dtype() -> None:
    data = json.loads(small_text())
    data["meta"]["states"][0]["dtype"] = "int8"
    graph = read_small(json.dumps(data))
    assert graph.meta.kv_specs[0].dtype == "int8"
    assert json.loads(graph_to_json(graph))["meta"] == data["meta"]


def test_a_file_from_before_pools_had_a_dtype() -> None:
    data = json.loads(small_text())
    for spec in data["meta"]["states"]:
        del spec["dtype"]
    assert {spec.dtype for spec in read_small(json.dumps(data)).meta.kv_specs} == {"float32"}


def test_a_file_from_before_there_were_other_states_is_read() -> None:
    data, older = json.loads(small_text()), json.loads(small_text())
    specs = older["meta"].pop("states")
    older["meta"]["kv_specs"] = [
        {k: v for k, v in spec.items() if k not in ("kind", "window")} for spec in specs
    ]
    assert read_small(json.dumps(older)).meta == read_small(json.dumps(data)).meta


def test_recurrent_states_are_read_as_they_were_written() -> None:
    data = json.loads(small_text())
    data["meta"]["states"].append(RECURRENT)
    graph = read_small(json.dumps(data))
    assert graph.meta.recurrent_specs == (RecurrentSpec(3, "conv_state", (6, 3)),)
    assert json.loads(graph_to_json(graph))["meta"] == data["meta"]


def test_a_later_version_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"version 1.*optimize the model again"):
        read_small(changed(DAMAGE["a later version"]))


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(UserError, match=r"os\.system"):
        read_small(changed(DAMAGE["unknown op"]))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"', "\ud800", "[" * 100_000, "9" * 5000])
def test_what_is_no_graph_at_all(text: str) -> None:
    with pytest.raises(UserError):
        read_small(text)


@given(st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_truncated_text(cut: int) -> None:
    text = small_text().rstrip()
    with pytest.raises(UserError):
        read_small(text[: cut % len(text)])


# -- mutation --------------------------------------------------------------------------------------------

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["%input_ids", "@lm_head.weight", "__class__", "x=1/0", "linear", "getitem", "../../x"]),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[[]]]),  # fresh each time: a later mutation may change it
    st.dictionaries(
        st.sampled_from(["dtype", "str", "float", "name", "op"]), st.text(max_size=5), max_size=2
    ),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, child in items:
        found += [(value, key), *places(child)]
    return found


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """The small graph with one to three values replaced, removed, or renamed."""
    data = json.loads(small_text())
    for _ in range(draw(st.integers(1, 3))):
        found = places(data)
        container, key = found[draw(st.integers(0, len(found) - 1))]
        kind = draw(st.sampled_from(["replace", "remove", "rename"]))
        if kind == "remove":
            del container[key]
        elif kind == "rename" and isinstance(container, dict):
            container[draw(st.text(max_size=6))] = container.pop(key)
        else:
            container[key] = draw(HOSTILE)
    return json.dumps(data)


@given(mutated())
@settings(max_examples=250, deadline=None)
def test_a_mutated_file_is_read_or_refused(text: str) -> None:
    """A file that is still a graph reads to one with known ops and inputs only; any other is a UserError."""
    try:
        graph = read_small(text)
    except UserError:
        return
    known = {f"{c}_cache_{s.layer}" for s in graph.meta.kv_specs for c in "kv"} | {*inputs_of(small_text())}
    for node in graph.fx.nodes:
        assert node.op in ("placeholder", "get_attr", "call_function", "output")
        if node.op == "call_function":
            assert node.target in OPS.values()
            assert all(keyword.isidentifier() for keyword in node.kwargs)
        if node.op == "placeholder":
            assert node.target in known


def inputs_of(text: str) -> list[str]:
    return json.loads(text)["inputs"]


def test_code_generated_from_a_file_names_nothing_of_the_file() -> None:
    """Lowering makes Python source of a graph; weight names from a file must not get into it."""
    name = "__import__('os').system('true')"
    graph = small_graph()
    graph.weights[name] = Weight(torch.eye(8), Origin((Part("a", 8),)))
    node = next(n for n in graph.fx.nodes if n.target == "embed.weight")
    node.target = name
    graph.weights.pop("embed.weight")
    again = read(graph_to_json(graph), graph)
    module = lower(again).module
    assert "system(" not in module.code
