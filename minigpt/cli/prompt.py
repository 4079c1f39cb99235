"""What a command is given: the prompt, token ids, decoding options."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import fields
from pathlib import Path

from minigpt.checks import without_surrogates
from minigpt.decoding.params import SamplingParams
from minigpt.errors import PromptError


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text, from wherever the arguments say; PromptError if it is given twice, or a file is not UTF-8."""
    given = [value for value in (args.text, args.prompt, args.file) if value is not None]
    if len(given) != 1:
        what = "the prompt is given twice" if given else "no prompt"
        raise ValueError(f"{what}: give one of PROMPT, --prompt TEXT, --file FILE, or - for standard input")
    if args.prompt is not None:
        return without_surrogates(args.prompt)
    if args.file is None and args.text != "-":
        return without_surrogates(args.text)
    name = "standard input" if args.file in (None, "-") else args.file
    try:
        if name == args.file:
            data = Path(name).read_bytes()
        elif sys.stdin is None:
            raise PromptError("standard input is closed")
        else:
            data = sys.stdin.buffer.read()
    except OSError as error:
        raise PromptError(f"cannot read the prompt from {name or repr(name)}: {error.strerror}") from None
    if data is None:
        raise PromptError("standard input has nothing to read yet, and is not one to wait for (it is non-blocking)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
    text = text.removeprefix("\ufeff")
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        wanted = "with --ids the prompt is token ids separated by spaces or commas"
        raise PromptError(f"{wanted}, not {text[:50]!r}") from None


def _echo(args: argparse.Namespace, text: str) -> str:
    """What to print before the continuation."""
    return text + " " * (args.ids and bool(text)) if args.echo else ""


def _params(args: argparse.Namespace) -> SamplingParams:
    """The decoding options as SamplingParams."""
    if args.seed is None and args.temperature > 0 and args.input is None:
        args.seed = secrets.randbits(32)  # chosen here, so that --stats can name it
    given = {field.name: getattr(args, field.name) for field in fields(SamplingParams) if field.name in args}
    given |= {"logit_bias": dict(args.logit_bias), "stop_ids": () if args.ignore_eos else None}
    return SamplingParams(**given)
