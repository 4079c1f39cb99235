"""`minigpt generate --input`: a record for each completion, to --output or standard output."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing

from minigpt.checks import integer
from minigpt.cli.machine import load, progress, say_machine, say_rate
from minigpt.cli.prompt import given_options, note_context, note_defaults, note_special
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.jobs import begin, records
from minigpt.lines import Input


def run(args: argparse.Namespace) -> None:
    if (args.text, args.prompt, args.file) != (None, None, None):
        raise ValueError("the prompt is given twice: --input FILE holds the prompts")
    for name in ("ids", "echo", "ablate"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for one prompt, not for --input")
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output")
    size = integer("--batch-size", 8 if args.batch_size is None else args.batch_size, 1, 4096)
    options = given_options(args)
    params = SamplingParams(**options)
    lm = load(args) if args.use_model_defaults else None  # else the files are looked at before the model is loaded
    params = lm.defaults.over(options) if lm else params

    from minigpt.network.device import find_device

    settings = {"model": args.model, "revision": args.revision, "dtype": args.dtype, "special": args.special}
    settings["device"] = find_device(args.device).type  # it decides what sampling draws
    source = Input(args.input)
    output, lines = begin(source, args.output, params, settings, resume=args.resume)
    with closing(output):
        if lm is None:
            note_defaults(lm := load(args), options)
        started, tokens = time.perf_counter(), 0
        with progress(source.count, output.done) as bar:
            for found in records(lm, lines, model=args.model, batch_size=size, special=args.special):
                output.write(found)
                for record in found:
                    if args.output is None:
                        print(json.dumps(record), flush=True)
                    note_special(lm.limits.tokenizer, record.get("prompt"), record.get("prompt_ids", ()))
                    note_context(lm, record.get("finish_reason"))
                    tokens += len(record.get("ids", ()))
                speed = tokens / max(time.perf_counter() - started, 1e-9)
                bar.set_postfix_str(f"{speed:,.1f} tokens per second", refresh=False)
                bar.update()
    if args.stats:
        say_rate("generation", tokens, time.perf_counter() - started)
        say_machine(args, lm)
    if output.failed:
        where = args.output or "standard output"
        raise MiniGPTError(f"{output.failed} of {output.count} records are errors: see {where}")
