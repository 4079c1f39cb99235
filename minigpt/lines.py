"""JSON lines as they come from a file: each checked by itself, so that a bad one never stops the others."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from minigpt.checks import short_repr
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.options import did_you_mean

_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # how a file of this kind begins
_TO_CONTINUE = ("prompt", "ids", "id", "special", *(each.name for each in fields(SamplingParams)))
_TO_SCORE = ("text", "context", "id", "special")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("prompt", "text", "context"), ((str,), "a text")),
    "ids": ((list,), "a list of token ids"),
    "id": ((str, int), "a text or an integer"),
    "special": ((bool,), "true or false"),
}


@dataclass(frozen=True)
class Line:
    """One line of the input: a prompt and how to continue it, or a text to score; or an error.

    number: from 1.     id: its own, else its number.   prompt: text or token ids; the text to score.
    special: read special tokens in it; None: as the job says.      context: of a text to score.
    """

    number: int
    id: str | int
    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    error: str | None = None
    special: bool | None = None
    context: str | None = None


class Input:
    """The lines of a file, or of standard input ("-"). They are read twice; a pipe is copied.

    name: what messages call it.    count: its lines, but for the empty ones.    digest: their SHA-256.
    Raises MiniGPTError for a file that cannot be read, is in UTF-16, or has no lines.
    """

    def __init__(self, name: str) -> None:
        self.name, self.count, digest = "standard input" if name == "-" else name, 0, hashlib.sha256()
        try:
            self.file: BinaryIO = standard_input() if name == "-" else open(name, "rb")  # noqa: SIM115
            if name == "-" or not self.file.seekable():
                shutil.copyfileobj(self.file, copy := TemporaryFile())  # noqa: SIM115
                self.file = copy
            self.file.seek(0)
            if self.file.read(2) in _UTF16:
                raise MiniGPTError(f"{self.name} is UTF-16: save it as UTF-8")
            for number, data in self.numbered():
                digest.update(b"%d:%b" % (number, data.rstrip(b"\r\n")))
                self.count += 1
        except OSError as error:
            raise MiniGPTError(f"cannot read {self.name}: {error.strerror}") from None
        self.digest = digest.hexdigest()
        if not self.count:
            raise MiniGPTError(f"{self.name} is empty: it should hold a JSON object a line")

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not empty, with their numbers. Only \\n ends a line: U+2028 and its like are text."""
        self.file.seek(0)
        for number, data in enumerate(self.file, 1):
            data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
            if data.strip():
                yield number, data

    def lines(self, params: SamplingParams | None = None, fresh: int = 0) -> Iterator[Line]:
        """Each line as `parse` gives it."""
        return (parse(number, data, params, fresh) for number, data in self.numbered())


def standard_input() -> BinaryIO:
    """Standard input. Raises MiniGPTError where it is closed."""
    if sys.stdin is None:
        raise MiniGPTError("standard input is closed")
    return sys.stdin.buffer


def utf8(data: bytes) -> str:
    """The text of bytes in UTF-8; ValueError for others: "not UTF-8: byte 0xe9 at offset 3"."""
    if data[:2] in _UTF16:
        raise ValueError("UTF-16: save it as UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def parse(number: int, data: bytes, params: SamplingParams | None, fresh: int) -> Line:
    """A line to continue with `params` where it has no options of its own, or with None a line to score.

    Line n has its own seed, else params.seed + n (mod 2^64), else, if it samples, fresh + n.
    A key whose value is null is not given. Never raises: the result holds the error.
    """
    line, keys = Line(number, number), _TO_SCORE if params is None else _TO_CONTINUE
    try:
        values = json.loads(utf8(data).rstrip())
        if not isinstance(values, dict):
            raise ValueError(f"a line must be a JSON object, such as {json.dumps({keys[0]: 'Once'})}")
        if type(values.get("id")) in (str, int):
            line = replace(line, id=values["id"])
        given = {key: value for key, value in values.items() if value is not None}
        for key, value in given.items():
            if key not in keys:
                known = f": a line has {', '.join(keys[:4])}{' and the options of generate' if params else ''}"
                raise ValueError(f"unknown key {key!r}{(did_you_mean(key) if params else '') or known}")
            types, wanted = _TYPES.get(key, ((), ""))
            if types and type(value) not in types:
                raise ValueError(f"{key} must be {wanted}, not {short_repr(value)}")
        line = replace(line, special=given.get("special"))
        if params is not None:
            return _to_continue(line, given, params, fresh)
        if "text" not in given:
            raise ValueError("a line needs a text")
        return replace(line, prompt=given["text"], context=given.get("context"))
    except json.JSONDecodeError as error:
        text = error.doc.strip()
        shown = "" if text[:1] in ("{", "[") else f"; write it as {json.dumps({keys[0]: text[:40]})}"
        return replace(line, error=f"not JSON: {error.msg} at column {error.colno}{shown}")
    except ValueError as error:
        return replace(line, error=str(error))
    except RecursionError:  # of json, or of the repr in a message
        return replace(line, error="not a line that can be read: it is nested too deeply")


def _to_continue(line: Line, given: dict[str, Any], params: SamplingParams, fresh: int) -> Line:
    """The line with its prompt and params. Raises ValueError."""
    if ("prompt" in given) == ("ids" in given):
        raise ValueError("give one of prompt (text) and ids (a list of token ids)")
    if any(type(id) is not int for id in given.get("ids", ())):
        raise ValueError(f"ids must be a list of token ids, not {short_repr(given['ids'])}")
    options = {name: value for name, value in given.items() if name not in _TO_CONTINUE[:4]}
    own = params.over(options)
    if idle := [name for name in own.without_effect() if name in options or name != "seed"]:
        warnings.warn(f"{', '.join(idle)} has no effect on a line at temperature 0, which is greedy", stacklevel=2)
    if "seed" not in options and (params.seed is not None or own.temperature > 0):
        base = fresh if params.seed is None else params.seed
        own = own.over({"seed": (base + line.number) % 2**64})
    return replace(line, prompt=given["prompt"] if "prompt" in given else given["ids"], params=own)
