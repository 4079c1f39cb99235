"""What `stream` and `stream_many` return: iterators of steps that can be closed, also from another thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from minigpt.decoding.batch import decode
from minigpt.decoding.draft import Source
from minigpt.decoding.sequence import Completion, Failure, Sequence, Step
from minigpt.network.model import GPT2


class Stream(Iterator[Step]):
    """One prompt's steps, as they are drawn. A context manager; a stream that nobody holds any more closes itself.

    The iterator raises the error that ends the sequence; `completion` stays what was drawn until then.
    """

    def __init__(self, model: GPT2, sequence: Sequence, source: Source = "off") -> None:
        self._sequence = sequence
        self._drawn = decode(model, iter([sequence]), 1, source)

    @property
    def completion(self) -> Completion:
        """What came so far; its finish_reason is None until the last step has come."""
        return self._sequence.completion()

    def __next__(self) -> Step:
        for _, step in self._drawn:
            if step:
                return step
        if self._sequence.error:
            raise self._sequence.error
        raise StopIteration

    def close(self) -> None:
        """Draw nothing more and free the memory: at once, or after the step that another thread is in."""
        self._sequence.cancelled = True
        with suppress(ValueError):  # the other thread is inside: it sees the mark
            self._drawn.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Streams(Iterator[tuple[int, Step | Failure]]):
    """The steps of many rows, as they are drawn: (row, Step), or (row, Failure) where a row ends in an error.

    Rows are numbered from 0 in the order of the input, each sample of a prompt and each unusable prompt one row.
    """

    def __init__(
        self, model: GPT2, rows: Iterator[Sequence | Failure | None], slots: int, source: Source = "off"
    ) -> None:
        self._running: dict[int, tuple[int, Sequence | Failure]] = {}  # by id()
        self._count = 0  # rows read so far
        self._early: set[int] = set()  # rows closed before they were read
        self._drawn = decode(model, self._numbered(rows), slots, source)

    def _numbered(self, rows: Iterator[Sequence | Failure | None]) -> Iterator[Sequence | Failure | None]:
        for row in rows:
            if isinstance(row, Sequence) and row.together:
                row = Failure(ValueError("num_beams above 1 cannot be streamed: use generate_each"))
            if row is not None:
                number = self._count
                self._running[id(row)] = (number, row)
                self._count += 1
                if number in self._early:
                    self._early.discard(number)
                    self.close(number)
            yield row

    def __next__(self) -> tuple[int, Step | Failure]:
        for row, step in self._drawn:
            number, _ = self._running.get(id(row), (-1, row))
            if row.finish_reason:
                self._running.pop(id(row), None)
            if number < 0:  # closed
                continue
            if step:
                return number, step
            if isinstance(row, Failure):
                return number, row
            if row.error:
                return number, Failure(row.error, started=True)
        raise StopIteration

    def close(self, number: int | None = None) -> None:
        """Drop one row before its next step, or its first; without a number all of them, and read no more input."""
        if number is not None and number >= self._count:
            self._early.add(number)
        for at, row in list(self._running.values()):
            if number in (None, at) and isinstance(row, Sequence):
                row.cancelled = True
                self._running.pop(id(row), None)
        if number is None:
            with suppress(ValueError):  # another thread is inside: it goes on with the marks
                self._drawn.close()
