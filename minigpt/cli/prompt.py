"""What a command is given: the prompt and the options of decoding; and notes about them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.checks import without_surrogates
from minigpt.decoding.params import SamplingParams
from minigpt.errors import PromptError
from minigpt.lines import standard_input, utf8

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel
    from minigpt.text.tokenizer import Tokenizer


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt, a text or with --ids token ids, from where the arguments say.

    Raises ValueError if it is given twice or not at all, PromptError if it cannot be read or is not UTF-8.
    """
    given = [value for value in (args.text, args.prompt, args.file) if value is not None]
    if len(given) != 1:
        what = "the prompt is given twice" if given else "no prompt"
        raise ValueError(f"{what}: give one of PROMPT, --prompt TEXT, --file FILE, or - for standard input")
    file = "-" if args.text == "-" else args.file
    text = without_surrogates(given[0]) if file is None else read_text(file)
    if not getattr(args, "ids", False):
        return text
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        wanted = "with --ids the prompt is token ids separated by spaces or commas"
        raise PromptError(f"{wanted}, not {text[:50]!r}") from None


def read_text(file: str) -> str:
    """The text of a file, or of standard input for "-", without a byte-order mark and one final newline."""
    name = "standard input" if file == "-" else file
    try:
        text = utf8(standard_input().read() if file == "-" else Path(file).read_bytes()).removeprefix("\ufeff")
    except OSError as error:
        raise PromptError(f"cannot read the prompt from {name or repr(name)}: {error.strerror}") from None
    except ValueError as error:
        raise PromptError(f"{name} is {error}") from None
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that are given."""
    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    given |= {"logit_bias": args.logit_bias and dict(args.logit_bias), "stop_ids": () if args.ignore_eos else None}
    return {name: value for name, value in given.items() if value is not None}


def note_defaults(lm: LanguageModel, given: dict[str, Any]) -> None:
    """Note the model's own defaults that are not used; --use-model-defaults would use them."""
    plain = SamplingParams()
    theirs = {name: value for name, value in vars(lm.defaults).items() if value != getattr(plain, name)}
    if unused := [f"{name} {value}" for name, value in theirs.items() if name not in given]:
        note = f"generation_config.json sets {', '.join(unused)}: add --use-model-defaults to decode so"
        warnings.warn(note, stacklevel=1)


def note_special(tokenizer: Tokenizer | None, text: object, ids: Collection[int]) -> None:
    """Note, once for a command, that the text spells special tokens which `ids` hold as plain text."""
    special = tokenizer.special_tokens if tokenizer and isinstance(text, str) else {}
    if plain := [name for name, id in special.items() if name in str(text) and id not in ids]:
        warnings.warn(f"{plain[0]} is read as plain text: add --special to read it as the special token", stacklevel=1)


def note_context(lm: LanguageModel, finish_reason: str | None) -> None:
    """Note, once for a command, that a text ends where the context does."""
    if finish_reason == "context":
        size = lm.config.n_positions
        warnings.warn(f"a text ends at the context of {size} tokens: --overflow slide goes on", stacklevel=1)
