"""`minigpt generate --input`: a record for each completion, to --output or standard output."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from dataclasses import replace

from minigpt.checks import integer
from minigpt.cli.machine import load, note, progress, say_machine, say_rate
from minigpt.cli.main import Unwinding
from minigpt.cli.prompt import decoding, options
from minigpt.cli.tokenize import note_special
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.jobs import Job
from minigpt.lines import source


def run(args: argparse.Namespace) -> None:
    if any(value is not None for value in (args.text, args.prompt, args.file)):
        raise ValueError("the prompt is given twice: --input FILE holds the prompts")
    for name in ("ids", "echo", "ablate"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for one prompt, not for --input")
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output")
    size = integer("--batch-size", 8 if args.batch_size is None else args.batch_size, 1, 4096)
    given = options(args)
    params = SamplingParams(**given)
    lm = load(args) if args.use_model_defaults else None  # else the files are looked at before the model is loaded
    params = replace(lm.defaults, **given) if lm else params

    from minigpt.network.device import find_device

    settings = {"model": args.model, "revision": args.revision, "dtype": args.dtype, "special": args.special}
    settings["device"] = find_device(args.device).type  # it decides what sampling draws
    job = Job(source(args.input), args.output, params, settings, resume=args.resume)
    with closing(job.output) as output:
        if lm is None:
            lm = load(args)
            decoding(lm, given, False)  # for its note
        started, full, plain = time.perf_counter(), 0, False
        with Unwinding(), progress(job.total, output.done) as bar:
            for record in job.records(lm, model=args.model, batch_size=size, special=args.special):
                if args.output is None:
                    print(json.dumps(record), flush=True)
                plain = plain or note_special(lm.limits.tokenizer, record.get("prompt"), record.get("prompt_ids", []))
                full += record.get("finish_reason") == "context"
                speed = job.tokens / max(time.perf_counter() - started, 1e-9)
                bar.set_postfix_str(f"{speed:,.1f} tokens per second", refresh=False)
                bar.update(output.done - bar.n)
            bar.update(output.done - bar.n)
    if full:
        ends = f"end{'s' * (full == 1)} at the context of {lm.config.n_positions} tokens"
        note(f"{full} of the texts {ends}: --overflow slide goes on")
    if args.stats:
        say_rate("generation", job.tokens, time.perf_counter() - started)
        say_machine(args, lm)
    if output.failed:
        where = args.output or "standard output"
        raise MiniGPTError(f"{output.failed} of {output.count} records are errors: see {where}")
