"""Headless Chromium over the pipe of the DevTools protocol (https://chromedevtools.github.io/devtools-protocol).

A page is opened, JavaScript evaluated, keys are pressed. That is less than a driver such as Playwright brings, and
needs the browser alone.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
READS, WRITES = 3, 4  # descriptors of the browser's ends of the pipes
SECONDS = 30.0


def chromium() -> str | None:
    """The browser of ``OPTKIT_CHROMIUM`` or of the PATH, or None."""
    given = os.environ.get("OPTKIT_CHROMIUM")
    if given:
        return str(Path(given).resolve())
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Page:
    """A page of a running browser.

    Attributes:
        problems: messages of the page's console, its uncaught errors, and what its security policy refused.
        requests: the address of each request, that of the page included.
    """

    to_browser: IO[bytes]
    from_browser: IO[bytes]
    session: str | None = None
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _sent: int = 0
    _rest: bytes = b""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        self.to_browser.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._sent:
                assert "error" not in found, found["error"]
                return found["result"]
            if found.get("method") in (
                "Log.entryAdded",
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
            ):
                self.problems.append(json.dumps(found["params"]))
            elif found.get("method") == "Network.requestWillBeSent":
                self.requests.append(found["params"]["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self.from_browser.fileno(), 1 << 16)
            assert data, "the browser is gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of ``expression`` as soon as it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"still not true: {expression}; {self.problems}"
            time.sleep(0.05)
        return value

    def show_as(self, width: int, *, scheme: str = "light", media: str = "") -> None:
        """Take a width in pixels, a color scheme, and a medium such as ``print``."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def screenshot(self, width: int, height: int, top: float = 0.0, scale: float = 1.0) -> bytes:
        """A PNG of the page from ``top`` on, below the window's edge too."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": scale}
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])

    def type_text(self, text: str) -> None:
        """Type ``text`` into the element with the focus, as a keyboard does."""
        self.send("Input.insertText", text=text)


@contextmanager
def opened(browser: str, url: str, profile: Path) -> Iterator[Page]:
    """The page of ``url`` in a new browser with an empty ``profile``."""
    inward, outward = os.pipe(), os.pipe()
    # A shell gives the pipes the numbers that the browser expects; libraries may lie beside a fetched browser.
    script = f'exec "$0" "$@" {READS}<&{inward[0]} {WRITES}>&{outward[1]}'
    command = ["bash", "-c", script, browser, *FLAGS, f"--user-data-dir={profile}"]
    libraries = f"{Path(browser).parent / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "HOME": str(profile)}
    process = subprocess.Popen(
        command, pass_fds=(inward[0], outward[1]), env=environment, stderr=subprocess.DEVNULL
    )
    os.close(inward[0])
    os.close(outward[1])
    with os.fdopen(inward[1], "wb", buffering=0) as writer, os.fdopen(outward[0], "rb") as reader:
        try:
            page = Page(writer, reader)
            target = page.send("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            page.send("Page.navigate", url=url)
            page.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")
            yield page
        finally:
            process.kill()
            process.wait()
