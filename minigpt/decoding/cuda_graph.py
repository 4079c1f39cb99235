"""Decoding on CUDA: one step recorded as a CUDA graph, and replayed.

A step launches hundreds of small kernels, which takes the CPU longer than the GPU needs to run them. A graph launches
them all at once. It repeats exactly what was recorded, so nothing may change but the contents of two tensors: the ids
and the positions that they take. Hence StaticCache: every step computes every row of the cache, over all its positions.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from minigpt.errors import PromptError
from minigpt.network.cache import KVCache, StaticCache

ORDINARY_STEPS = 8  # about as long as a capture takes, so that no answer takes much more than twice the shorter way

_capturing = threading.Lock()  # PyTorch allows one capture at a time in a process


def pays(ids: Tensor, steps: int) -> bool:
    """Whether a capture is worth its time after so many ordinary steps."""
    return ids.is_cuda and steps >= ORDINARY_STEPS


class Graph:
    """Steps with one new token per row, by a graph of one of them.

    Called in inference mode, within `undisturbed`. Not for several threads at once: each call of a LanguageModel has
    its own.
    """

    def __init__(self) -> None:
        self.failed = False
        self.forget()

    def forget(self) -> None:
        """Capture anew: the step's weights or the cache's memory are others."""
        self.keys: Tensor | None = None  # the memory that the graph works on
        self.steps = 0  # ordinary ones on this memory
        self.replay: Callable[[], Tensor] | None = None
        self.static: StaticCache | None = None  # kept with `replay`: a graph holds addresses, not tensors

    def __call__(self, step: Callable[[Tensor, KVCache], Tensor], ids: Tensor, cache: KVCache) -> Tensor | None:
        """Token ids [B,1] -> logits [B,1,V]; the cache's lengths have moved on.

        None, and nothing has happened, where an ordinary step is better. The next call overwrites the logits.
        """
        if ids.shape[1] != 1:
            return None
        if cache.keys is not self.keys:  # the first call, or the cache has grown
            self.forget()
            self.keys = cache.keys
        if self.replay is None and (self.failed or not pays(ids, self.steps)):
            self.steps += 1
            return None
        if max(cache.lengths) >= cache.max_len:  # a kernel that writes outside would break CUDA for the whole process
            raise PromptError(f"{max(cache.lengths) + 1} tokens do not fit a cache made for {cache.max_len}")
        # A row not in use takes token 0 at position 0. Nobody sees what it writes there: whatever fills the slot next,
        # a prefill or a copy of another row, begins with position 0.
        rows, unused = len(ids), cache.keys.shape[1] - len(ids)
        starts = torch.tensor(cache.lengths + [0] * unused, device="cpu")[:, None]
        if self.replay is None:
            self.ids, self.at = torch.zeros_like(starts, device=ids.device), starts.to(ids.device)
        self.ids[:rows].copy_(ids)
        self.ids[rows:].zero_()
        self.at.copy_(starts)
        replay = self.replay or self._capture(step, cache)
        if replay is None:
            return None
        logits = replay()[:rows]
        cache.advance(1)
        return logits

    def _capture(self, step: Callable[[Tensor, KVCache], Tensor], cache: KVCache) -> Callable[[], Tensor] | None:
        """Make `replay` for this memory; None if that fails. The runs that it takes write what the replay will."""
        static = StaticCache(cache, self.at)
        try:
            self.replay = captured(lambda: step(self.ids, static), cache.keys.device)
            self.static = static
        except RuntimeError as error:
            self.failed = True
            warnings.warn(f"decoding goes on without a CUDA graph, more slowly: {error}", stacklevel=2)
        return self.replay


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """A function that replays `step` and gives its result, always in the same memory. Raises RuntimeError.

    As https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs asks: a few runs on another stream first, in
    which libraries choose their kernels and take their memory.
    """
    stream, callers = _side_stream(device), torch.cuda.current_stream(device)
    with _capturing, torch.cuda.stream(stream):  # entered here too: a failed capture does not put the stream back
        stream.wait_stream(callers)
        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may allocate memory meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = step()
        callers.wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: cuBLAS keeps its working memory for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
