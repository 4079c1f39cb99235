"""Tokens that rows are likely to draw, guessed cheaply, so that one pass of the model verifies several of them.

A pass over a row's last token and k drafted ones gives the logits after each. The row draws from them as it always
does, until a draw is not the token drafted there: it draws what it draws without drafts, greedy or sampled.

    look-up   the tokens that followed the last few where they came before ("Prompt lookup decoding", A. Saxena, 2023)
    a model   a smaller one, or the same in int8, draws with a copy of the row's generator: where two models give
              nearly the same distribution, the same random numbers give the same token (2408.07978)

k maximises expected tokens over time (2211.17192, section 3.3): (1 - a^(k+1)) / (1 - a) tokens, with a the share of
guesses that was right lately. k = 0 is no draft. Counts and the CPU's features decide, never a clock: a run repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from minigpt.checks import agreement, short_repr
from minigpt.decoding.sampling import draw, process
from minigpt.decoding.sequence import Limits, Sequence
from minigpt.decoding.step import Steps
from minigpt.errors import MiniGPTError
from minigpt.network.cache import KVCache
from minigpt.network.linear import Linear
from minigpt.network.model import GPT2
from minigpt.network.products import Packed, sharing

Source = GPT2 | Literal["lookup", "off"]  # a model drafts where look-up has nothing better
Seen = dict[tuple[int, ...], int]  # {n-gram of a row: the position after it, the last time}

MOST_ROWS = 4  # of a batch that drafts: a larger one fills a pass with rows
_LONGEST = 15  # drafted tokens: with the row's last one, 16 rows of a product
_NGRAMS = {3: 0.7, 2: 0.4}  # sizes to look up, longest first, and the share of right guesses to expect at first
_SPEED = {torch.float32: 1.0, torch.bfloat16: 0.5, torch.float16: 0.55, torch.int8: 0.43}  # to read a weight, AVX-512
_CALLS = 8e6  # parameters that are read in the time that Python takes for a pass


def source_of(draft: Any, model: GPT2, limits: Limits) -> Source:
    """What drafts for the model: for "int8" a copy, for a LanguageModel its model. Raises ValueError if it cannot."""
    packed, device = model.output.packed, model.wpe.weight.device
    if draft in ("lookup", "off"):
        return "lookup" if draft == "lookup" else "off"
    if draft == "int8":
        if device.type != "cpu" or (packed and packed.dtype == torch.int8):
            raise ValueError("draft int8 is for a model in float32 or float16 on the CPU: use lookup")
        return in_int8(model)
    if isinstance(draft, str) or not isinstance(getattr(draft, "model", None), GPT2):
        raise ValueError(f"draft must be lookup, off, int8 or a LanguageModel, not {short_repr(draft)}")
    if draft.device != device:
        raise ValueError(f"the draft is on {draft.device}, but the model on {device}: load both on one device")
    ours, theirs = limits.tokenizer, draft.limits.tokenizer
    if draft.limits.vocab_size != limits.vocab_size or (ours and theirs and not ours.same_as(theirs)):
        raise ValueError("the draft has another vocabulary than the model: it must have the same tokenizer")
    source: GPT2 = draft.model
    return source


class Rate:
    """The share of a source's guesses that was right lately."""

    def __init__(self, first: float) -> None:
        self.first, self.tried, self.right = first, 0.0, 0.0

    def tokens(self, k: int) -> float:
        """The tokens that a pass over k guesses is expected to give."""
        share = min((self.right + 2 * self.first) / (self.tried + 2), 0.999)
        return float((1 - share ** (k + 1)) / (1 - share))

    def count(self, guess: list[int], drawn: list[int]) -> None:
        """Learn from what was drawn, also of a guess that was not used. Without guesses, go back to the start."""
        right, tried = agreement(guess, drawn), min(len(guess), len(drawn))
        fade = 0.85 if tried else 0.99
        self.tried, self.right = fade * self.tried + min(right + 1, tried), fade * self.right + right


class Drafts:
    """The drafts of one call, whose rows come and go between passes."""

    def __init__(self, target: GPT2, source: Source) -> None:
        self.source, self.packed, self.seen = source, target.output.packed, dict[Sequence, Seen]()
        self.calls = _CALLS / _size(target)
        self.rates = {size: Rate(first) for size, first in _NGRAMS.items()}
        self.model = DraftModel(source, target) if isinstance(source, GPT2) else None
        self.guesses: dict[Sequence, list[tuple[Rate, list[int]]]] = {}  # of this pass, used or not

    def propose(self, rows: list[Sequence], most: int) -> list[list[int]]:
        """A draft for each row, of at most so many tokens. Beams do not draft."""
        if most < 1 or self.source == "off" or len(rows) > MOST_ROWS or any(row.together for row in rows):
            self.guesses = {}
            return [[] for _ in rows]
        room = [min(most, _LONGEST, row.params.max_new_tokens - len(row.steps) - 1) for row in rows]
        self.seen = {row: self.seen.get(row, {}) for row in rows}
        found = [_look_up(self.seen[row], row.history) for row in rows]
        looked = [(self.rates[size], ids[:left]) for (size, ids), left in zip(found, room, strict=True)]
        time = partial(_time, packed=self.packed, calls=self.calls)
        gain, k = _best([(rate, len(ids)) for rate, ids in looked], time)
        self.guesses = {row: [guess] for row, guess in zip(rows, looked, strict=True)}
        if self.model:
            room = [min(left, self.model.room(rows)) for left in room]
            other, length = _best([(self.model.rate, left) for left in room], time, self.model.cost)
            use = other > gain
            drafts = self.model.guess(rows, [min(left, length) for left in room]) if use else [[] for _ in rows]
            for row, ids in zip(rows, drafts, strict=True):
                self.guesses[row].append((self.model.rate, ids))
            if use:
                return drafts
        return [ids[:k] for _, ids in looked]

    def count(self, row: Sequence, drawn: list[int]) -> None:
        """What the row has drawn in this pass."""
        for rate, guess in self.guesses.get(row, ()):
            rate.count(guess, drawn)


def _look_up(seen: Seen, ids: list[int]) -> tuple[int, list[int]]:
    """The size of the longest n-gram that ends `ids` and came before, and what followed it: maybe nothing."""
    for end in range(seen.get((), 1), len(ids)):
        for size in _NGRAMS:
            seen[tuple(ids[max(end - size, 0) : end])] = end
    seen[()] = len(ids)  # so far it is read
    size, start = next(((n, seen[key]) for n in _NGRAMS if (key := tuple(ids[-n:])) in seen), (min(_NGRAMS), len(ids)))
    found = ids[start : start + _LONGEST]
    while found and len(found) < _LONGEST:  # from the end of the text on, it repeats itself
        found.append(found[start - len(ids)])
    return size, found


def _best(rows: SequenceOf[tuple[Rate, int]], time: Callable[[int], float], cost: float = 0.0) -> tuple[float, int]:
    """The most tokens that are expected in the time of a pass without drafts, and how many to draft for that.

    rows: each one's rate, and the most that it can draft.     cost: of a drafted token, in passes.
    """
    n, alone = len(rows), time(len(rows))

    def gain(k: int) -> float:
        return sum(rate.tokens(min(k, most)) for rate, most in rows) / (time((k + 1) * n) / alone + k * cost)

    best = max(range(1 + max(most for _, most in rows)), key=gain)
    return gain(best), best


def _time(n: int, packed: Packed | None, calls: float) -> float:
    """How long a pass over n tokens takes, in passes over one (GPT-2 124M on 2 cores of a Zen 5, and of a Zen 3).

    packed: the head.     calls: the share of a pass over one that Python takes.
    """
    ordered = _wide() or bool(packed and packed.use.ordered)
    products = 1 + (0.06 if ordered else 0.11) * (n - 1)
    if n > 1 and not ordered and (packed is None or packed.dtype == torch.float32):  # formats.InParts
        products = (1.6 if n <= 4 else 2.4) + 0.12 * n
    return calls + (1 - calls) * products


def _wide() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def in_int8(model: GPT2) -> GPT2:
    """The model with its matrices in int8, to draft for it. It shares everything else, and packs at the first draft."""
    twin: GPT2 = sharing(model)
    for layer in {twin.output, *(layer for layer in twin.modules() if isinstance(layer, Linear))}:
        layer.packed = layer.packed.beside(torch.int8) if layer.packed else Packed(torch.int8)
    return twin


class DraftModel:
    """A model that drafts, with a cache of its own. It never fails a row: where it cannot go on, the draft ends."""

    def __init__(self, model: GPT2, target: GPT2) -> None:
        weight = model.wpe.weight
        self.model, self.steps, self.cost = model, Steps(model), _size(model) / _size(target)
        self.rate = Rate(0.95 if model.wte.weight is target.wte.weight else 0.7)
        self.cache = KVCache(model.config, MOST_ROWS, 1, device=weight.device, dtype=weight.dtype, rows=0)
        self.slots: list[tuple[Sequence, list[int]]] = []  # of the cache: the row, and the tokens in it

    def room(self, rows: list[Sequence]) -> int:
        """How many tokens it can draft: none beyond its own context, or where a hook would see them."""
        longest = max(len(row.history) for row in rows)
        return max(self.model.config.n_positions - longest, 0) if self.steps.look() else 0

    def guess(self, rows: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """The next tokens of each row, at most its length."""
        self._admit(rows)
        drafts = {row: list[int]() for row in rows}
        running = {row: length for row, length in zip(rows, lengths, strict=True) if length}
        generators = {row: row.generator and row.generator.clone_state() for row in running}
        fed = [row.history[size:] for (row, _), size in zip(self.slots, self.cache.lengths, strict=True)]
        while running:
            logits = self.steps(torch.tensor(fed, device=self.cache.keys.device), self.cache)[:, -1]
            for (row, known), ids, scores in zip(self.slots, fed, logits, strict=True):
                known += ids
                if row in running:
                    drafts[row] += (new := _ahead(row, drafts[row], scores, generators[row]))
                    if not new or new[0] in row.end_ids or len(drafts[row]) == running[row]:
                        del running[row]
            fed = [(drafts[row] or row.history)[-1:] for row, _ in self.slots]
        return [drafts[row] for row in rows]

    def _admit(self, rows: list[Sequence]) -> None:
        """Bring the cache to where every row lacks its last token alone, or a single row its last two."""
        for slot in reversed(range(len(self.slots))):
            if self.slots[slot][0] not in rows:
                self.cache.drop_row(slot)
                self.slots[slot] = self.slots[-1]
                self.slots.pop()
        for row in [row for row in rows if all(row is not known for known, _ in self.slots)]:
            longest = len(row.prompt.ids) + row.params.max_new_tokens + _LONGEST
            self.cache.reserve(min(longest, self.model.config.n_positions))
            self.cache.add_row()
            self.slots.append((row, []))
        for slot, (row, known) in enumerate(self.slots):
            same, ready = agreement(known, row.history[:-1]), len(row.history) - 1
            self.cache.cut(slot, same)
            del known[same:]
            if ready - same > (len(rows) == 1):
                new = torch.tensor([row.history[same:-1]], device=self.cache.keys.device)
                self.model.hidden(new, self.cache.row(slot, same))
                known += row.history[same:-1]


def _ahead(row: Sequence, drafted: list[int], logits: Tensor, generator: torch.Generator | None) -> list[int]:
    """The token that the row would draw from logits [V] after the drafted ones; [] if none."""
    params, barred, n_new = row.params, row.limits.undecodable_ids, len(row.steps) + len(drafted)
    try:
        return [draw(process(logits, [*row.history, *drafted], n_new, params, row.end_ids, barred), params, generator)]
    except MiniGPTError:
        return []


def _size(model: GPT2) -> float:
    """How long a pass over one token takes, in float32 parameters read."""
    packed = model.output.packed
    dtype = packed.dtype if packed else model.wte.weight.dtype
    speed = 0.65 if dtype == torch.int8 and not _wide() else _SPEED.get(dtype, 2.0)
    return _CALLS + sum(weight.numel() for weight in model.parameters()) * speed
