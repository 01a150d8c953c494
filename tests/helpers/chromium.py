"""A headless Chromium over the DevTools protocol, on two pipes and with nothing but the library."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0

# Chromium reads commands from file 3 and writes answers to file 4
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)


def chromium() -> str | None:
    """The program, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def _high(handle: int) -> int:
    """A handle that 3 and 4 are not in the way of."""
    copy = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(handle)
    return copy


class Browser:
    """One page of a browser: what it loaded, said and drew."""

    def __init__(self, program: str, folder: Path) -> None:
        its_in, self._out = map(_high, os.pipe())
        self._in, its_out = map(_high, os.pipe())
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        command = [sys.executable, "-c", _LAUNCH, str(its_in), str(its_out), program, *options]
        self._process = subprocess.Popen(
            command,
            pass_fds=(its_in, its_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_in)
        os.close(its_out)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []  # errors and warnings of the console, and exceptions
        page = next(
            target
            for target in self.call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        )
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            assert ready, "Chromium does not answer"
            content = os.read(self._in, 1 << 16)
            assert content, "Chromium has gone"
            self._received += content
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, said: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(said["entry"]))

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def open(
        self, page: Path | str, width: int = 1280, height: int = 900, *, dark: bool = False
    ) -> None:
        """Load a page of ours, a file or an address, on a screen of a size, until it is drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for("document.documentElement?.dataset.drawn === 'yes'")

    def press(self, key: str, code: int) -> None:
        """Press a key, as a keyboard does."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse there, from beside it."""
        for off in (3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + off, y=y)

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.call("Browser.close")
        finally:
            os.close(self._out)
            os.close(self._in)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
