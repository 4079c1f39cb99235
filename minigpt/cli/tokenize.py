"""TODO."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer
from minigpt.cli.machine import _print_json
from minigpt.cli.prompt import _prompt


def _shown(tokenizer: Tokenizer, id: int) -> str:
    """A token as Python writes it: text, or bytes where it is part of a character."""
    data = tokenizer.token_bytes(id)
    try:
        return repr(data.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(data)


def run(args: argparse.Namespace) -> None:
    text = _prompt(args)

    from minigpt.errors import TokenizerError
    from minigpt.files import checkpoint, locate
    from minigpt.text.tokenizer import Tokenizer

    folder = locate.locate(args.model, revision=args.revision, offline=args.offline, progress=True)
    tokenizer = Tokenizer.from_folder(folder, checkpoint.read_config(folder).vocab_size)
    if tokenizer is None:
        raise TokenizerError(f"{args.model} has no tokenizer: it takes token ids only")
    for id in tokenizer.encode(text, special=args.special):
        token = _shown(tokenizer, id)
        if args.json:
            _print_json({"id": id, "token": token})
        else:
            print(f"{id}\t{token}")
