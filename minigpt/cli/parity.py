"""`minigpt parity`: a model's numbers against those published for it, a record, and transformers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from minigpt.checks import without_surrogates
from minigpt.cli.prompt import read_text
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError, PromptError
from minigpt.lines import Input


def run(args: argparse.Namespace) -> None:
    dtypes = args.dtype or ["float32"]
    if args.record is not None and (len(dtypes) > 1 or args.strict or args.require or args.json):
        raise ValueError("--record compares nothing: it takes one --dtype, and no --strict, --require or --json")
    if args.record is not None and Path(args.record).exists():
        raise MiniGPTError(f"{args.record} is there already: compare with --against, or remove it")
    if "recorded" in args.require and args.against is None:
        raise ValueError("--require recorded needs --against FILE")
    import torch

    from minigpt.network.device import usable_cpus
    from minigpt.parity import record_file
    from minigpt.parity.check import Check, row, shortfall, to_json
    from minigpt.parity.run import make_record
    from minigpt.parity.run import run as compare

    torch.set_num_threads(usable_cpus())
    prompts: list[str | list[int]] = [without_surrogates(text) for text in args.prompt]
    prompts += [read_text(name) for name in args.file]
    prompts += [prompt for name in args.input for prompt in _prompts(name)]
    places = {"device": args.device, "revision": args.revision, "offline": args.offline, "progress": True}
    if args.record is not None:
        made = make_record(args.model, prompts=prompts, dtype=dtypes[0], **places)
        size = record_file.write(args.record, made)
        print(f"{args.record}: {len(made['numbers'])} results of {len(made['prompts'])} prompts, {size:,} bytes")
        return
    against = record_file.read(args.against) if args.against is not None else None
    done: list[Check] = []
    if not args.json:
        print(f"parity of {args.model}, torch {torch.__version__}")
    for check in compare(args.model, prompts=prompts, dtypes=dtypes, against=against, **places):
        if not args.json:
            print(row(check, done[-1] if done else None), flush=True)
        done.append(check)
    problem = shortfall(done, args.strict, args.require)
    counts = {"passed": sum(check.passed is True for check in done)}
    counts["failed"] = sum(check.passed is False for check in done)
    counts["skipped"] = sum(check.passed is None and check.applies for check in done)
    counts["not applicable"] = len(done) - sum(counts.values())
    if args.json:
        record = {"model": args.model, "torch": torch.__version__, **counts, "problem": problem or None}
        print(json.dumps({**record, "checks": [to_json(check) for check in done]}), flush=True)
    else:
        print("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    if problem:
        raise MiniGPTError(f"parity of {args.model} {problem}")


def _prompts(name: str) -> Iterator[str | list[int]]:
    """The texts and lists of ids of a file of JSON lines."""
    plain = SamplingParams()
    for line in Input(name).lines(plain):
        alone = bool(line.prompt) and not line.special and line.params == plain
        if line.error or not alone:
            wrong = "give a prompt (text) or ids (a list of token ids) alone; special tokens as ids"
            raise PromptError(f"{name}, line {line.number}: {line.error or wrong}")
        yield line.prompt
