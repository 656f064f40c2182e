"""A program: optkit's application on a scripted model. Prints a line with the address, ends with standard input."""

from __future__ import annotations

import sys

from tests.clients.weather import script
from tests.support.chat_templates import QWEN
from tests.support.serve_fakes import FakeEngine, prompt_of, served, tiny_app

if __name__ == "__main__":
    engine = FakeEngine(lambda request: script(prompt_of(request)))
    with served(tiny_app(engine, QWEN, max_model_len=16_384)) as address:
        sys.stdout.write(f"tiny ready at {address} (scripted)\n")
        sys.stdout.flush()
        sys.stdin.read()
