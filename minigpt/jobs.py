"""Many prompts or texts from a file: one JSON object a line in, one record a line out, and a job that can go on.

Lines in:   {"prompt": "Once"} or {"ids": [7454]}, with any of "id", "special" and the fields of SamplingParams.
Records out, in the order of the lines, one for each completion:
            id, sample, prompt, prompt_ids, text, ids, finish_reason, seed, logprobs, score, model
and for what failed: id, line, error (and sample, where the line's other samples did not fail).
To score:   {"text": " upon a time"} with any of "context", "id" and "special"; the records are those of `scored`.

Lines are counted from 1, as editors do; a line without an id has its number as its id, and empty lines are skipped.
The records depend on the lines and the settings alone, so a job that was killed can be resumed by counting records:
the file is then the same, up to float32 rounding of log-probabilities (what shares a batch with a row moves their last
digits).
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.decoding.params import SamplingParams, fresh_seed
from minigpt.errors import MiniGPTError, PromptError
from minigpt.lines import Input, Line

if TYPE_CHECKING:
    from minigpt.decoding.sequence import Completion
    from minigpt.language_model import LanguageModel
    from minigpt.prompts import Task
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


def records(
    lm: LanguageModel, lines: Iterable[Line], *, model: str, batch_size: int = 8, special: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """The records of each line, in order, as they are done; lines are read as rows become free.

    model: the name to put into the records.    special: for lines that do not say: read special tokens in a prompt.
    """
    from minigpt.decoding.sequence import Failure

    waiting: deque[Line] = deque()

    def task(line: Line) -> Task:
        waiting.append(line)
        try:
            if line.error is not None:
                raise ValueError(line.error)
            return lm.encode(line.prompt, special=special if line.special is None else line.special), line.params
        except (MiniGPTError, ValueError) as error:
            return Failure(error)

    found: list[dict[str, Any]] = []
    for result in lm.generate_each(map(task, lines), batch_size=batch_size):
        line, started = waiting[0], not isinstance(result, Failure) or result.started
        if isinstance(result, Failure):
            sample = {"sample": len(found)} if started and line.params.samples > 1 else {}
            found.append({"id": line.id, **sample, "line": line.number, "error": str(result.error)})
        else:
            found.append(as_record(line.id, len(found), line.prompt, result, model))
        if len(found) == line.params.samples or not started:
            waiting.popleft()
            yield found
            found = []


def score_records(
    lm: LanguageModel, source: Input, *, model: str, special: bool = False, **options: Any
) -> Iterator[dict[str, Any]]:
    """The records of a file of texts to score, in order. options: of lm.score; the others as in `records`."""

    def scored(lines: list[Line]) -> list[dict[str, Any]]:
        """Of all lines together or, where that fails, of each by itself."""
        texts, contexts, own = zip(*((line.prompt, line.context, line.special) for line in lines), strict=True)
        try:
            wrong = next((line.error for line in lines if line.error is not None), None)
            if wrong is not None or len(set(own)) > 1:
                raise ValueError(wrong)
            flag = special if own[0] is None else own[0]
            return [
                {"id": line.id, "text": line.prompt, "context": line.context, **score_figures(score), "model": model}
                for line, score in zip(lines, lm.score(texts, context=contexts, special=flag, **options), strict=True)
            ]
        except (MiniGPTError, ValueError) as error:
            if len(lines) == 1:
                return [{"id": lines[0].id, "line": lines[0].number, "error": str(error)}]
            return [record for line in lines for record in scored([line])]

    lines = source.lines()
    while chunk := list(islice(lines, 64)):
        yield from scored(chunk)


class Job:
    """Lines to continue and the file of their records: it has whole lines only, whatever happens.

    output: the file's name; None keeps no records. Beside it lies OUTPUT.job with the settings.
    params: of every line, as far as it has no options of its own.      settings: what else the records depend on.
    resume: go on after the records that are there, with the fresh seed that they were begun with.
    lines: those whose records are not all in the file.     done: how many the others are.
    count, failed: records in the file, and those of them that are errors.

    Raises MiniGPTError for files that cannot be used, ValueError for other settings than the job was begun with.
    """

    def __init__(
        self, source: Input, output: str | None, params: SamplingParams, settings: dict[str, Any], resume: bool
    ) -> None:
        if output and os.path.exists(output) and os.path.samestat(os.stat(output), os.fstat(source.file.fileno())):
            raise ValueError(f"the output {output} is also the input")
        decoding = {name: value for name, value in asdict(params).items() if name != "max_seconds"}
        self.path = path = output or os.devnull
        self.settings = {**settings, **decoding, "fresh_seed": fresh_seed(), "input": source.digest}
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
                Path(f"{path}.job").write_text(json.dumps(self.settings), "utf-8")
        except OSError as error:
            raise self._problem(error) from None
        self.lines = self._remaining(source.lines(params, self.settings["fresh_seed"]))

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

    def _remaining(self, rest: Iterator[Line]) -> Iterator[Line]:
        """The lines whose records are not all in the file. It is cut after the last line whose records are.

        Raises MiniGPTError, before the cut, where the file holds something else than records of these lines.
        """
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
