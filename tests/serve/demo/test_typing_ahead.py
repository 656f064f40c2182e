"""The JavaScript client, run by Node.js against a server: calls while typing, and the answer of a plain request."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

from tests.support.serve_fakes import SteppedEngine, post, served, tiny_app

NODE = shutil.which("node")
WORDS = "one two three four five six seven eight nine ten " * 2
DRIVE = """
const ahead = new TypingAhead({url: process.argv[2], interval: 20});
const message = text => [{role: "user", content: text}];
(async () => {
  const words = process.argv[3].trim().split(" ");
  for (let end = 1; end <= words.length; end++) {
    ahead.update(message(words.slice(0, end).join(" ")));
    await new Promise(done => setTimeout(done, 10));
  }
  await new Promise(done => setTimeout(done, 500));
  const pieces = [];
  const limits = {max_tokens: 8, temperature: 0};
  const found = await ahead.send(message(words.join(" ")), piece => pieces.push(piece), limits);
  let failure = null;
  try { await ahead.send([]); } catch (error) { failure = error.message; }
  console.log(JSON.stringify({...found, pieces: pieces.join(""), calls: ahead.calls, failure}));
})();
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_client_warms_while_typing_and_sends() -> None:
    client = (files("optkit.serve.demo") / "typing-ahead.js").read_text("utf-8")
    engine = SteppedEngine()
    with served(tiny_app(engine)) as url:
        command = [str(NODE), "-", url, WORDS]
        done = subprocess.run(
            command, input=client + DRIVE, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert 1 < found["calls"] < 20  # at most one in an interval
    assert found["cachedTokens"] > 0.5 * found["promptTokens"]
    assert found["firstTokenMs"] > 0 and found["text"] == found["pieces"]
    assert "messages" in found["failure"]
    body = {"messages": [{"role": "user", "content": WORDS.strip()}], "max_tokens": 8, "temperature": 0}
    plain = post(tiny_app(SteppedEngine()), "/v1/chat/completions", body).json()
    assert found["text"] == plain["choices"][0]["message"]["content"]
