"""`minigpt tokenize`: a text's tokens, one a line."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from minigpt.cli.machine import note
from minigpt.cli.prompt import read_prompt

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> None:
    text = str(read_prompt(args))

    from minigpt.interpret.terminal import label, token_record
    from minigpt.loading import load_tokenizer

    tokenizer = load_tokenizer(args.model, revision=args.revision, offline=args.offline, progress=True)
    ids = tokenizer.encode(text, special=args.special)
    note_special(tokenizer, text, ids)
    for id in ids:
        print(json.dumps(token_record(tokenizer, id)) if args.json else f"{id}\t{label(tokenizer, id)}")


def note_special(tokenizer: Tokenizer | None, text: object, ids: list[int]) -> bool:
    """Say so if the text spells special tokens that `ids` hold as plain text."""
    special = tokenizer.special_tokens if tokenizer and isinstance(text, str) else {}
    plain = [name for name, id in special.items() if name in str(text) and id not in ids]
    if plain:
        note(f"{plain[0]} is read as plain text: add --special to read it as the special token")
    return bool(plain)
