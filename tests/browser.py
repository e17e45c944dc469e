"""A real browser without a window, spoken to over two pipes by the DevTools protocol; nothing to install."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium or Chrome, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab; `errors` are uncaught exceptions and errors of the console, `requests` what it fetched."""

    def __init__(self, program: str, profile: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._count, self._rest, self._session = 0, b"", ""
        (child_in, self._out), (self._in, child_out) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (child_in, child_out)]
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        flags += ["--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
        moves = [(os.POSIX_SPAWN_DUP2, end, place) for end, place in zip(ends, (3, 4), strict=True)]
        self._pid = os.posix_spawn(program, [program, *flags], os.environ, file_actions=[*quiet, *moves])
        for end in (child_in, child_out, *ends):
            os.close(end)
        os.set_blocking(self._in, False)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, dark: bool = False, has_plots: bool = True) -> None:
        """Show a page in a window of this width and wait until all of it is there, its plots drawn."""
        self.resize(width, dark)
        self.call("Page.navigate", url=path.resolve().as_uri())
        drawn = " && document.documentElement.dataset.drawn !== undefined"
        there = (
            f"location.href === {json.dumps(path.resolve().as_uri())} && document.readyState === 'complete'"
        )
        self.wait(there + (drawn if has_plots else ""))

    def resize(self, width: int, dark: bool) -> None:
        """Give the window a width and a scheme of colours."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < end and not self.errors, (condition, self.errors)
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print_pdf(self, path: Path) -> None:
        """The page as it would be printed."""
        found = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its result; events that come before it are noted."""
        self._count += 1
        whom = {"sessionId": self._session} if self._session else {}
        message = {"id": self._count, "method": method, "params": params, **whom}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            row = self._read()
            if row.get("id") == self._count:
                assert "error" not in row, (method, row)
                return dict(row["result"])
            self._note(row)

    def close(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    def _note(self, row: dict[str, Any]) -> None:
        method, params = row.get("method"), row.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            try:
                got = os.read(self._in, 1 << 20)
            except BlockingIOError:
                assert time.monotonic() < end, "the browser does not answer"
                time.sleep(0.005)
                continue
            assert got, "the browser has ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))
