"""guidellm, a load generator. Prompts come from a file: its own need a tokenizer from the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import Server


def test_load(real: Server, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"hello number {i}"}) + "\n" for i in range(20)))
    command = [sys.executable, "-m", "guidellm", "run", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={real.url},model={real.model}"]
    command += ["--data", f"kind=json_file,path={data}", "--constraint", "kind=max_requests,count=3"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0)
