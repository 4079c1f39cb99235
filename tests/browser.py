"""A real headless Chromium for the tests, driven over its debugging pipe: no package, no port, no network."""

from __future__ import annotations

import base64
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


def find() -> str | None:
    """The browser to use: MINIGPT_BROWSER, or the first that is installed."""
    return os.environ.get("MINIGPT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in one browser. `requests` and `errors` collect what the page fetched and what went wrong in it."""

    def __init__(self, executable: str, profile: Path) -> None:
        ends = [*os.pipe(), *os.pipe()]
        # The protocol is spoken on the file descriptors 3 and 4: a step between puts the browser's ends there.
        to_browser, self._write, self._read, from_browser = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends
        )
        for end in ends:
            os.close(end)
        step = "import os, sys; [os.dup2(int(fd), to) for fd, to in zip(sys.argv[1:3], (3, 4))]; "
        step += "os.execv(sys.argv[3], sys.argv[3:])"
        flags = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "hide-scrollbars", "remote-debugging-pipe"]
        command = [executable, *(f"--{flag}" for flag in flags), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", step, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send one command and give its result; events that come meanwhile are noted."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, file: Path, fragment: str = "", width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a file and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")  # so that a new fragment alone is a new page too
        self.requests, self.errors = [], []
        self.call("Page.navigate", url=file.as_uri() + fragment)
        # Load events do not say of which page they are, and the empty one has its own.
        deadline = time.monotonic() + 60
        while not self.js("location.protocol === 'file:' && document.readyState === 'complete'"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file} does not load")
            time.sleep(0.01)

    def js(self, expression: str) -> Any:
        """The JSON value of an expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).textContent"))

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Move there and click."""
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def at(self, expression: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        script = "(e => { e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
        x, y = self.js(f"{script} return [r.x + r.width / 2, r.y + r.height / 2]; }})({expression})")
        return x, y

    def press(self, key: str) -> None:
        """One key, such as ArrowRight, Tab or ]."""
        extra = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        names = ("End", "Home", "ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown")
        code = {"Tab": 9, "Enter": 13, **{name: 35 + at for at, name in enumerate(names)}}.get(key, 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path) -> None:
        """Save what is visible, as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
