"""The records of generated text: what one holds, and a file of them that is whole whenever it is looked at."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from minigpt.config import SamplingParams
from minigpt.errors import MiniGPTError

if TYPE_CHECKING:
    from minigpt.sequence import Completion


def as_record(id: str | int, sample: int, prompt: str | None, completion: Completion, model: str) -> dict[str, Any]:
    """A Completion as the record that --json and --output write."""
    values = asdict(completion)
    order = ["prompt_ids", "text", "ids", "finish_reason", "seed", "logprobs"]
    return {
        "id": id,
        "sample": sample,
        "prompt": prompt,
        **{name: values[name] for name in order},
        "model": model,
    }


@dataclass(frozen=True)
class Line:
    """One line of the input: what to continue and how, or what is wrong with it.

    number: from 1.     id: its own, else its number (for a bad line as well, where it can be read).
    prompt: text or token ids.      skip: how many of its samples are already there.
    """

    number: int
    id: str | int
    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    error: str | None = None
    skip: int = 0


class Output:
    """The file of records: whole lines only, whatever happens, and beside it OUTPUT.job with the job's settings.

    settings: what the records depend on. The fresh seed of a job that is resumed is the one that it was begun with.
    resume: go on after the records that are there. `count` says how many are, `failed` how many of those are errors.

    Raises MiniGPTError if the files cannot be used, ValueError if the job was begun with other settings.
    """

    def __init__(self, path: str, settings: dict[str, Any], resume: bool) -> None:
        self.path, self.settings = path, settings
        self.count = self.failed = self.done = self.size = 0
        try:
            there = os.path.getsize(path) > 0 if os.path.isfile(path) else False
            if there and not resume:
                raise MiniGPTError(f"{path} is there already: add --resume to go on with it, or remove it")
            if resume:
                self._check_settings(there)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            if self._regular:
                self._write_settings()
                self._find_end()
        except OSError as error:
            raise self._problem(error) from None

    def _check_settings(self, there: bool) -> None:
        """Compare the settings with those that the job was begun with."""
        name = f"{self.path}.job"
        try:
            with open(name, encoding="utf-8") as file:
                begun = json.load(file)
        except FileNotFoundError:
            if there:
                raise MiniGPTError(
                    f"{name}, which holds the settings of the job, is gone: {self.path} cannot be resumed"
                ) from None
            return
        except ValueError:
            begun = None
        if not isinstance(begun, dict):
            raise MiniGPTError(f"{name} is damaged: {self.path} cannot be resumed")
        now = json.loads(json.dumps(self.settings))  # as it would read
        self.settings["fresh_seed"] = now["fresh_seed"] = begun.get("fresh_seed")
        if begun.get("input") != now["input"]:
            raise MiniGPTError(f"{self.path} cannot be resumed: the input has changed since")
        changed = [key for key in {**begun, **now} if begun.get(key) != now.get(key)]
        if changed:
            what = ", ".join(f"{key} was {begun.get(key)!r}, now {now.get(key)!r}" for key in changed)
            raise ValueError(f"{self.path} was begun with other settings ({what}): use those, or another --output")

    def _write_settings(self) -> None:
        name = f"{self.path}.job"
        text = json.dumps(self.settings)
        with open(f"{name}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{name}.new", name)  # whole or not at all

    def _find_end(self) -> None:
        """Count the whole records, and cut off the half one that a kill may have left."""
        with open(self.path, "rb") as file:
            for data in file:
                if data.endswith(b"\n"):
                    self.size += len(data)
        os.ftruncate(self._file, self.size)
        os.lseek(self._file, self.size, os.SEEK_SET)

    def remaining(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines whose records are not all there, where `skip` says how many are; the others are counted in `done`.

        Raises MiniGPTError, at the call, where the file holds something else than their records.
        """
        rest = iter(lines)
        if not self.size:
            return rest
        line: Line | None = None
        with open(self.path, "rb") as file:
            for number, data in enumerate(file, 1):
                line = line or next(rest, None)
                try:
                    found = json.loads(data)
                    matches = line and found["id"] == line.id and found.get("sample", line.skip) == line.skip
                except (ValueError, KeyError, TypeError):
                    matches = False
                if line is None or not matches:
                    raise MiniGPTError(f"{self.path} cannot be resumed: its line {number} is not a record of this job")
                self.count += 1
                self.failed += "error" in found
                line = replace(line, skip=line.skip + 1)
                if line.skip == line.params.samples or ("error" in found and "sample" not in found):
                    line, self.done = None, self.done + 1
        return chain([line] if line else [], rest)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Raises MiniGPTError if that is not possible; nothing of it is in the file then."""
        data = memoryview(json.dumps(record).encode() + b"\n")
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
        self.count += 1
        self.failed += "error" in record

    def _problem(self, error: OSError) -> MiniGPTError:
        what = f"cannot write {error.filename or self.path}: {error.strerror}"
        done = f"; its {self.count} records are whole, and --resume goes on after them" if self.count else ""
        return MiniGPTError(what + done)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
