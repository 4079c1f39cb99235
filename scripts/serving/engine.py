"""The one thread that uses the model: requests wait in a bounded queue, their rows share the library's loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from minigpt import Failure, LanguageModel, MiniGPTError, SamplingParams, Score, Step

IDLE = 0.5  # seconds to wait for a request where no row is running
GRACE = 0.25  # seconds that a row may be late before it is closed from outside
FAILED = "the server failed: its log says why"
Task = tuple[list[int], SamplingParams]  # a prompt's checked ids; every one has the same number of samples
Event = Step | Failure | Score
_log = logging.getLogger("uvicorn.error")


class FullError(Exception):
    """No request can be taken now."""


class EngineError(MiniGPTError):
    """Something failed that no request is to blame for."""


@dataclass(eq=False)
class Job:
    """A request: its prompts, and where its events go.

    scored: how many of the best tokens to give for each token of the prompts; None: do not score them.
    deadline: by time.monotonic(); the time in the queue counts.
    deliver: called in the engine's thread with (choice, Step), choices counted over the samples of each prompt in turn;
        with (prompt, Score), before the steps of that prompt; or with a Failure, after which nothing is of use.
    """

    tasks: list[Task]
    scored: int | None
    deadline: float
    deliver: Callable[[int, Event], None]
    begun: int = 0  # tasks
    gone: bool = False
    rows: set[int] = field(default_factory=set)  # those in the loop


class Engine:
    """Continues the prompts of all jobs together. `submit` and `drop` are for other threads, and return at once.

    One thread does everything, scoring too, as two at a time would share the same cores and both be slow. It loads the
    model as well: once two threads have run products, OpenMP counts more workers than cores and lets all of them sleep
    between products (8 rows: 45 ms a step, not 37; the first token of an idle server: 20 ms later).

    load: gives the model. What it raises is raised here.
    """

    def __init__(self, load: Callable[[], LanguageModel], batch_size: int, waiting: int) -> None:
        self.batch_size, self.limit = batch_size, waiting
        self._jobs: deque[Job] = deque()  # those with tasks that have not begun
        self._rows: dict[int, tuple[Job, int]] = {}  # row of the loop -> its job and choice
        self._changed = threading.Condition()  # guards all of this
        self._ending = False
        loaded = Future[LanguageModel]()
        self._thread = threading.Thread(target=self._run, args=(load, loaded), name="engine", daemon=True)
        self._thread.start()
        self.lm = loaded.result()

    def end(self) -> None:
        """Take no more jobs; return when those that are here are done."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def state(self) -> dict[str, int | str]:
        """For /health: jobs that wait, rows that run."""
        status = "ok" if self._thread.is_alive() else "ended"
        return {"status": status, "running": len(self._rows), "waiting": len(self._jobs)}

    def submit(self, job: Job) -> None:
        """Queue a job. Raises FullError."""
        with self._changed:
            if self._ending or len(self._jobs) >= self.limit:
                raise FullError
            self._jobs.append(job)
            self._changed.notify()

    def drop(self, job: Job) -> None:
        """Forget a job, whose rows end before their next step. One that is done is dropped already."""
        with self._changed:
            job.gone = True
            if job in self._jobs:
                self._jobs.remove(job)
            for row in job.rows:
                self._streams.close(row)
                del self._rows[row]
            job.rows.clear()

    def _run(self, load: Callable[[], LanguageModel], loaded: Future[LanguageModel]) -> None:
        try:
            lm = load()
        except BaseException as error:
            return loaded.set_exception(error)
        self._streams = lm.stream_many(())
        loaded.set_result(lm)
        while True:
            self._streams = lm.stream_many(self._tasks(), batch_size=self.batch_size)
            try:
                for row, step in self._streams:
                    self._pass_on(row, step)
                return
            except Exception:  # no memory, a device that failed: what runs is lost, what waits is tried
                _log.exception("the loop failed, and begins anew")
                self._fail()

    def _tasks(self) -> Iterator[Task | None]:
        """The input of the loop: a task, None for "nothing yet"; it ends where no more jobs can come.

        Jobs take turns, so that one with many prompts does not keep the others waiting.
        """
        count = 0  # rows given so far: as the prompts are checked, the loop makes one of each sample
        while True:
            with self._changed:
                if not self._jobs and not self._rows and not self._ending:
                    self._changed.wait(IDLE)
                if not self._jobs and self._ending:
                    return
                job = self._jobs.popleft() if self._jobs else None
                if job is not None:
                    at, (ids, params) = job.begun, job.tasks[job.begun]
                    job.begun += 1
                    if job.begun < len(job.tasks):
                        self._jobs.append(job)
            if job is None:
                yield None
                continue
            if job.scored is not None:
                self._score(job, at)
            with self._changed:
                if job.gone or params.max_new_tokens == 0:
                    continue
                for sample in range(params.samples):
                    self._rows[count + sample] = job, at * params.samples + sample
                    job.rows.add(count + sample)
            count += params.samples
            yield ids, params.over({"max_seconds": max(0.0, job.deadline - time.monotonic())})

    def _score(self, job: Job, at: int) -> None:
        try:
            job.deliver(at, self.lm.score(job.tasks[at][0], logprobs=job.scored))
        except Exception as error:
            if not isinstance(error, (MiniGPTError, ValueError)):
                _log.exception("scoring failed")
                error = EngineError(FAILED)
            job.deliver(at, Failure(error))
            self.drop(job)

    def _pass_on(self, row: int, step: Step | Failure) -> None:
        if isinstance(step, Failure) and not step.started:  # a prompt that was not checked: rows no longer count right
            raise RuntimeError("the loop refused a prompt") from step.error
        with self._changed:
            job, choice = self._rows.get(row, (None, 0))
            if job is None:
                return  # dropped while the row was in its step
            # Each sample's own clock begins when it gets a slot: the later ones of a request are stopped here.
            late = time.monotonic() >= job.deadline + GRACE
            if isinstance(step, Step) and step.finish_reason is None and late:
                self._streams.close(row)
                step = replace(step, finish_reason="time")
            if step.finish_reason:
                del self._rows[row]
                job.rows.discard(row)
        job.deliver(choice, step)

    def _fail(self) -> None:
        """The end of every job that has a row in the loop."""
        with self._changed:
            jobs = {job for job, _ in self._rows.values()}
        for job in jobs:
            job.deliver(0, Failure(EngineError(FAILED)))
            self.drop(job)
