"""The records of generated text: what one holds, and a file of them that is whole whenever it is looked at."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from minigpt.errors import MiniGPTError, PromptError
from minigpt.lines import Line

if TYPE_CHECKING:
    from minigpt.decoding.sequence import Completion
    from minigpt.scoring import Score


def as_record(id: str | int, sample: int, prompt: str | None, completion: Completion, model: str) -> dict[str, Any]:
    """A Completion as the record that --json and --output write."""
    values = asdict(completion)
    order = ("prompt_ids", "text", "ids", "finish_reason", "seed", "logprobs", "score")
    return {"id": id, "sample": sample, "prompt": prompt, **{name: values[name] for name in order}, "model": model}


def score_figures(score: Score) -> dict[str, Any]:
    """A Score for JSON, which lacks NaN and infinity: they become None. Raises PromptError if no token was scored."""
    if not score.logprobs:
        raise PromptError("there is nothing to score: that takes two tokens, or one and --bos or a context")
    values = {name: getattr(score, name) for name in ("total", "mean", "perplexity", "bits_per_byte")}
    figures = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
    return {"ids": score.ids, "logprobs": score.logprobs, **figures}


class Output:
    """The file of records: whole lines only, whatever happens, and beside it OUTPUT.job with the job's settings.

    path: the file; None keeps no records, and only counts them.
    settings: what the records depend on. The fresh seed of a job that is resumed is the one that it was begun with.
    resume: go on after the records that are there, which `remaining` checks before anything is cut off or written.
    count, failed: records, and those of them that are errors.      done: lines whose records are all there.

    Raises MiniGPTError if the files cannot be used, ValueError if the job was begun with other settings.
    """

    def __init__(self, path: str | None, settings: dict[str, Any], resume: bool) -> None:
        self.path, self.settings = path, settings
        self.count = self.failed = self.done = self.size = 0
        if path is None:
            return
        try:
            there = os.path.isfile(path) and os.path.getsize(path) > 0
            if there and not resume:
                raise MiniGPTError(f"{path} is there already: add --resume to go on with it, or remove it")
            if there:
                self._check_settings()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            if self._regular:
                with open(f"{path}.job.new", "w", encoding="utf-8") as file:
                    file.write(json.dumps(settings))
                os.replace(f"{path}.job.new", f"{path}.job")  # whole or not at all
        except OSError as error:
            raise self._problem(error) from None

    def _check_settings(self) -> None:
        """Compare the settings with those that the job was begun with."""
        name, refused = f"{self.path}.job", f"{self.path} cannot be resumed"
        try:
            with open(name, encoding="utf-8") as file:
                begun = json.load(file)
        except FileNotFoundError:
            raise MiniGPTError(f"{name}, which holds the settings of the job, is gone: {refused}") from None
        except (ValueError, RecursionError):
            begun = None
        now = json.loads(json.dumps(self.settings))  # as it would read
        whole = isinstance(begun, dict) and begun.keys() == now.keys() and type(begun["fresh_seed"]) is int
        if not whole or not 0 <= begun["fresh_seed"] < 2**64:
            raise MiniGPTError(f"{name} is damaged: {refused}")
        self.settings["fresh_seed"] = now["fresh_seed"] = begun["fresh_seed"]
        if begun["input"] != now["input"]:
            raise MiniGPTError(f"{refused}: the input has changed since")
        changed = [f"{key} was {begun[key]!r}, now {now[key]!r}" for key in now if begun[key] != now[key]]
        if changed:
            what = ", ".join(changed)
            raise ValueError(f"{self.path} was begun with other settings ({what}): use those, or another --output")

    def remaining(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines whose records are not all there, where `skip` says how many are; the others are counted in `done`.

        The half record that a kill may have left at the end of the file is cut off, once all else is known to be right.
        Raises MiniGPTError, at the call, where the file holds something else than records of these lines.
        """
        rest = iter(lines)
        if self.path is None or not self._regular:
            return rest
        line: Line | None = None
        refused, tail = f"{self.path} cannot be resumed", b""
        with open(self.path, "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    tail = data[:6]
                    break
                line = line or next(rest, None)
                found = None if line is None else _record_of(line, data)
                if line is None or found is None:
                    raise MiniGPTError(f"{refused}: its line {number} is not a record of this job")
                self.size += len(data)
                self.count += 1
                self.failed += "error" in found
                line = replace(line, skip=line.skip + 1)
                if line.skip == line.params.samples or ("error" in found and "sample" not in found):
                    line, self.done = None, self.done + 1
        if tail != b'{"id":'[: len(tail)]:
            raise MiniGPTError(f"{refused}: its end is not a record of this job")
        os.ftruncate(self._file, self.size)
        os.lseek(self._file, self.size, os.SEEK_SET)
        return chain([line] if line else [], rest)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Raises MiniGPTError if that is not possible; nothing of it is in the file then."""
        if self.path is not None:
            self._append(memoryview(json.dumps(record).encode() + b"\n"))
        self.count += 1
        self.failed += "error" in record

    def _append(self, data: memoryview) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            raise self._problem(error) from None
        finally:  # a signal can come between two writes
            if written == len(data):
                self.size += written
            elif self._regular:
                os.ftruncate(self._file, self.size)

    def _problem(self, error: OSError) -> MiniGPTError:
        what = f"cannot write {(error.filename or self.path)!r}: {error.strerror}"
        done = f"; its {self.count} records are whole, and --resume goes on after them" if self.count else ""
        return MiniGPTError(what + done)

    def close(self) -> None:
        """Close the file."""
        if self.path is not None:
            os.close(self._file)


def _record_of(line: Line, data: bytes) -> dict[str, Any] | None:
    """The record that `data` holds, if it is that of the line's next sample, or an error of the line."""
    try:
        found: dict[str, Any] = json.loads(data)
        failed = "error" in found
        sample = found.get("sample", line.skip) if failed else found["sample"]
        matches = found["id"] == line.id and sample == line.skip and (not failed or found["line"] == line.number)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if matches else None
