"""The records of generated text: what one holds, and a file of them that is whole whenever it is looked at."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.errors import MiniGPTError, PromptError
from minigpt.lines import Line

if TYPE_CHECKING:
    from minigpt.decoding.sequence import Completion
    from minigpt.scoring import Score


def as_record(id: str | int, sample: int, prompt: object, completion: Completion, model: str) -> dict[str, Any]:
    """A Completion as the record that --json and --output write. prompt: kept if it is a text."""
    values = asdict(completion)
    order = ("prompt_ids", "text", "ids", "finish_reason", "seed", "logprobs", "score")
    text = prompt if isinstance(prompt, str) else None
    return {"id": id, "sample": sample, "prompt": text, **{name: values[name] for name in order}, "model": model}


def score_figures(score: Score) -> dict[str, Any]:
    """A Score for JSON, which lacks NaN and infinity: they become None. Raises PromptError if no token was scored."""
    if not score.logprobs:
        raise PromptError("there is nothing to score: that takes two tokens, or one and --bos or a context")
    values = {name: getattr(score, name) for name in ("total", "mean", "perplexity", "bits_per_byte")}
    figures = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
    return {"ids": score.ids, "logprobs": score.logprobs, **figures}


class Output:
    """The file of records: whole lines only, whatever happens, and beside it OUTPUT.job with the job's settings.

    settings: what the records depend on. The fresh seed of a job that is resumed is the one that it was begun with.
    resume: go on after the records that are there; `remaining` checks them.
    count, failed: records, and those of them that are errors.      done: lines whose records are all there.

    Raises MiniGPTError if the files cannot be used, ValueError if the job was begun with other settings.
    """

    def __init__(self, path: str, settings: dict[str, Any], resume: bool) -> None:
        self.path, self.settings = path, settings
        self.count = self.failed = self.done = self.size = 0
        try:
            there = os.path.isfile(path) and os.path.getsize(path) > 0
            if there and not resume:
                raise MiniGPTError(f"{path} is there already: add --resume to go on with it, or remove it")
            if there:
                self._check_settings()
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            self._regular = os.path.isfile(path)  # a file that can be cut, not a pipe or a device
            if self._regular and not there:
                Path(f"{path}.job").write_text(json.dumps(settings), "utf-8")
        except OSError as error:
            raise self._problem(error) from None

    def _check_settings(self) -> None:
        """Compare the settings with those that the job was begun with."""
        refused = f"{self.path} cannot be resumed"
        now = json.loads(json.dumps(self.settings))  # as it would read
        try:
            begun = json.loads(Path(f"{self.path}.job").read_text("utf-8"))
            self.settings["fresh_seed"] = now["fresh_seed"] = int(begun["fresh_seed"])
            changed = [f"{key} was {begun[key]!r}, now {now[key]!r}" for key in now if begun[key] != now[key]]
        except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
            raise MiniGPTError(f"{self.path}.job, the settings of the job, is missing or damaged: {refused}") from None
        if begun["input"] != now["input"]:
            raise MiniGPTError(f"{refused}: the input has changed since")
        if changed:
            what = ", ".join(changed)
            raise ValueError(f"{self.path} was begun with other settings ({what}): use those, or another --output")

    def remaining(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines whose records are not all in the file. It is cut after the last line whose records are.

        Raises MiniGPTError, at the call and before the cut, where it holds something else than records of these lines.
        """
        rest = iter(lines)
        if not self._regular:
            return rest
        line: Line | None = None
        found: list[dict[str, Any]] = []  # the records of `line`
        size = 0
        with open(self.path, "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n") and b'{"id": '.startswith(data[:7]):
                    break  # half a record, as a kill leaves it
                line = line or next(rest, None)
                record = _record_of(line, len(found), data) if line else None
                if line is None or record is None:
                    raise MiniGPTError(f"{self.path} cannot be resumed: its line {number} is not a record of this job")
                found.append(record)
                size += len(data)
                if len(found) == line.params.samples or ("error" in record and "sample" not in record):
                    self._count(found, size)
                    line, found, size = None, [], 0
        self._file.truncate(self.size)
        return chain([line] if line else [], rest)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append all records of a line. Raises MiniGPTError where that fails: the file holds none of them then."""
        data = memoryview("".join(json.dumps(record) + "\n" for record in records).encode())
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except BaseException as error:  # or a signal between two writes
            if self._regular:
                self._file.truncate(self.size)
            if isinstance(error, OSError):
                raise self._problem(error) from None
            raise
        self._count(records, written)

    def _count(self, records: Sequence[Mapping[str, Any]], size: int) -> None:
        self.count += len(records)
        self.failed += sum("error" in record for record in records)
        self.size += size
        self.done += 1

    def _problem(self, error: OSError) -> MiniGPTError:
        done = f"; its {self.count} records are whole, and --resume goes on after them" if self.count else ""
        return MiniGPTError(f"cannot write {(error.filename or self.path)!r}: {error.strerror}{done}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _record_of(line: Line, sample: int, data: bytes) -> dict[str, Any] | None:
    """The record that `data` holds, if it is that of the line's sample, or an error of the line."""
    try:
        found: dict[str, Any] = json.loads(data)
        key, value = ("line", line.number) if "error" in found else ("sample", sample)
        return found if found["id"] == line.id and found[key] == value else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
