"""What is said on stderr: notes, and a progress bar with the rate and the time left."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType


def one_line(text: str) -> str:
    """`text` as one line of plain characters, whatever a file's name or an argument holds, and not too long."""
    return "".join(char if char.isprintable() else " " for char in text[:2000])


def note(text: str, end: str = "\n") -> None:
    """Print to stderr, if there is one and somebody reads it: no work is lost where nobody does."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, end=end, file=sys.stderr, flush=True)


class Progress:
    """How far a job is: redrawn in place on a terminal, a line every ten seconds (and the last one) in a log.

    total, done: what there is to do and what was done before, in `unit`.
    """

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        self._total, self._unit, self._begun, self._done, self._tokens = total, unit, done, done, 0
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._terminal:
            note("")

    def update(self, done: int, tokens: int) -> None:
        """`done` of the total are done; `tokens` were worked on in this run."""
        self._done, self._tokens = done, tokens
        if time.monotonic() - self._shown > (0.1 if self._terminal else 10):
            self._show()

    def _show(self) -> None:
        self._shown = now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        bar = "#" * int(20 * share)
        text = (
            f"[{bar:.<20}] {self._done:,}/{self._total:,} {self._unit}, {self._tokens / seconds:,.1f} tokens per second"
        )
        if self._done >= self._total:
            text += f", took {_clock(seconds)}"
        elif self._done > self._begun:
            text += f", {_clock(seconds * (self._total - self._done) / (self._done - self._begun))} left"
        padding = " " * (self._width - len(text))
        self._width = len(text)
        note("\r" + text + padding if self._terminal else text, end="" if self._terminal else "\n")


def _clock(seconds: float) -> str:
    """As h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
