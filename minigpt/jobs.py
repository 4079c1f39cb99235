"""Many prompts from a file: one JSON object a line in, one record a line out, and a killed job that can go on.

Lines in:   {"prompt": "Once"} or {"ids": [7454]}, with an optional "id" and any field of SamplingParams.
Records out, in the order of the lines, one for each completion:
            id, sample, prompt, prompt_ids, text, ids, finish_reason, seed, logprobs, model
and for what failed: id, line, error (and sample, where the line's other samples did not fail).

Lines are counted from 1, as editors do; a line without an id has its number as its id, and empty lines are skipped.
The records depend on the lines and the settings alone, so a job that was killed can be resumed by counting records:
the file is then the same, up to float32 rounding of log-probabilities (what shares a batch with a row moves their last
digits).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.records import Line, Output, as_record

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel


_OPTIONS = [field.name for field in fields(SamplingParams)]


def read_lines(path: str, params: SamplingParams, fresh_seed: int) -> Iterator[Line]:
    """The lines of a file, each with `params` and its own options over them; a bad line comes with its error.

    Line n has its own seed, else params.seed + n (mod 2^64), else, if it samples, fresh_seed + n.
    Memory: the ids of all lines read so far, to find one that is there twice.
    Raises MiniGPTError if the file cannot be read.
    """
    seen: dict[str | int, int] = {}
    for number, data in _numbered(path):
        line = parse(number, data, params, fresh_seed)
        first = seen.setdefault(line.id, number)
        if first != number and line.error is None:
            line = replace(line, error=f"id {line.id!r} is already that of line {first}")
        yield line


def _numbered(path: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers. Only \\n ends a line: U+2028 and its like are text."""
    try:
        with open(path, "rb") as file:
            for number, data in enumerate(file, 1):
                data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
                if data.strip():
                    yield number, data
    except OSError as error:
        raise MiniGPTError(f"cannot read {path}: {error.strerror}") from None


def parse(number: int, data: bytes, params: SamplingParams, fresh_seed: int) -> Line:
    """One line of the input, see read_lines. Never raises: what is wrong is in the result."""
    try:
        return _parse(number, data, params, fresh_seed)
    except RecursionError:  # of json, or of the repr in a message
        return Line(number, number, error="not a line that can be read: it is nested too deeply")


def _parse(number: int, data: bytes, params: SamplingParams, fresh_seed: int) -> Line:
    try:
        values = json.loads(data.decode("utf-8").rstrip(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        return Line(number, number, error=f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        return Line(number, number, error=f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:  # _unique's, or a number with more digits than Python reads
        return Line(number, number, error=str(error))
    if not isinstance(values, dict):
        return Line(number, number, error='a line must be a JSON object, such as {"prompt": "Once"}')
    id = number if values.get("id") is None else values["id"]
    if isinstance(id, bool) or not isinstance(id, (str, int)):
        return Line(number, number, error=f"id must be a text or an integer, not {id!r}")
    try:
        prompt, params = _prompt_and_params(number, values, params, fresh_seed)
    except ValueError as error:
        return Line(number, id, error=str(error))
    return Line(number, id, prompt, params)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def _prompt_and_params(
    number: int, values: Mapping[str, Any], params: SamplingParams, fresh_seed: int
) -> tuple[str | list[int], SamplingParams]:
    """What a line asks for; ValueError for what it may not."""
    unknown = [name for name in values if name not in ("prompt", "ids", "id", *_OPTIONS)]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}: a line has prompt or ids, id, and options of generate")
    if ("prompt" in values) == ("ids" in values):
        raise ValueError("give one of prompt (text) and ids (a list of token ids)")
    prompt = values["prompt"] if "prompt" in values else values["ids"]
    if not isinstance(prompt, str if "prompt" in values else list):
        kind = "prompt must be a text" if "prompt" in values else "ids must be a list of token ids"
        raise ValueError(f"{kind}, not {type(prompt).__name__}")
    if any(isinstance(item, (list, dict)) for item in prompt):
        raise ValueError("ids must be a list of token ids, with no list or object inside")
    own = {name: values[name] for name in _OPTIONS if values.get(name) is not None}
    base = params.seed
    params = replace(params, **own)
    if "seed" not in own and (base is not None or params.temperature > 0):
        params = replace(params, seed=((fresh_seed if base is None else base) + number) % 2**64)
    return prompt, params


def records(
    lm: LanguageModel,
    lines: Iterable[Line],
    *,
    model: str,
    batch_size: int,
    special: bool = False,
    on_line: Callable[[Line], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of `lines`, in order, as they are done; lines are read as rows become free.

    model: the name to put into the records.    special: read <|endoftext|> in a prompt as the special token.
    on_line: called with each line once its records are all given.
    """
    from minigpt.decoding.sequence import Failure, Task

    waiting: deque[Line] = deque()

    def tasks() -> Iterator[Task]:
        for line in lines:
            waiting.append(line)
            if line.error is not None:
                yield Failure(ValueError(line.error))
                continue
            prompt, params = line.prompt, line.params
            if special and lm.tokenizer is not None and isinstance(prompt, str):
                prompt = lm.tokenizer.encode(prompt, special=True)
            if line.skip:  # sample j draws with seed + j
                seed = params.seed if params.temperature == 0 else ((params.seed or 0) + line.skip) % 2**64
                params = replace(params, samples=params.samples - line.skip, seed=seed)
            yield prompt, params

    sample = 0
    for result in lm.generate_each(tasks(), batch_size=batch_size):
        if not waiting and isinstance(result, Failure):  # the lines themselves cannot be read on
            raise result.error
        line = waiting[0]
        number = line.skip + sample
        whole = False
        if isinstance(result, Failure):
            whole = not result.started
            partial = {"sample": number} if result.started and line.params.samples > 1 else {}
            yield {"id": line.id, **partial, "line": line.number, "error": str(result.error)}
        else:
            yield as_record(line.id, number, line.prompt if isinstance(line.prompt, str) else None, result, model)
        sample += 1
        if whole or line.skip + sample == line.params.samples:
            waiting.popleft()
            if on_line:
                on_line(line)
            sample = 0


def survey(path: str) -> tuple[int, str]:
    """How many lines a file has, the empty ones not counted, and its SHA-256.

    Raises MiniGPTError if it cannot be read, or has none.
    """
    digest, count = hashlib.sha256(), 0
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise MiniGPTError(f"{path} is not a file: the input is read more than once, so put it into one")
    for number, data in _numbered(path):
        digest.update(b"%d:%b" % (number, data.rstrip(b"\r\n")))
        count += 1
    if not count:
        raise MiniGPTError(f'{path} is empty: it should hold a JSON object a line, such as {{"prompt": "Once"}}')
    return count, digest.hexdigest()


class Job:
    """The work of `generate --input`: every line of a file continued, and the records kept in another.

    input, output: their names; output None: the records are only given, not kept.
    params: for all lines, as far as they say nothing else.
    settings: what else the records depend on, for --resume to compare.
    output: the Output, which counts records and done lines, those of an earlier run included.
    lines: those whose records are not all there yet.
    total: lines in all.        tokens: drawn in this run.

    Raises MiniGPTError for files that cannot be used, ValueError for other settings than the job was begun with.
    """

    def __init__(
        self, input: str, output: str | None, params: SamplingParams, settings: dict[str, Any], resume: bool
    ) -> None:
        self.input = input
        self._survey = survey(input)
        self.total, digest = self._survey
        for name in () if output is None else (output, f"{output}.job", f"{output}.job.new"):
            if os.path.exists(name) and os.path.samefile(input, name):
                raise ValueError(f"{'the output' if name == output else 'the settings file'} {name} is also the input")
        options = {**settings, **asdict(params), "fresh_seed": secrets.randbits(32), "input": digest}
        self.output = Output(output, options, resume)
        self.lines = self.output.remaining(read_lines(input, params, options["fresh_seed"]))
        self.tokens = 0

    def check_input(self) -> None:
        """Raise MiniGPTError if the input is no longer what it was at the beginning."""
        if survey(self.input) != self._survey:
            raise MiniGPTError(f"{self.input} changed while it was read: start again")

    def records(self, lm: LanguageModel, *, model: str, batch_size: int, special: bool) -> Iterator[dict[str, Any]]:
        """Do the rest of the work: each record, once it is in the output. Raises MiniGPTError, see check_input."""
        for record in records(lm, self.lines, model=model, batch_size=batch_size, special=special, on_line=self._count):
            self.output.write(record)
            self.tokens += len(record.get("ids", ()))
            yield record
        self.check_input()

    def _count(self, line: Line) -> None:
        self.output.done += 1
