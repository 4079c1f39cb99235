"""`minigpt generate --input`: a record for each completion, to --output or standard output."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack, closing

from minigpt.checks import integer
from minigpt.cli.machine import load, note, progress, say_machine, say_rate
from minigpt.cli.main import Unwinding
from minigpt.cli.prompt import decoding, note_special, options
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError


def run(args: argparse.Namespace) -> None:
    """Do what the arguments say."""
    from minigpt.jobs import BATCH_SIZE, Job, spooled

    if any(value is not None for value in (args.text, args.prompt, args.file)):
        raise ValueError("the prompt is given twice: --input FILE holds the prompts")
    for name in ("ids", "echo", "ablate"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for one prompt, not for --input")
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output")
    size = integer("--batch-size", args.batch_size or BATCH_SIZE, 1, 4096)
    ...
