"""What is said on stderr: notes, and a progress bar with the rate and the time left."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minigpt.checks import integer

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel


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


def _load(args: argparse.Namespace) -> LanguageModel:
    """The model that the arguments name. This imports torch, which takes a second: check the arguments before."""
    if args.threads is not None:
        integer("--threads", args.threads, 1, 4096)
    import torch

    from minigpt.loading import load
    from minigpt.network.device import _usable_threads

    torch.set_num_threads(args.threads or _usable_threads())
    return load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        revision=args.revision,
        offline=args.offline,
        progress=True,
    )


def _print_rate(what: str, tokens: int, seconds: float) -> None:
    rate = tokens / seconds if seconds > 0 else 0.0
    note(f"{what}: {tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens per second")


def _print_machine(lm: LanguageModel) -> None:
    import torch

    if lm.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(lm.device)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    note(f"peak memory: {peak / 2**20:.0f} MiB\ndevice: {lm.device}, {lm.dtype}")


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)  # ASCII: whatever the terminal's encoding, and no odd line breaks


class _Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived while text was coming: unwinds, so that what was written so far is kept."""


def _raise_stopped(number: int, _: object) -> None:
    raise _Stopped(number)


@contextmanager
def _on_signal(action: Callable[[int, Any], None]) -> Iterator[None]:
    """Meanwhile, `action` answers SIGINT and SIGTERM (where signals can be handled: in the main thread).

    An exception raised by a handler can get lost in the imports of large libraries, so that is not how loading ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # nohup
    for number in before:
        signal.signal(number, action)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
