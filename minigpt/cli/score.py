"""`minigpt score`: how likely the model finds a text, or each text of a file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from minigpt.cli.machine import load
from minigpt.cli.main import Unwinding
from minigpt.cli.prompt import lines_of, note_special, read_prompt
from minigpt.errors import MiniGPTError
from minigpt.jobs import score_records
from minigpt.records import finite, scored


def run(args: argparse.Namespace) -> None:
    """Do what the arguments say."""
    options = {"bos": args.bos, "stride": args.stride, "special": args.special}
    if args.input is not None:
        _score_file(args, options)
        return
    text = read_prompt(args)
    lm = load(args)
    with Unwinding():
        score = scored(lm.score(text, context=args.context, **options))
    note_special(lm.limits.tokenizer, f"{args.context or ''}{text}" if isinstance(text, str) else None, score.ids)
    if args.json:
        print(json.dumps({**finite(asdict(score)), "model": args.model, "stride": args.stride}))
        return
    from minigpt.interpret.terminal import label

    if args.stride is None:
        unscored = ["-"] * (len(score.ids) - len(score.logprobs))
        for id, logprob in zip(score.ids, [*unscored, *(f"{x:.4f}" for x in score.logprobs)], strict=True):
            print(f"{id}\t{logprob}" + (f"\t{label(lm.limits.tokenizer, id)}" if lm.limits.tokenizer else ""))
        print()
    print(f"tokens         {len(score.ids)}\ntotal          {score.total:.4f}\nmean           {score.mean:.6f}")
    print(f"perplexity     {score.perplexity:.6g}")
    if score.bits_per_byte is not None:
        print(f"bits per byte  {score.bits_per_byte:.6f}")


def _score_file(args: argparse.Namespace, options: dict[str, object]) -> None:
    if any(value is not None for value in (args.text, args.prompt, args.file, args.context)) or args.ids:
        raise ValueError("--input FILE holds the texts and contexts: give no other, and no --ids")
    source, failed, count = lines_of(args.input), 0, 0
    survey(source)
    with Unwinding():
        for count, record in enumerate(score_records(lm, source, model=args.model, **options), 1):
            print(json.dumps(record), flush=True)
            failed += "error" in record
    if failed:
        raise MiniGPTError(f"{failed} of {count} records are errors: see standard output")
