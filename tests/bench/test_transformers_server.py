"""The baseline server says what ``generate`` says, in a stream the client understands."""

import json
import threading
import time

import httpx
import pytest
import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM

from optkit.bench.client import problems, run_workload
from optkit.bench.servers import free_port, model_name
from optkit.bench.transformers_server import Completions, Greedy
from optkit.bench.workload import WorkloadConfig, build


class Tokenizer:
    """One letter a token."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def url(model):
    port = free_port()
    app = Completions(Greedy(model), Tokenizer(), "tiny").app()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_tokens_equal_generate(model, length):
    prompt = torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(length))
    expected = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)[
        0, length:
    ].tolist()
    assert list(Greedy(model).tokens(prompt[0].tolist(), 12)) == expected


def test_streams_through_the_client(url, model):
    load = build(WorkloadConfig(num_prompts=3, input_len=9, output_len=5, max_concurrency=3), list(range(60)))
    records = run_workload(url, model_name(url), load)
    assert model_name(url) == "tiny"
    assert problems(records, load) == []
    assert all(r.ok and r.tokens == 5 and r.prompt_tokens == 9 and len(r.chunks) == 5 for r in records)


def test_text_is_the_decoded_tokens(url, model):
    prompt = [3, 1, 4, 1, 5]
    data = {"prompt": prompt, "max_tokens": 6, "stream": True, "ignore_eos": True, "temperature": 0}
    body = httpx.post(f"{url}/v1/completions", json=data).text
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == Tokenizer().decode(list(Greedy(model).tokens(prompt, 6)))
    assert body.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "text"},
        {"prompt": []},
        {"max_tokens": 0},
        {"stream": False},
        {"temperature": 0.7},
        {"prompt": [True]},
    ],
)
def test_what_it_does_not_do_is_refused(url, change):
    data = {"prompt": [1], "max_tokens": 1, "stream": True, "ignore_eos": True, "temperature": 0} | change
    response = httpx.post(f"{url}/v1/completions", json=data)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
