"""Decoding on CUDA: a step and the draw of its tokens, recorded once as a CUDA graph and replayed.

A step launches hundreds of small kernels, which takes the CPU longer than the GPU needs to run them. A graph launches
them all at once. It repeats exactly what was recorded, on the same memory: so all rows are computed, in use or not,
over all positions, and what differs from step to step lies in tensors: `state`, `options`, `wide`. A step is one copy
to the device, one launch, and one copy back, for which the host waits.

The draw is that of sampling.py, for all rows at once; a token sampled on CUDA is not the one that the same seed gives
on the CPU. B rows of the memory, S positions, H heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt.network.cache import KVCache
from minigpt.network.model import GPT2

MOST_ROWS, LEAST_LEN = 32, 256  # of an entry: powers of two
# Before 2.13, a replay fails while another thread captures (https://github.com/pytorch/pytorch/pull/176752).
REPLAYS_ALONE = [int(part) for part in torch.__version__.split(".")[:2]] < [2, 13]

_capturing = threading.RLock()  # PyTorch allows one capture at a time in a process
Step = Callable[[Tensor, KVCache], Tensor]


class Wants(NamedTuple):
    """What a draw must be able to do: each combination is a graph of its own."""

    shaped: bool = False  # bias, bans, penalty
    sampled: bool = False
    filtered: bool = False  # top_k, top_p, min_p
    logprobs: int = -1  # so many of the best ones; -1: none, not even the token's own


class Graphs:
    """A model's entries that are not in use, and whether a capture has failed. `release` forgets both."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may give back in the middle of anything
        self.release()

    def __reduce__(self) -> Any:
        return Graphs, ()  # for copy and pickle: a graph cannot be copied, but made again

    def release(self) -> None:
        """Free the memory of what is not in use."""
        self.idle: list[Entry] = []  # the last used comes last
        self.failed: set[torch.device] = set()

    def borrow(self, model: GPT2, rows: int, max_len: int) -> Entry:
        """An entry for at least so many rows and tokens, all zeros."""
        slots = 1 << (rows - 1).bit_length()
        length = min(max(LEAST_LEN, 1 << (max_len - 1).bit_length()), -(-model.config.n_positions // 16) * 16)
        key = (slots, length, model.wpe.weight.dtype, model.wpe.weight.device)
        with self.lock:
            entry = next((entry for entry in reversed(self.idle) if entry.key == key), None)
            if entry is None:
                return Entry(model, slots, length)
            self.idle.remove(entry)
        torch.cuda.current_stream(key[3]).wait_stream(entry.stream)
        entry.memory.zero_()  # a row that failed may have left NaN, and 0 * NaN is NaN
        return entry

    def give_back(self, entry: Entry) -> None:
        """Keep it for the next call, while all that is kept fits a quarter of the free memory."""
        with self.lock:
            self.idle.append(entry)
            room = torch.cuda.mem_get_info(entry.key[3])[0] // 4
            while sum(one.size() for one in self.idle) > room:
                self.idle.pop(0)


def graphs_of(model: GPT2) -> Graphs:
    """The model's own: it goes with the model."""
    return vars(model).setdefault("graphs", Graphs())  # type: ignore[no-any-return]


def refused() -> bool:
    """Deterministic index_put_ reads its indices back, which no capture can; cumsum raises."""
    return torch.are_deterministic_algorithms_enabled()


class StaticCache(KVCache):
    """An entry's memory as the step of a graph sees it: no Python number changes from step to step."""

    start = None  # rows may differ in length

    def __init__(self, entry: Entry) -> None:
        self.entry, self.lengths = entry, [0] * entry.key[0]

    def indices(self, n_new: int) -> tuple[Tensor, Tensor]:
        return self.entry.state[0, :, None], self.entry.state[1, :, None]

    def visible(self, mask: Tensor, n_new: int) -> Tensor:
        """What is added to the scores, [B,H,1,S]: a row of the table for each head."""
        positions = self.entry.state[1, :, None].expand(-1, self.entry.memory.shape[3])  # (B, H)
        return torch.embedding(self.entry.mask, positions)[:, :, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v, [B,H,1,D], by one kernel: in what c_attn gives, v comes right after k."""
        (B, H, _, D), (row, head, _, one), block = k.shape, k.stride(), self.entry.memory[layer]
        both = k.as_strided((2 * H, B, D), (head, row, one), k.storage_offset())
        block.view(-1, D).index_put_((self.entry.state[2:],), both)
        return block[0], block[1]

    def advance(self, n_new: int) -> None:
        """The host does, after the replay."""


class Graph(NamedTuple):
    """A recorded step, and what it gives: the logits [B,V], raw, and `Entry.chosen`'s numbers."""

    replay: Callable[[], None]
    logits: Tensor
    out: Tensor


class Entry:
    """Memory for `slots` rows of `max_len` tokens, and the graphs on it. For one call at a time.

    state: [2+2H,B] int64: the ids to feed; their positions; for each head's key and value, where in a block's memory
        they go.
    options: [6,B] float32: temperature, 1 for a row that samples, top_k, 1 - top_p, min_p, penalty.
    wide: [B,V] each: "bias", added to the logits; "seen", what the penalty is for; "missing", not listed in logprobs;
        "q", the random numbers.
    """

    def __init__(self, model: GPT2, slots: int, max_len: int) -> None:
        config, weight = model.config, model.wpe.weight
        self.key = (slots, max_len, weight.dtype, weight.device)
        self.vocab_size, H = config.vocab_size, config.n_head
        self.memory = torch.zeros(
            config.n_layer, 2, slots, H, max_len, config.n_embd // H, dtype=weight.dtype, device=weight.device
        )
        places = torch.arange(2 * slots * H, device="cpu").view(2, slots, H) * max_len  # where each head's keys begin
        self.base = places.transpose(1, 2).reshape(2 * H, slots)
        self.state, self._fed = self._pair(2 + 2 * H, slots, dtype=torch.int64)
        self.options, self._options = self._pair(6, slots, dtype=torch.float32)
        for slot in range(slots):  # those not in use draw, too
            self.set_options(slot, [1, 0, self.vocab_size, -1, 0, 1])
        self._wide: dict[str, tuple[Tensor, Tensor]] = {}
        dtype = torch.float32 if config.reorder_and_upcast_attn else weight.dtype
        self.mask = torch.full((max_len, max_len), -math.inf, dtype=dtype, device=weight.device).triu(1)
        self.graphs: dict[Wants, Graph] = {}
        self.parts, self.numbers = list[Any](), list[Any]()  # of the model that the graphs are right for
        self.stream = torch.cuda.current_stream(weight.device)

    def _pair(self, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros on the device, and in pinned memory to set them from: by then, the host has waited for the last use."""
        host = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
        return torch.zeros(shape, dtype=dtype, device=self.key[3]), host

    def wide(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self._wide:
            dtype = torch.bool if name == "seen" else torch.float32
            self._wide[name] = self._pair(self.key[0], self.vocab_size, dtype=dtype)
        return self._wide[name]

    def put(self, name: str, slot: int, values: Tensor) -> None:
        """Set a row [V] of a wide tensor."""
        target, pinned = self.wide(name)
        pinned[slot].copy_(values)
        target[slot].copy_(pinned[slot], non_blocking=True)

    def size(self) -> int:
        """Bytes, without what the graphs keep for themselves."""
        return sum(one.nbytes for one in (self.memory, self.mask, *(pair[0] for pair in self._wide.values())))

    def fit(self, model: GPT2) -> None:
        """Forget the graphs if the model is no longer the one that they were made for."""
        modules: list[Any] = list(model.modules())
        tables = [table for at in modules for table in (at._parameters, at._buffers, at._modules)]
        parts = [value for table in tables for value in table.values() if value is not None]
        names = ("scale", "upcast", "activation", "eps", "n_head")
        numbers = [vars(at).get(name) for at in modules for name in names]
        numbers += [weight.data_ptr() for weight in model.parameters()]
        known = [part() for part in self.parts]
        if numbers != self.numbers or len(known) != len(parts) or any(map(operator.is_not, known, parts)):
            self.graphs.clear()
            self.parts, self.numbers = [*map(weakref.ref, parts)], numbers  # so that graphs keep no weight alive

    def set_options(self, slot: int, values: list[float]) -> None:
        self._options[:, slot] = torch.tensor(values, device="cpu")
        self.options.copy_(self._options, non_blocking=True)

    def feed(self, ids: list[int], lengths: list[int]) -> None:
        """Each row's next input. A row not in use takes token 0 at position 0, which whatever fills the slot writes."""
        self._fed.zero_()
        self._fed[:2, : len(ids)] = torch.tensor([ids, lengths], device="cpu")
        self._fed[2:] = self.base + self._fed[1]
        self.state.copy_(self._fed, non_blocking=True)

    def graph(self, step: Step, wants: Wants) -> Graph:
        """The graph for these wants; where there is none, one is made: its first runs are of what is fed now."""
        if wants not in self.graphs:
            static = StaticCache(self)

            def run() -> tuple[Tensor, Tensor]:
                logits = step(self.state[0, :, None], static)[:, -1]
                return logits, self.chosen(logits, wants)

            replay, results = captured(run, self.key[3])
            self.graphs[wants] = Graph(replay, *results)
        return self.graphs[wants]

    def chosen(self, logits: Tensor, wants: Wants) -> Tensor:
        """Draw from logits [B,V]. Float32 numbers, [B] each: the id, exact below 2**24; one or two that are not finite
        where the row has failed; with logprobs the id's own, those of the k best ids, these ids.
        """
        total = logits.sum(-1, dtype=torch.float32)
        if wants == Wants():
            return torch.stack([logits.argmax(-1), total])
        scores = logits.float()
        temperature, samples, k, tail, min_p, penalty = self.options[:, :, None]  # (B, 1) each
        if wants.shaped:
            seen = self.wide("seen")[0].scatter_(1, self.state[0, :, None], True)
            scores = scores + self.wide("bias")[0]
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        best, ids = scores.max(-1)
        if wants.sampled:
            best = (scores := scores / temperature).amax(-1)
            if wants.filtered:
                scores = _filtered(scores, k, tail, min_p)
            drawn = (scores.softmax(-1) / self.wide("q")[0]).argmax(-1)
            ids = torch.where(samples[:, 0] > 0, drawn, ids)
        first = torch.stack([ids, total, best])
        if wants.logprobs < 0:
            return first
        logs = logits.float().log_softmax(-1)
        listed, order = (logs + self.wide("missing")[0]).sort(dim=-1, descending=True, stable=True)
        k_best = slice(wants.logprobs)
        return torch.cat([first, logs.gather(1, ids[:, None]).T, listed[:, k_best].T, order[:, k_best].T])


def _filtered(scores: Tensor, k: Tensor, tail: Tensor, min_p: Tensor) -> Tensor:
    """top_k, top_p and min_p as in sampling.py, each row its own, [B,1]: scores [B,V], the removed ones at -inf."""
    ascending, order = scores.sort(-1)
    kth = ascending.gather(1, scores.shape[1] - k.long())
    ascending = ascending.masked_fill(ascending < kth, -math.inf)
    remove = ascending.softmax(-1).cumsum(-1) <= tail
    remove[:, -1:].zero_()
    ascending = ascending.masked_fill(remove, -math.inf)
    shares = ascending.softmax(-1)
    ascending = ascending.masked_fill(shares < min_p * shares[:, -1:], -math.inf)
    return torch.empty_like(scores).scatter_(1, order, ascending)


def captured(step: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[Callable[[], None], Any]:
    """A function that replays `step`, and what it gives, always in the same memory. Raises RuntimeError.

    As https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs asks: a few runs on another stream first, in
    which libraries choose their kernels and take their memory.
    """
    stream, callers = _side_stream(device), torch.cuda.current_stream(device)
    with _capturing, torch.cuda.stream(stream):  # entered here too: a failed capture does not put the stream back
        stream.wait_stream(callers)
        try:
            for _ in range(3):
                step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may allocate memory meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = step()
        finally:
            callers.wait_stream(stream)

    def replay() -> None:
        with _capturing if REPLAYS_ALONE else nullcontext():
            graph.replay()

    return replay, result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: cuBLAS keeps its working memory for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
