"""TODO."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import TYPE_CHECKING

from minigpt.checks import integer
from minigpt.cli.machine import Progress
from minigpt.errors import MiniGPTError

if TYPE_CHECKING:
    pass
from minigpt.cli.machine import _load, _on_signal, _print_json, _print_machine, _print_rate, _raise_stopped
from minigpt.cli.prompt import _params


def _run_job(args: argparse.Namespace) -> None:
    """generate --input: a record for each completion, to --output or standard output."""
    from minigpt import jobs

    if any(value is not None for value in (args.text, args.prompt, args.file)):
        raise ValueError("the prompt is given twice: --input FILE holds the prompts")
    for name in ("ids", "echo", "ablate"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for one prompt, not for --input")
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output")
    if args.batch_size is not None:
        integer("--batch-size", args.batch_size, 1, 4096)
    params = _params(args)

    from minigpt.language_model import BATCH_SIZE
    from minigpt.network.device import find_device

    settings = {"model": args.model, "revision": args.revision, "dtype": args.dtype, "special": args.special}
    settings["device"] = find_device(args.device).type  # it decides what sampling draws
    job = jobs.Job(args.input, args.output, params, settings, resume=args.resume)
    with closing(job.output) as output:
        lm = _load(args)
        started = time.perf_counter()
        with _on_signal(_raise_stopped), Progress(job.total, "lines", output.done) as progress:
            for record in job.records(
                lm, model=args.model, batch_size=args.batch_size or BATCH_SIZE, special=args.special
            ):
                if args.output is None:
                    _print_json(record)
                progress.update(output.done, job.tokens)
            progress.update(output.done, job.tokens)
    if args.stats:
        _print_rate("generation", job.tokens, time.perf_counter() - started)
        _print_machine(lm)
    if output.failed:
        where = args.output or "standard output"
        raise MiniGPTError(f"{output.failed} of {output.count} records are errors: see {where}")
