"""A headless Chromium for tests of pages, over WebDriver's own protocol, so that no package is needed for it.

`make browser` installs Debian's chromium and chromium-driver; where they are absent, `missing()` says so.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--window-size=1440,1000",
)  # fmt: skip


def missing() -> str | None:
    """Why there is no browser to test with, or None."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed; `make browser` installs it on Debian"
    return None


class Browser:
    """One page in one browser; use it in `with`."""

    def __init__(self, profile: Path, *, dark: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._base = f"http://127.0.0.1:{port}"
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self._wait_until_up()
            session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._base += f"/session/{session['sessionId']}"

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def open(self, page: Path) -> None:
        self._ask("POST", "/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that JavaScript returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def type(self, selector: str, text: str) -> None:
        (element,) = self._ask("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._ask("POST", f"/element/{element}/clear", {})
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        (element,) = self._ask("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._ask("POST", f"/element/{element}/click", {})

    def drag(self, selector: str, start: int, end: int) -> None:
        """Presses the mouse on an element, `start` pixels right of its middle, and lets go at `end`."""
        origin = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        steps = [
            {"type": "pointerMove", "duration": 0, "origin": origin, "x": start, "y": 0},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "duration": 50, "origin": origin, "x": end, "y": 0},
            {"type": "pointerUp", "button": 0},
        ]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self._ask("POST", "/actions", {"actions": [mouse]})

    def console(self) -> list[str]:
        """Everything written to the console since the last call, errors of scripts and refused loads among it."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                self._ask("GET", "/status")
                return
            except OSError:
                if time.monotonic() > deadline or self._driver.poll() is not None:
                    raise
                time.sleep(0.05)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
