"""What a command is given: the prompt, and the options of decoding."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.checks import without_surrogates
from minigpt.cli.machine import note
from minigpt.decoding.params import SamplingParams
from minigpt.errors import PromptError
from minigpt.lines import utf8

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt, text or with --ids token ids, from wherever the arguments say.

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
    if file == "-" and sys.stdin is None:
        raise PromptError("standard input is closed")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read the prompt from {name or repr(name)}: {error.strerror}") from None
    if data is None:
        raise PromptError("standard input has nothing to read yet, and is not one to wait for (it is non-blocking)")
    try:
        text = utf8(data).removeprefix("\ufeff")
    except ValueError as error:
        raise PromptError(f"{name} is {error}") from None
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that are given."""
    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    given |= {"logit_bias": args.logit_bias and dict(args.logit_bias), "stop_ids": () if args.ignore_eos else None}
    return {name: value for name, value in given.items() if value is not None}


def decoding(lm: LanguageModel, given: dict[str, Any], model_defaults: bool) -> SamplingParams:
    """The options over the model's own defaults or over the library's; a note says what the choice leaves unused."""
    if model_defaults:
        return replace(lm.defaults, **given)
    plain = SamplingParams()
    theirs = {name: value for name, value in vars(lm.defaults).items() if value != getattr(plain, name)}
    unused = [f"{name} {value}" for name, value in theirs.items() if name not in given]
    if unused:
        note(f"generation_config.json sets {', '.join(unused)}: add --use-model-defaults to decode so")
    return SamplingParams(**given)
