"""A completions server as a child process, with the standard library only. Arguments: PORT [fail]."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """``/health``, ``/v1/models`` and a streamed ``/v1/completions``."""

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "fail" in sys.argv:
            self.answer("no", 500)
            return
        count = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        events: list[Any] = [{"choices": [{"index": 0, "text": "w "}]}] * count + [
            {"choices": [], "usage": usage}
        ]
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        return


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
