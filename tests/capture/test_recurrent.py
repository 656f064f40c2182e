"""Recurrent layers: captured through transformers' registry of kernels, and compared with its own functions."""

from __future__ import annotations

import sys

import pytest
import torch

from optkit.capture import boundary, capture, layer_numbers, recurrent
from optkit.capture.check import check_capture
from optkit.capture.flatten import Captured, flatten
from optkit.errors import UnsupportedModel, UserError
from optkit.graph.ops import RECORDS, record_of
from optkit.graph.ops.record import Work
from optkit.graph.states import RecurrentSpec
from optkit.graph.verify import verify
from optkit.kernels import reference, reference_recurrent
from optkit.kernels.cpu import native
from optkit.kernels.cpu.program import Program
from optkit.lowering import launch_plan
from optkit.lowering.lower import check_recurrent, lower
from tests.capture.test_architectures import TOLERANCE, eager_logits
from tests.support.architectures import RECURRENT, tiny_model
from tests.support.graphs import apply, captured
from tests.support.ragged import ragged_logits
from tests.support.target import TARGET

hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
pytestmark = pytest.mark.skipif(
    not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"),
    reason="an older transformers has no registry",
)
STATES = {
    "lfm2": ["conv_state_0", "conv_state_2"],
    "olmo_hybrid": ["conv_state_0", "recurrent_state_0"],
    "qwen3_5_text": ["conv_state_0", "recurrent_state_0"],
    "bamba": ["conv_state_0", "ssm_state_0"],
    "falcon_h1": ["conv_state_0", "ssm_state_0", "conv_state_1", "ssm_state_1"],
    "jamba": ["conv_state_0", "ssm_state_0"],
    "mamba": ["conv_state_0", "ssm_state_0", "conv_state_1", "ssm_state_1"],
    "zamba2": [f"{name}_{layer}" for layer in range(4) for name in ("conv_state", "ssm_state")],
}


@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_logits_match_eager_in_ragged_chunks_and_decodes(name):
    graph, model = captured(name), tiny_model(name)
    verify(graph)
    assert [spec.inputs[0] for spec in graph.meta.recurrent_specs] == STATES[name]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (29, 2, 41)]
    for prompt, logits in zip(prompts, ragged_logits(lower(graph), prompts), strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=TOLERANCE, rtol=1e-4)


def test_an_attention_block_of_several_layers_has_a_cache_for_each():
    graph = captured("zamba2")
    assert [spec.layer for spec in graph.meta.kv_specs] == [0, 2, 3]
    weights = [name for name in graph.weights if name.endswith("self_attn.o_proj.weight")]
    assert len(weights) == 2


@pytest.mark.parametrize("name", ["lfm2", "bamba"])
def test_a_state_that_is_not_kept_is_refused(name, monkeypatch):
    zeros = lambda pool, slot, is_first: torch.zeros_like(pool[slot])  # noqa: E731
    monkeypatch.setattr(reference_recurrent, "first_state", zeros)
    with pytest.raises(UnsupportedModel, match="in batches of chunks"):
        check_capture(captured(name), tiny_model(name))


def test_a_convolution_of_other_taps_is_refused():
    graph = captured("lfm2")
    node = next(iter(graph.calls(reference_recurrent.short_conv)))
    weight = graph.weight_value(node.args[1])
    graph.set_weight(node.args[1], weight.flip(2))
    with pytest.raises(UnsupportedModel, match="in a whole prompt"):
        check_capture(graph, tiny_model("lfm2"))


# -- the registry ----------------------------------------------------------------------------------------


def test_functions_are_replaced_inside_and_restored_after_an_error():
    model = tiny_model("bamba")
    module = sys.modules[type(model).__module__]
    own = module.causal_conv1d_fn, module.mamba2_chunk_scan
    assert [recurrent.registered_name(f) for f in own] == ["causal_conv1d_fn", "mamba_chunk_scan_combined"]
    with pytest.raises(RuntimeError, match="inside"), recurrent.replaced(model):
        assert module.causal_conv1d_fn is recurrent.causal_conv1d
        raise RuntimeError("inside")
    assert own == (module.causal_conv1d_fn, module.mamba2_chunk_scan) and not layer_numbers.current_layers


def test_the_opaque_ops_compute_what_the_model_computes():
    """The model with the ops in place of its functions, on a prompt: the arguments arrive in their places."""
    for name in ("olmo_hybrid", "jamba"):
        model, ids = tiny_model(name), torch.arange(3, 30)
        expected = eager_logits(model, ids)
        with recurrent.replaced(model):
            torch.testing.assert_close(eager_logits(model, ids), expected, atol=TOLERANCE, rtol=1e-4)


def test_every_opaque_op_is_of_the_dialect():
    ops = {name for name, op in RECORDS.items() if op.work is Work.RECURRENT}
    assert ops == {"short_conv", "gated_delta_rule", "ssd_scan", "selective_scan"}
    assert all(hasattr(torch.ops.optkit, name) for name in ops)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (recurrent.causal_conv1d, {"seq_idx": torch.zeros(1, 4)}),
        (recurrent.chunk_delta_rule, {"initial_state": torch.zeros(1)}),
        (recurrent.chunk_scan, {"return_final_states": True}),
        (recurrent.scan, {"return_last_state": True}),
    ],
)
def test_a_state_or_packed_sequences_among_the_arguments_are_refused(function, options):
    given = {"causal_conv1d": 2, "chunk_delta_rule": 5, "chunk_scan": 6, "scan": 5}[function.__name__]
    with pytest.raises(UnsupportedModel, match="is called with"):
        function(*[torch.zeros(1, 4, 4)] * given, **options)


def test_a_layer_without_a_number_is_refused():
    with pytest.raises(UnsupportedModel, match="no layer number"):
        recurrent.causal_conv1d(torch.zeros(1, 4, 5), torch.zeros(4, 3))


# -- wiring ----------------------------------------------------------------------------------------------


class TwoConvolutions(torch.nn.Module):
    """A layer with two convolutions; the weight of the second may be computed."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
        self.a, self.b = torch.nn.Conv1d(4, 4, 3, groups=4), torch.nn.Conv1d(4, 4, 2, groups=4)
        self.factor = 2.0 if computed else 1.0

    def forward(self, ids, positions, rows):
        x = self.embed(ids)
        x = torch.ops.optkit.short_conv(x, self.a.weight.squeeze(1), self.a.bias, "silu", 7)
        weight = self.b.weight.squeeze(1)
        weight = weight * self.factor if self.factor != 1.0 else weight
        x = torch.ops.optkit.short_conv(x, weight, None, "", 7)
        return (self.head(x)[:, rows],)


def wired(computed: bool):
    model = TwoConvolutions(computed)
    tokens = {1: torch.export.Dim("T", min=2, max=64)}
    inputs = torch.arange(5)[None], torch.arange(5)[None], torch.arange(3)
    program = torch.export.export(model, inputs, dynamic_shapes=(tokens, tokens, None), strict=False)
    model.get_input_embeddings, model.get_output_embeddings = lambda: model.embed, lambda: model.head
    config = type("Config", (), {"model_type": "two", "vocab_size": 9, "max_position_embeddings": 64})
    return flatten(Captured(program.run_decompositions({}), model, config))


def test_a_second_state_of_a_layer_has_a_name_of_its_own():
    specs = wired(computed=False).meta.states
    assert specs == (RecurrentSpec(7, "conv_state", (2, 4)), RecurrentSpec(7, "conv_state_1", (1, 4)))


def test_a_computed_weight_of_a_convolution_is_refused():
    with pytest.raises(UnsupportedModel, match="weight of a convolution is computed"):
        wired(computed=True)


# -- lowered ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("name", ["lfm2", "olmo_hybrid", "bamba", "jamba", "mamba"])
def test_a_lowered_model_runs_native_kernels_with_the_same_bits_in_programs(name, monkeypatch):
    monkeypatch.setattr(launch_plan, "WORTH_IT", 1)  # float layers run in torch, and leave short stages
    graph = captured(name)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (23, 2, 38)]
    inside, outside = lower(graph, TARGET), lower(graph, TARGET, programs=False)
    recurrent_nodes = [
        n.name for n in graph.fx.nodes if (op := record_of(n.target)) and op.work is Work.RECURRENT
    ]
    calls = sum(n.target.num_calls for n in inside.module.graph.nodes if isinstance(n.target, Program))
    assert calls > len(recurrent_nodes)
    assert {inside.kernels[node] for node in recurrent_nodes} == {"native"}
    ours, plain = ragged_logits(inside, prompts), ragged_logits(outside, prompts)
    for given, same, expected in zip(ours, plain, ragged_logits(lower(graph), prompts), strict=True):
        assert torch.equal(given, same)
        torch.testing.assert_close(given, expected, atol=2 * TOLERANCE, rtol=1e-4)


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_quantized_layers_with_states_are_one_program(name):
    graph = captured(name, **({"time_step_rank": 32, "state_size": 16} if name == "mamba" else {}))
    for each in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm"):
        apply(graph, each)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    apply(graph, "flash_attention")
    nodes = [n for n in lower(graph, TARGET).module.graph.nodes if n.op == "call_function"]
    assert sum(isinstance(n.target, Program) for n in nodes) == 1
    assert not [n.name for n in nodes if not isinstance(n.target, Program) and "getitem" not in n.name]


def test_a_gpu_without_kernels_refuses_states():
    graph = captured("lfm2")
    with pytest.raises(UserError, match="no kernel for GPUs"):
        check_recurrent(graph, {}, TARGET)


@pytest.mark.skipif(not native.available(), reason="native kernels are missing")
def test_three_positions_a_token_are_no_three_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles of multimodal RoPE are [3, 1, T, D / 2]; every stage is a program here."""
    monkeypatch.setattr(launch_plan, "WORTH_IT", 1)
    model, generator = tiny_model("qwen3_5_text"), torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (n,), generator=generator) for n in (29, 2, 41)]
    served = ragged_logits(lower(captured("qwen3_5_text"), TARGET), prompts)
    for prompt, logits in zip(prompts, served, strict=True):
        torch.testing.assert_close(logits, eager_logits(model, prompt), atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("lfm2", "conv"), ("qwen3_next", "linear_attention")])
def test_a_model_of_recurrent_layers_alone_is_captured(name: str, kind: str) -> None:
    """transformers' cache has no length there, and fails."""
    boundary.register()
    options = {"num_hidden_layers": 2, "layer_types": [kind] * 2}
    graph = capture(boundary.built(lambda attention: tiny_model(name, attention=attention, **options)))
    assert not list(graph.calls(reference.attention)) and graph.weights
