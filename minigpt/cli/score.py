"""`minigpt score`: how likely the model finds a text, or each text of a file."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minigpt.cli.machine import load
from minigpt.cli.prompt import note_special, read_prompt
from minigpt.errors import MiniGPTError
from minigpt.jobs import score_figures, score_records
from minigpt.lines import Input


def run(args: argparse.Namespace) -> None:
    options: dict[str, Any] = {"special": args.special, "bos": args.bos, "stride": args.stride}
    if args.input is not None:
        _score_file(args, options)
        return
    text = read_prompt(args)
    lm = load(args)
    [score] = lm.score([text], context=[args.context], **options)
    figures = score_figures(score)
    note_special(lm.limits.tokenizer, f"{args.context or ''}{text}" if isinstance(text, str) else None, score.ids)
    if args.json:
        print(json.dumps({**figures, "model": args.model, "stride": args.stride}), flush=True)
        return
    if args.stride is None:
        from minigpt.interpret.terminal import label

        given = len(score.ids) - len(score.logprobs)  # the first token, or the context
        for at, id in enumerate(score.ids):
            value = "-" if at < given else f"{score.logprobs[at - given]:.4f}"
            print(f"{id}\t{value}\t{label(lm.limits.tokenizer, id)}")
        print()
    print(f"tokens         {len(score.ids)}\ntotal          {score.total:.4f}\nmean           {score.mean:.6f}")
    print(f"perplexity     {score.perplexity:.6g}")
    if score.bits_per_byte is not None:
        print(f"bits per byte  {score.bits_per_byte:.6f}")


def _score_file(args: argparse.Namespace, options: dict[str, Any]) -> None:
    if (args.text, args.prompt, args.file, args.context) != (None, None, None, None) or args.ids:
        raise ValueError("--input FILE holds the texts: it goes with no text, --context or --ids")
    source, failed = Input(args.input), 0
    lm = load(args)
    for record in score_records(lm, source, model=args.model, **options):
        print(json.dumps(record), flush=True)
        failed += "error" in record
        text = f"{record.get('context') or ''}{record.get('text', '')}"
        note_special(lm.limits.tokenizer, text, record.get("ids", ()))
    if failed:
        raise MiniGPTError(f"{failed} of {source.count} records are errors: see standard output")
