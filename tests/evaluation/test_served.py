"""Quality through an API that echoes log probabilities, against a server that really computes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optkit.cli import eval as eval_module
from optkit.cli import main
from optkit.errors import UserError
from optkit.evaluation.quality import windows
from optkit.evaluation.served import ScoringServer, compare_served, kl_lower_bound, score_text
from optkit.text.token_text import TokenTexts, show
from tests.support.comparison import compare
from tests.support.fakes import FakeRunner
from tests.support.live import LiveServer
from tests.support.tiny_tokenizer import TEXT, fast_tokenizer

VOCABULARY = 40
SIZE = fast_tokenizer().get_vocab_size()
WINDOWS = windows([(7 * i * i + i // 3) % VOCABULARY for i in range(600)], 64, 4)


def text_of(token: int) -> str:
    return chr(200 + token)


class Model:
    """Logits that depend on a token and on the one before it."""

    max_length = 64

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 2
        self.table += noise * torch.randn(VOCABULARY, VOCABULARY, generator=generator)

    def logits(self, token_windows: Any) -> Iterator[Tensor]:
        for window in token_windows:
            yield self.table[torch.tensor(window)]


class FakeServer(ThreadingHTTPServer):
    """The echo of a model; ``ids`` says whether it names tokens by id, as vLLM does when asked."""

    def __init__(self, model: Model, ids: bool = True, breaks: str = "") -> None:
        self.model, self.ids, self.breaks = model, ids, breaks
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.breaks == "status":
            return self.reply({"error": {"message": "echo is not supported"}}, 400)
        assert body["echo"] and body["model"] == "tiny"
        prompt = body["prompt"]
        ids = [ord(c) % VOCABULARY for c in prompt] if isinstance(prompt, str) else prompt
        (rows,) = self.server.model.logits([ids])
        log_p = rows.log_softmax(-1)
        name = (lambda t: f"token_id:{t}") if self.server.ids else text_of
        values: list[float | None] = [None] + [float(log_p[i, t]) for i, t in enumerate(ids[1:])]
        top: list[Any] = [None]
        for row in log_p:
            best = row.topk(body["logprobs"])
            top.append({name(int(i)): float(v) for v, i in zip(best.values, best.indices, strict=True)})
        values.append(float(log_p[-1].max()))  # the generated token
        logprobs = {"token_logprobs": values, "top_logprobs": top, "tokens": [""] * len(values)}
        if self.server.breaks == "none":
            logprobs = None
        if self.server.breaks == "short":
            logprobs["token_logprobs"] = values[:5]
        return self.reply({"choices": [{"text": "", "logprobs": logprobs}]})


@pytest.fixture
def serve() -> Iterator[Any]:
    running: list[FakeServer] = []

    def start(*args: Any, **kwargs: Any) -> ScoringServer:
        running.append(FakeServer(*args, **kwargs))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return ScoringServer(running[-1].url)

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("ids", [True, False])
def test_a_served_model_is_measured_as_a_local_one(serve: Any, ids: bool) -> None:
    report = compare_served(Model(0.0), serve(Model(0.5), ids), WINDOWS, text_of)
    local = compare(Model(0.0), Model(0.5), WINDOWS)
    assert report.ppl.value == pytest.approx(local.ppl.value, rel=1e-5)
    assert report.ln_ppl_ratio.value == pytest.approx(local.ln_ppl_ratio.value, abs=1e-5)
    assert report.top1_agreement.value == pytest.approx(local.top1_agreement.value)
    assert 0.3 * local.kl_mean.value < report.kl_lower_bound.value <= local.kl_mean.value + 1e-6


def test_the_same_model_has_no_divergence(serve: Any) -> None:
    report = compare_served(Model(0.0), serve(Model(0.0)), WINDOWS, text_of)
    assert report.kl_lower_bound.value < 1e-6 and report.top1_agreement.value == 1


def test_the_bound_never_exceeds_the_divergence() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        p, q = (torch.randn(30, generator=generator).double().mul(2).log_softmax(-1) for _ in range(2))
        known = {int(i): float(q[i]) for i in torch.randperm(30, generator=generator)[:6]}
        assert kl_lower_bound(p, known) <= float((p.exp() * (p - q)).sum()) + 1e-9


def test_text_is_scored_by_the_servers_own_tokens(serve: Any) -> None:
    report = score_text(serve(Model(0.0)), "abcdefgh" * 600, 4000)
    assert report.windows == 2 and report.tokens == 2 * 1999 and report.ppl.value > 1


@pytest.mark.parametrize(
    ("breaks", "message"), [("status", "400"), ("none", "no log probabilities"), ("short", "for 64 tokens")]
)
def test_a_server_that_cannot_is_a_user_error(serve: Any, breaks: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        serve(Model(0.0), breaks=breaks).score(WINDOWS[0])


def test_the_command_reads_a_url(serve: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    url = serve(Model(0.5)).url
    assert main.run(["eval", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kl_lower_bound"] is None
    monkeypatch.setattr(eval_module, "_open", lambda model, progress: (Model(0.0), None))
    tokenizer = type("T", (), {"decode": lambda self, ids: text_of(ids[0])})()  # a slow one
    monkeypatch.setattr(eval_module, "_tokenizer", lambda artifact, source: tokenizer)
    monkeypatch.setattr(eval_module, "_windows", lambda *_: WINDOWS)
    assert main.run(["eval", url, "--against", "model"]) == 0
    assert "at least" in capsys.readouterr().out
    assert main.run(["eval", "http://127.0.0.1:9/"]) == 2


class FakeLogits:
    """What ``FakeRunner`` computes, one window at a time."""

    def logits(self, token_windows: Any) -> Iterator[Tensor]:
        runner = FakeRunner(vocab_size=SIZE)
        for window in token_windows:
            ids = np.array(window, dtype=np.int64)
            yield torch.from_numpy(np.stack([runner.logits_after(ids[: i + 1]) for i in range(len(ids))]))


@pytest.fixture(scope="module")
def live() -> Iterator[str]:
    with LiveServer(script=None, vocab_size=SIZE, max_model_len=128) as server:
        yield server.url


def test_our_own_server_is_scored_as_what_it_serves(live: str) -> None:
    """Its engine, its echo and its way to write tokens, over HTTP: the same distributions as offline."""
    server = ScoringServer(live)
    assert server.context == 128 and server.longest(512) == 127
    fast = fast_tokenizer()
    texts = TokenTexts(fast)
    assert len({show(texts.of(token)) for token in range(SIZE)}) == SIZE  # else they can't be told apart
    prompts = windows([(7 * i * i + i // 3) % SIZE for i in range(400)], server.longest(512), 3)
    report = compare_served(FakeLogits(), server, prompts, lambda token: show(texts.of(token)))
    assert report.kl_lower_bound.value < 1e-6 and report.top1_agreement.value == 1
    assert report.ppl.value == pytest.approx(report.reference_ppl.value, rel=1e-4)


def test_our_own_server_by_its_own_tokens(
    live: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT * 20)
    assert main.run(["eval", live, "--text", str(tmp_path / "text"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["windows"] == len(TEXT * 20) // 127 and report["tokens"] > report["windows"]
    assert SIZE / 4 < report["ppl"]["value"] < 4 * SIZE  # of random logits
