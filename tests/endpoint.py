"""scripts/serve.py in a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from conftest import ROOT


class Served:
    """`with Served(folder, "--waiting", "2") as served: ... served.url`; the demo model, one thread.

    log: what it wrote so far.
    """

    def __init__(self, folder: Path, *args: str, port: int = 0) -> None:
        self.file = folder / f"serve{time.monotonic_ns()}.log"
        command = [sys.executable, "scripts/serve.py", "-m", "demo", "--offline", "--threads", "1", "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.file.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *args], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        while not (found := re.search(r"running on (http://[\d.]+:(\d+)) ", self.log)):
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        self.url, self.port = found[1], int(found[2])

    @property
    def log(self) -> str:
        return self.file.read_text("utf-8")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it as a service manager does."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
            return dict(json.load(answer))

    def reaches(self, running: int, waiting: int) -> None:
        """Wait until that many rows run and that many requests wait."""
        for _ in range(1200):
            state = self.health()
            if (state["running"], state["waiting"]) == (running, waiting):
                return
            time.sleep(0.01)
        raise AssertionError(state)

    def idle(self) -> None:
        """Wait until nothing runs and nothing waits."""
        self.reaches(0, 0)

    @property
    def files(self) -> int:
        """Open files of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def megabytes(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
