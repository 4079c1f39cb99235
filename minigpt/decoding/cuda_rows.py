"""The rows of a call on CUDA: their cache on an entry's memory, and what they draw by its graphs (cuda_graph.py)."""

from __future__ import annotations

import math
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from minigpt.decoding.cuda_graph import MOST_ROWS, Entry, Graph, Step, Wants, graphs_of, refused
from minigpt.decoding.sampling import add_bias, ban_repeated_ngrams, suppress
from minigpt.decoding.sequence import Drawn, Sequence, TokenLogprob
from minigpt.network.cache import KVCache
from minigpt.network.model import GPT2


def cache_for(model: GPT2, slots: int, graphs: bool = True) -> KVCache:
    """The cache for a call of so many rows, none in use yet."""
    weight = model.wpe.weight  # its dtype is that of the activations
    able = graphs and weight.is_cuda and slots <= MOST_ROWS and not refused()
    if able and weight.device not in graphs_of(model).failed:
        return Slots(model, slots)
    return KVCache(model.config, slots, 1, device=weight.device, dtype=weight.dtype, rows=0)


class Slots(KVCache):
    """The cache of up to 32 rows, on memory borrowed from the model's graphs, and the steps by these graphs."""

    def __init__(self, model: GPT2, slots: int) -> None:
        weight = model.wpe.weight
        super().__init__(model.config, slots, 1, device=weight.device, dtype=weight.dtype, rows=0)
        self.model, self.store = model, graphs_of(model)
        self.entry: Entry | None = None
        self.back: Any = None  # gives the entry back when nobody holds this cache any more
        self.step: Step | None = None  # that the graphs are known to be right for
        self.wants = Wants()
        self.placed: dict[int, Sequence] = {}  # by slot: whose options are on the device

    def reserve(self, max_len: int, rows: int = 0) -> None:
        """Make room for `max_len` tokens per row, and for so many rows: in another entry, if this one is too small."""
        rows = max(self.keys.shape[1], rows)
        if self.entry is not None and max_len <= self.max_len and rows <= self.keys.shape[1]:
            return
        old, self.entry = self.entry, self.store.borrow(self.model, rows, max(max_len, self.max_len))
        keys, values = self.entry.memory[:, 0], self.entry.memory[:, 1]  # [L,B,H,S,D] each
        if used := len(self.lengths):
            keys[:, :used, :, : self.max_len] = self.keys[:, :used]
            values[:, :used, :, : self.max_len] = self.values[:, :used]
        self.keys, self.values, self.step = keys, values, None
        self.placed.clear()
        if old is not None:
            self.back.detach()
            self.store.give_back(old)
        self.back = weakref.finalize(self, self.store.give_back, self.entry)
        self.back.atexit = False

    def draw(self, step: Step | None, rows: list[Sequence]) -> list[Drawn | Tensor] | None:
        """Feed the last token of each row, and draw the next. None, and nothing has happened: take an ordinary step.

        A row that must be drawn for by itself, see _alone, or because it has failed, gets its logits [V].
        """
        entry, states = self.entry, [row.generator.get_state() if row.generator else None for row in rows]
        if step is None or entry is None or entry.key[0] > MOST_ROWS or refused() or entry.key[3] in self.store.failed:
            return None
        failed = list(range(len(rows)))
        try:
            graph = self._launch(entry, step, rows)
            out = graph.out.cpu().tolist()  # the one wait of a step
            failed = [slot for slot in failed if not all(math.isfinite(row[slot]) for row in out[1:3])]
        except RuntimeError as error:
            self.store.failed.add(entry.key[3])
            warnings.warn(f"decoding goes on without a CUDA graph, more slowly: {error}", stacklevel=2)
            return None
        finally:
            for slot in failed:  # its draw is made again, from its logits
                if (generator := rows[slot].generator) and (state := states[slot]) is not None:
                    generator.set_state(state)
        self.advance(1)
        return [
            graph.logits[slot].clone()
            if slot in failed or _alone(row)
            else (int(out[0][slot]), _logprob(row, [number[slot] for number in out]))
            for slot, row in enumerate(rows)
        ]

    def _launch(self, entry: Entry, step: Step, rows: list[Sequence]) -> Graph:
        """Set on the device what differs from the last step, and replay the step at the rows' lengths."""
        if step is not self.step:
            entry.fit(self.model)
            self.step, self.wants = step, Wants()
        entry.stream = torch.cuda.current_stream(entry.key[3])
        wants = Wants(*map(max, self.wants, *map(_wants, rows)))
        entry.feed([row.history[-1] for row in rows], self.lengths)
        if wants != self.wants or wants not in entry.graphs:
            self.wants = wants
            self.placed.clear()
        graph = entry.graph(step, wants)
        for slot, row in enumerate(rows):
            self._place(entry, slot, row)
            if row.generator is not None and not _alone(row):
                entry.wide("q")[0][slot].exponential_(generator=row.generator)
        graph.replay()
        return graph

    def _place(self, entry: Entry, slot: int, row: Sequence) -> None:
        """Set on the device what the draw must know of a row."""
        p, new, V, n_new = row.params, self.placed.get(slot) is not row, entry.vocab_size, len(row.steps)
        if new:
            self.placed[slot] = row
            samples, k, tail = p.temperature > 0, p.top_k if 0 < p.top_k < V else V, 1 - p.top_p if p.top_p < 1 else -1
            entry.set_options(slot, [p.temperature or 1, samples, k, tail, p.min_p, p.repetition_penalty])
        missing = row.limits.undecodable_ids
        if self.wants.shaped and (new or _by_host(row) or n_new == p.min_new_tokens):
            biases = [*(((id,), value) for id, value in p.logit_bias.items()), *p.sequence_bias]
            biases += [(ids, -math.inf) for ids in p.bad_words_ids if ids not in {(id,) for id in row.end_ids}]
            bias = add_bias(torch.zeros(V, device="cpu"), row.history, biases)
            bias = ban_repeated_ngrams(bias, row.history, p.no_repeat_ngram_size)
            ends = row.end_ids if n_new < p.min_new_tokens else ()
            entry.put("bias", slot, suppress(suppress(suppress(bias, ends), p.suppress_tokens), missing))
        if self.wants.shaped and new:
            seen = torch.zeros(V, dtype=torch.bool, device="cpu")
            entry.put("seen", slot, seen.index_fill_(0, torch.tensor(row.history, device="cpu"), True))
        if self.wants.logprobs > 0 and new:
            entry.put("missing", slot, suppress(torch.zeros(V, device="cpu"), missing))


def _alone(row: Sequence) -> bool:
    """Whether the row is drawn for by itself, from its logits: a beam, or with a filter that is not in the graphs."""
    p = row.params
    return bool(p.num_beams > 1 or p.typical_p < 1 or p.epsilon_cutoff or p.eta_cutoff)


def _by_host(row: Sequence) -> bool:
    """Whether the host must know the last token to say what is barred or more likely next."""
    p = row.params
    return bool(p.no_repeat_ngram_size or p.sequence_bias or p.bad_words_ids)


def _wants(row: Sequence) -> Wants:
    p = row.params
    if _alone(row):
        return Wants()
    shaped = p.logit_bias or p.suppress_tokens or p.repetition_penalty != 1 or _by_host(row)
    shaped = bool(shaped or row.limits.undecodable_ids or len(row.steps) < p.min_new_tokens)
    samples = p.temperature > 0
    k = -1 if p.logprobs is None else p.logprobs and 1 << (p.logprobs - 1).bit_length()
    return Wants(
        shaped, samples, samples and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0), min(k, row.limits.vocab_size)
    )


def _logprob(row: Sequence, numbers: list[float]) -> TokenLogprob | None:
    if row.params.logprobs is None:
        return None
    k, listed = (
        min(row.params.logprobs, row.limits.vocab_size - len(row.limits.undecodable_ids)),
        (len(numbers) - 4) // 2,
    )
    best = zip(map(int, numbers[4 + listed :]), numbers[4:], strict=False)
    return TokenLogprob(int(numbers[0]), numbers[3], [*best][:k])
