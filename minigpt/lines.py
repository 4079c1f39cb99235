"""JSON lines as they come from a file: each checked by itself, so that a bad one never stops the others."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.options import did_you_mean

Source = str | BinaryIO  # a file's name, or a file that can be read again, such as a copy of standard input
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # how a file of this kind begins
_KEYS = ("prompt", "ids", *(field.name for field in fields(SamplingParams)))


@dataclass(frozen=True)
class Line:
    """One line of the input: what to continue and how, or what is wrong with it.

    number: from 1.     id: its own (`named`), else its number, also for a bad line.
    prompt: text or token ids.      special: read special tokens in it; None: as the job says.
    skip: how many of its samples are already there.        context: of a text to score.
    """

    number: int
    id: str | int
    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    error: str | None = None
    skip: int = 0
    special: bool | None = None
    named: bool = False
    context: str | None = None


def utf8(data: bytes) -> str:
    """The text of bytes in UTF-8; ValueError for others: "not UTF-8: byte 0xe9 at offset 3"."""
    if data[:2] in _UTF16:
        raise ValueError("UTF-16: save it as UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def source(name: str) -> Source:
    """The file of that name; for "-" a copy of standard input, as the lines are read more than once."""
    if name != "-":
        return name
    if sys.stdin is None:
        raise MiniGPTError("standard input is closed")
    copy = TemporaryFile()  # noqa: SIM115  # it is gone when nobody holds it any more
    shutil.copyfileobj(sys.stdin.buffer, copy)
    return copy


def name_of(source: Source) -> str:
    """What a message calls it."""
    return source if isinstance(source, str) else "standard input"


def numbered(source: Source) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers. Only \\n ends a line: U+2028 and its like are text.

    Raises MiniGPTError if the file cannot be read, or is in UTF-16.
    """
    try:
        with open(source, "rb") if isinstance(source, str) else nullcontext(source) as file:
            if not isinstance(source, str):
                file.seek(0)
            for number, data in enumerate(file, 1):
                if number == 1 and data[:2] in _UTF16:
                    raise MiniGPTError(f"{name_of(source)} is UTF-16: save it as UTF-8")
                data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
                if data.strip():
                    yield number, data
    except OSError as error:
        raise MiniGPTError(f"cannot read {name_of(source)}: {error.strerror}") from None


def survey(source: Source, key: str = "prompt") -> tuple[int, str]:
    """How many lines a file has, the empty ones not counted, and its SHA-256. key: for the example in the message.

    Raises MiniGPTError if it cannot be read, or has none.
    """
    digest, count = hashlib.sha256(), 0
    if isinstance(source, str) and os.path.exists(source) and not (os.path.isdir(source) or os.path.isfile(source)):
        raise MiniGPTError(f"{source} is not a file: the input is read more than once, so put it into one, or use -")
    for number, data in numbered(source):
        digest.update(b"%d:%b" % (number, data.rstrip(b"\r\n")))
        count += 1
    if not count:
        wanted = f"it should hold a JSON object a line, such as {json.dumps({key: 'Once'})}"
        raise MiniGPTError(f"{name_of(source)} is empty: {wanted}")
    return count, digest.hexdigest()


def read_lines(source: Source, params: SamplingParams, fresh: int) -> Iterator[Line]:
    """The lines of a file, each with `params` and its own options over them; a bad line comes with its error.

    Line n has its own seed, else params.seed + n (mod 2^64), else, if it samples, fresh + n.
    Raises MiniGPTError if the file cannot be read.
    """
    return unique_ids(parse(number, data, params, fresh) for number, data in numbered(source))


def parse(number: int, data: bytes, params: SamplingParams, fresh: int) -> Line:
    """One line of the input, see read_lines. Never raises: what is wrong is in the result."""
    return read(number, data, _KEYS, lambda line, values: _task(line, values, params, fresh))


def read(number: int, data: bytes, keys: Sequence[str], use: Callable[[Line, dict[str, Any]], Line]) -> Line:
    """What `use` makes of a line's id and `special`, and of its other values but those that are null.

    keys: all that may be there besides id and special.     Never raises: what is wrong is in the result.
    """
    line = Line(number, number)
    try:
        values = json.loads(utf8(data).rstrip(), object_pairs_hook=_unique)
        if not isinstance(values, dict):
            raise ValueError(f"a line must be a JSON object, such as {json.dumps({keys[0]: 'Once'})}")
        id = number if values.get("id") is None else values["id"]
        if isinstance(id, bool) or not isinstance(id, (str, int)):
            raise ValueError(f"id must be a text or an integer, not {id!r}")
        line = replace(line, id=id, named=values.get("id") is not None)
        special = values.get("special")
        if not isinstance(special, bool) and special is not None:
            raise ValueError(f"special must be true or false, not {special!r}")
        unknown = next((key for key in values if key not in (*keys, "id", "special")), None)
        if unknown is not None:
            meant = did_you_mean(unknown) if keys == _KEYS else ""
            more = "special, and options of generate" if keys == _KEYS else "and special"
            raise ValueError(f"unknown key {unknown!r}{meant or f': a line has {keys[0]}, {keys[1]}, id, {more}'}")
        line = replace(line, special=special)
        return use(line, {key: values[key] for key in keys if values.get(key) is not None})
    except json.JSONDecodeError as error:
        text = error.doc.strip()
        shown = "" if text[:1] in ("{", "[") else f"; write it as {json.dumps({keys[0]: text[:40]})}"
        return replace(line, error=f"not JSON: {error.msg} at column {error.colno}{shown}")
    except ValueError as error:
        return replace(line, error=str(error))
    except RecursionError:  # of json, or of the repr in a message
        return replace(line, error="not a line that can be read: it is nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return dict(pairs)


def unique_ids(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines, with an error for an id that an earlier one gave itself. It remembers those ids."""
    seen: dict[str | int, int] = {}
    for line in lines:
        first = seen.setdefault(line.id, line.number) if line.named else line.number
        if first != line.number and line.error is None:
            line = replace(line, error=f"id {line.id!r} is already that of line {first}")
        yield line


def _task(line: Line, values: dict[str, Any], params: SamplingParams, fresh: int) -> Line:
    """The line with what it asks for; ValueError for what it may not."""
    if ("prompt" in values) == ("ids" in values):
        raise ValueError("give one of prompt (text) and ids (a list of token ids)")
    text, ids = values.pop("prompt", ""), values.pop("ids", None)
    if not isinstance(text, str):
        raise ValueError(f"prompt must be a text, not {type(text).__name__}")
    if ids is not None and not isinstance(ids, list):
        raise ValueError(f"ids must be a list of token ids, not {type(ids).__name__}")
    if any(isinstance(item, (list, dict)) for item in ids or ()):
        raise ValueError("ids must be a list of token ids, with no list or object inside")
    base = fresh if params.seed is None else params.seed
    own = replace(params, **values)
    if idle := [name for name in own.without_effect() if name in values or name != "seed"]:
        warnings.warn(f"{', '.join(idle)} has no effect on a line at temperature 0, which is greedy", stacklevel=2)
    if "seed" not in values and (params.seed is not None or own.temperature > 0):
        own = replace(own, seed=(base + line.number) % 2**64)
    return replace(line, prompt=text if ids is None else ids, params=own)
