"""Many prompts or texts from a file: one JSON object a line in, one record a line out, and a job that can go on.

Lines in:   {"prompt": "Once"} or {"ids": [7454]}, with any of "id", "special" and the fields of SamplingParams.
Records out, in the order of the lines, one for each completion:
            id, sample, prompt, prompt_ids, text, ids, finish_reason, seed, logprobs, score, model
and for what failed: id, line, error (and sample, where the line's other samples did not fail).
To score:   {"text": " upon a time"} with any of "context", "id" and "special"; the records are those of score_record.

Lines are counted from 1, as editors do; a line without an id has its number as its id, and empty lines are skipped.
The records depend on the lines and the settings alone, so a job that was killed can be resumed by counting records:
the file is then the same, up to float32 rounding of log-probabilities (what shares a batch with a row moves their last
digits).
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from minigpt.decoding.params import SamplingParams, fresh_seed
from minigpt.errors import MiniGPTError
from minigpt.lines import Line, Source, name_of, numbered, read, read_lines, survey, unique_ids
from minigpt.records import Output, as_record, score_figures

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel
    from minigpt.prompts import Task


def records(
    lm: LanguageModel,
    lines: Iterable[Line],
    *,
    model: str,
    batch_size: int = 8,
    special: bool = False,
    on_line: Callable[[Line], object] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """The records of `lines`, in order, as they are done; lines are read as rows become free.

    model: the name to put into the records.    special: for lines that do not say: read special tokens in a prompt.
    on_line: called with each line once its records are all given.
    """
    from minigpt.decoding.sequence import Failure

    waiting: deque[Line] = deque()

    def task(line: Line) -> Task:
        waiting.append(line)
        if line.error is not None:
            return Failure(ValueError(line.error))
        params = line.params
        if line.skip and params.num_beams == 1:  # sample j draws with seed + j; a search gives all anew
            seed = params.seed if params.temperature == 0 else ((params.seed or 0) + line.skip) % 2**64
            params = replace(params, samples=params.samples - line.skip, seed=seed)
        try:
            return lm.encode(line.prompt, special=special if line.special is None else line.special), params
        except MiniGPTError as error:
            return Failure(error)

    sample = 0
    for result in lm.generate_each(map(task, lines), batch_size=batch_size):
        if not waiting and isinstance(result, Failure):  # the lines themselves cannot be read on
            raise result.error
        line = waiting[0]
        first = line.skip if line.params.num_beams == 1 else 0
        number = first + sample
        whole = False
        if isinstance(result, Failure):
            whole = not result.started
            partial = {"sample": number} if result.started and line.params.samples > 1 else {}
            yield {"id": line.id, **partial, "line": line.number, "error": str(result.error)}
        elif number >= line.skip:
            yield as_record(line.id, number, line.prompt if isinstance(line.prompt, str) else None, result, model)
        sample += 1
        if whole or first + sample == line.params.samples:
            waiting.popleft()
            on_line(line)
            sample = 0


def score_records(
    lm: LanguageModel, source: Source, *, model: str, special: bool = False, **options: Any
) -> Iterator[dict[str, Any]]:
    """The records of a file of texts to score, in order, in batches; `options` are those of lm.score.

    model, special: as in `records`.    Raises as read_lines does.
    """
    lines = unique_ids(read(number, data, ("text", "context"), _text) for number, data in numbered(source))
    while chunk := list(itertools.islice(lines, 64)):
        found = iter(_scores(lm, [line for line in chunk if line.error is None], special, options))
        for line in chunk:
            try:
                if line.error is not None:
                    raise ValueError(line.error)
                result = next(found)
                if isinstance(result, Exception):
                    raise result
                texts = {"id": line.id, "text": line.prompt, "context": line.context}
                yield {**texts, **score_figures(result), "model": model}
            except ValueError as error:
                yield {"id": line.id, "line": line.number, "error": str(error)}


def _text(line: Line, values: dict[str, Any]) -> Line:
    for key in ("text", "context"):
        if not isinstance(values.get(key, ""), str):
            raise ValueError(f"{key} must be a text, not {type(values[key]).__name__}")
    if "text" not in values:
        raise ValueError("a line needs a text")
    return replace(line, prompt=values["text"], context=values.get("context"))


def _scores(lm: LanguageModel, lines: list[Line], special: bool, options: dict[str, Any]) -> list[Any]:
    """The lines' scores: of all together or, where that fails, of each by itself, or the error in its place."""
    if not lines:
        return []
    flags = {special if line.special is None else line.special for line in lines}
    contexts: Any = [line.context for line in lines] if any(line.context is not None for line in lines) else None
    texts: list[Any] = [line.prompt for line in lines]
    try:
        if len(flags) > 1:
            raise ValueError("lines of both kinds")
        scores: list[Any] = lm.score(texts, context=contexts, special=True in flags, **options)
        return scores
    except (MiniGPTError, ValueError) as error:
        return [error] if len(lines) == 1 else [one for line in lines for one in _scores(lm, [line], special, options)]


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
        self, input: Source, output: str | None, params: SamplingParams, settings: dict[str, Any], resume: bool
    ) -> None:
        self.input, self._survey, self.tokens = input, survey(input), 0
        self.total, digest = self._survey
        for name in () if output is None else (output, f"{output}.job", f"{output}.job.new"):
            if isinstance(input, str) and os.path.exists(name) and os.path.samefile(input, name):
                raise ValueError(f"{'the output' if name == output else 'the settings file'} {name} is also the input")
        decoding = {name: value for name, value in asdict(params).items() if name != "max_seconds"}
        options = {**settings, **decoding, "fresh_seed": fresh_seed(), "input": digest}
        self.output = Output(output, options, resume)
        self.lines = self.output.remaining(read_lines(input, params, options["fresh_seed"]))

    def check_input(self) -> None:
        """Raise MiniGPTError if the input is no longer what it was at the beginning."""
        if survey(self.input) != self._survey:
            raise MiniGPTError(f"{name_of(self.input)} changed while it was read: start again")

    def records(self, lm: LanguageModel, **options: Any) -> Iterator[dict[str, Any]]:
        """Do the rest of the work, with the options of `records`: each record, once it is in the output.

        Raises MiniGPTError, see check_input.
        """
        for record in records(lm, self.lines, on_line=self._count, **options):
            self.output.write(record)
            self.tokens += len(record.get("ids", ()))
            yield record
        self.check_input()

    def _count(self, line: Line) -> None:
        self.output.done += 1
