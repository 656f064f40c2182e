"""The page at ``/demo`` (``optkit serve --demo``): typing ahead in a browser, with the measured first token.

The page is a single file without requests to other places: the client ``typing-ahead.js`` is a part. A content
security policy allows the page's own script and style, by hash, and connections to the server alone.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from optkit.serve.http.auth import DEMO_PATH

MARK = "/* typing-ahead.js */\n"


def page() -> str:
    """The page, the client included."""
    folder = files(__name__)
    html = (folder / "demo.html").read_text("utf-8")
    return html.replace(MARK, (folder / "typing-ahead.js").read_text("utf-8"))


def policy(html: str) -> str:
    """The content security policy of the page ``html``."""
    rules = {
        "default-src": "'none'",
        "script-src": source(html, "script"),
        "style-src": source(html, "style"),
        "connect-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def source(html: str, element: str) -> str:
    """The hash of the content of ``element`` in ``html``, as a source of the policy."""
    content = html.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def add_demo(app: FastAPI) -> None:
    """Add the page to ``app``."""
    html = page()
    headers = {
        "Content-Security-Policy": policy(html),
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
    }

    @app.api_route(DEMO_PATH, methods=["GET", "HEAD"])
    async def demo() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)
