"""What the commands share: the model on its machine, notes and figures on stderr, the progress bar of a job."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from minigpt.checks import integer

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel


def say(text: str, end: str = "\n") -> None:
    """Print to stderr. No work is lost where nobody reads it."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """One line on stderr, whatever a file's name or an argument holds."""
    say(f"minigpt: {one_line(text)}")


def one_line(text: str) -> str:
    """The text in plain characters, and not too long."""
    return "".join(char if char.isprintable() else " " for char in text[:2000])


def load(args: argparse.Namespace) -> LanguageModel:
    """The model that the arguments name. Imports torch, which takes a second: check the arguments before."""
    if args.threads is not None:
        integer("--threads", args.threads, 1, 4096)
    import torch

    from minigpt import loading
    from minigpt.network import device

    torch.set_num_threads(args.threads or device.usable_cpus())
    started = time.perf_counter()
    places = {"device": args.device, "dtype": args.dtype, "revision": args.revision, "offline": args.offline}
    lm = loading.load(args.model, progress=True, draft=getattr(args, "draft", "off"), **places)
    args.load_seconds = time.perf_counter() - started
    return lm


def progress(total: int, done: int) -> Any:
    """A bar: redrawn in place on a terminal, a line every ten seconds in a log."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    shape = "{percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} lines, {remaining} left{postfix}"
    every = 0.1 if sys.stderr.isatty() else 10
    out = SimpleNamespace(write=lambda text: say(text, ""), flush=bool, encoding=sys.stderr.encoding)
    settings = {"bar_format": shape, "mininterval": every, "file": out}
    return tqdm(total=total, initial=done, **settings)  # type: ignore[no-untyped-call]


def say_rate(what: str, tokens: int, seconds: float) -> None:
    """A line of --stats."""
    speed = tokens / seconds if seconds > 0 else 0.0
    say(f"{what}: {tokens} token{'s' * (tokens != 1)} in {seconds:.2f} s, {speed:.1f} tokens per second")


def say_machine(args: argparse.Namespace, lm: LanguageModel) -> None:
    """The last lines of --stats: memory, device, model and tokenizer."""
    import torch

    from minigpt.network.products import format_name

    peak = torch.cuda.max_memory_allocated(lm.device) if lm.device.type == "cuda" else 0
    with suppress(ImportError):  # Windows has no such module
        import resource

        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if peak:
        say(f"peak memory: {peak / 2**20:.0f} MiB")
    size = sum(parameter.numel() for parameter in lm.model.parameters())
    products = f"{torch.get_num_threads()} threads, matrix products by {format_name(lm.model.output)}"
    say(f"device: {lm.device}, {lm.dtype}, {products}")
    say(f"model: {size:,} parameters, loaded in {args.load_seconds:.2f} s")
    say(f"tokenizer: {getattr(lm.limits.tokenizer, 'origin', 'none')}")
