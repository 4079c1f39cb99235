"""`minigpt tokenize`: a text's tokens, one a line."""

from __future__ import annotations

import argparse
import json

from minigpt.cli.prompt import note_special, read_prompt


def run(args: argparse.Namespace) -> None:
    text = str(read_prompt(args))

    from minigpt.interpret.terminal import label, token_record
    from minigpt.loading import load_tokenizer

    tokenizer = load_tokenizer(args.model, revision=args.revision, offline=args.offline, progress=True)
    ids = tokenizer.encode(text, special=args.special)
    note_special(tokenizer, text, ids)
    for id in ids:
        print(json.dumps(token_record(tokenizer, id)) if args.json else f"{id}\t{label(tokenizer, id)}")
