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

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from minigpt.decoding.params import SamplingParams, fresh_seed
from minigpt.errors import MiniGPTError
from minigpt.lines import Input, Line
from minigpt.records import Output, as_record, score_figures

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel
    from minigpt.prompts import Task


def begin(
    source: Input, output: str | None, params: SamplingParams, settings: dict[str, Any], resume: bool
) -> tuple[Output, Iterator[Line]]:
    """The file of records, and the lines whose records it lacks.

    output: its name; None keeps no records.    params: of every line, as far as it says nothing else.
    settings: what else the records depend on, for --resume to compare.
    Raises MiniGPTError for files that cannot be used, ValueError for other settings than the job was begun with.
    """
    if output and os.path.exists(output) and os.path.samestat(os.stat(output), os.fstat(source.file.fileno())):
        raise ValueError(f"the output {output} is also the input")
    decoding = {name: value for name, value in asdict(params).items() if name != "max_seconds"}
    settings = {**settings, **decoding, "fresh_seed": fresh_seed(), "input": source.digest}
    file = Output(output or os.devnull, settings, resume)
    return file, file.remaining(source.lines(params, settings["fresh_seed"]))


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
