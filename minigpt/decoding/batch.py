"""The decoding loop: admit, prefill, decode, drop. One loop serves streams, lists and jobs.

B rows in work, V vocabulary. Row i of the cache belongs to rows[i]; a row that ends makes room for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from minigpt.decoding.cuda_rows import cache_for
from minigpt.decoding.draft import Drafts, Source
from minigpt.decoding.sequence import Completion, Drawn, Failure, Sequence, Step
from minigpt.decoding.step import Steps
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.network.cache import KVCache
from minigpt.network.model import GPT2, undisturbed

Waiting = Iterator[Sequence | Failure | None]  # None: nothing yet
Decoded = Generator[tuple[Sequence | Failure, Step | None], None, None]


def decode(model: GPT2, waiting: Waiting, slots: int, source: Source = "off") -> Decoded:
    """Continue the sequences, at most `slots` at a time: each with the Step it has drawn, as soon as it is drawn.

    A sequence that fails comes with None, its `error` set; so do a Failure, and a sequence that is to draw nothing.
    Where nothing is in work and `waiting` gives None, it is asked again at once: let it wait a moment for more.
    """
    batch, exhausted, row = Batch(model, slots, source), False, None
    while batch.rows or not exhausted:
        while len(batch.rows) < slots and not exhausted:
            try:
                row = row or next(waiting)
            except StopIteration:
                exhausted = True
                break
            if row is None:
                break
            # A beam brings all beams of its search: the others find themselves in already.
            rows = [] if isinstance(row, Failure) or row.over else [*row.together] or [row]
            rows = [one for one in rows if one not in batch.rows]
            slots = max(slots, len(rows))
            if len(batch.rows) + len(rows) > slots:  # it waits until so many are free
                break
            for one in rows:
                yield one, batch.draw(one, batch.admit(one))  # its first token, from the logits after the prompt
            if not rows:
                yield row, None
            batch.drop_finished()
            row = None
        if batch.rows:
            yield from batch.step()
            batch.drop_finished()


class Batch:
    """Sequences that are continued together, and the cache that they share."""

    def __init__(self, model: GPT2, slots: int, source: Source) -> None:
        self.model, self.rows = model, list[Sequence]()
        self.device, self.cache = model.wpe.weight.device, cache_for(model, slots, graphs=isinstance(source, str))
        self.steps, self.drafts = Steps(model), Drafts(model, source)

    def admit(self, row: Sequence) -> Tensor:
        """Fill the next slot of the cache, by prefill or from a sample of the same prompt: the logits after it, [V]."""
        with undisturbed(self.model), torch.inference_mode():
            self.cache.reserve(row.max_len, row.params.num_beams)
            slot, prompt = self.cache.add_row(), row.prompt
            others = [i for i, other in enumerate(self.rows) if other.prompt is prompt and not other.slid]
            self.rows.append(row)
            if others and prompt.logits is not None:
                self.cache.copy_row(others[0], slot, len(row.context))
                return prompt.logits
            logits = self.prefill(slot, row.context)
            if row.params.samples > 1 or row.params.num_beams > 1:
                prompt.logits = logits
            return logits

    def prefill(self, slot: int, ids: list[int]) -> Tensor:
        """Fill a row of the cache with `ids` from position 0: the logits after the last one, [V]."""
        hidden = self.model.hidden(torch.tensor([ids], device=self.device), self.cache.row(slot))  # (1, T, E)
        return self.model.head(hidden[0, -1])

    def step(self) -> Decoded:
        """Feed the last token of each row, and its draft: each row with the Steps that it draws, None if that fails."""
        with undisturbed(self.model), torch.inference_mode():
            for slot, row in enumerate(self.rows):
                if row.forked_from is not None:
                    self.cache.copy_row(self.rows.index(row.forked_from), slot, len(row.history) - 1, row.shared)
                    row.forked_from = None
                if self.cache.lengths[slot] == self.model.config.n_positions:  # only a row that slides gets here
                    row.slid = True
                    self.cache.cut(slot, 0)
                    if len(row.context) > 1:
                        self.prefill(slot, row.context[:-1])
            before = list(self.cache.lengths)
            plain = self.steps.look() and type(self.cache) is KVCache
            drafts = self.drafts.propose(self.rows, self.cache.max_len - max(before) - 1 if plain else 0)
            results = self.steps.feed(self.rows, self.cache, drafts)
        for slot, (row, draft, drawn) in enumerate(zip(list(self.rows), drafts, results, strict=True)):
            row.passes += 1
            ids: list[int] = []
            for result in drawn:
                if row.over:
                    break
                step = self.draw(row, result)
                yield row, step
                ids += [step.id] if step else []
                if step is None or ids != draft[: len(ids)]:
                    break
            self.drafts.count(row, ids)
            self.cache.cut(slot, before[slot] + max(len(ids), 1))

    def draw(self, row: Sequence, logits: Tensor | Drawn) -> Step | None:
        """The row's draw, from logits [V]. Where they are not finite, its error names the weight at fault."""
        step = row.accept(logits)
        if isinstance(row.error, CheckpointError):
            damaged = [name for name, weight in self.model.named_parameters() if not weight.isfinite().all()]
            if damaged:
                row.error.args = (f"{row.error}; not finite: {damaged[0]}",)  # all beams of a prompt share the error
        return step

    def drop_finished(self) -> None:
        """Free the slots of finished rows; the last row moves into each gap, as in KVCache.drop_row."""
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].over:
                with torch.inference_mode():
                    self.cache.drop_row(slot, damaged=self.rows[slot].error is not None)
                self.rows[slot] = self.rows[-1]
                self.rows.pop()


def in_order(
    model: GPT2, sequences: Iterator[Sequence | Failure], slots: int, source: Source = "off"
) -> Iterator[Completion | Failure]:
    """What becomes of the sequences, in the order in which they came. They are read as rows become free."""
    order: deque[Sequence | Failure] = deque()  # not given yet

    def admitted() -> Waiting:
        while True:
            if len(order) >= 4 * slots:  # bounds the results that wait for one long row
                yield None
                continue
            try:
                row = next(sequences, None)
            except (MiniGPTError, ValueError) as error:  # finish the rows in work first; `sequences` ends here
                row = Failure(error)
            if row is None:
                return
            order.append(row)
            yield row

    for _ in decode(model, admitted(), slots, source):
        while order and order[0].finish_reason:
            done = order.popleft()
            if isinstance(done, Failure):
                yield done
            else:
                yield Failure(done.error, started=True) if done.error else done.completion()
