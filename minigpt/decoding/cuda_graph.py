"""Decoding on CUDA: one step recorded as a CUDA graph, and replayed.

A step launches hundreds of small kernels, which takes the CPU longer than the GPU needs to run them. A graph launches
them all at once. It repeats exactly what was recorded, so nothing may change but the contents of two tensors: the ids
and the positions that they take. Hence StaticCache: every step computes every row of the cache, over all its positions.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from minigpt.errors import PromptError
from minigpt.network.cache import KVCache, StaticCache
from minigpt.network.model import GPT2, has_hooks

ORDINARY_STEPS = 8  # about as long as a capture takes, so that no answer takes much more than twice the shorter way


_capturing = threading.Lock()  # PyTorch allows one capture at a time in a process


def pays(model: GPT2, steps: int) -> bool:
    """Whether a capture is worth its time after so many ordinary steps, and right: a graph would not run hooks."""
    return model.wte.weight.is_cuda and steps >= ORDINARY_STEPS and not has_hooks(model)


class DecodeStep:
    """Decode steps of a model, with `heads` switched off, by a graph of one of them.

    Called in inference mode, within `undisturbed`. Not for several threads at once: each call of a LanguageModel has
    its own.
    """

    def __init__(self, model: GPT2, heads: Collection[tuple[int, int]]) -> None:
        self.model, self.heads = model, heads
        self.keys: Tensor | None = None  # the memory that the graph works on
        self.steps = 0  # ordinary ones on this memory
        self.failed = False
        self.replay: Callable[[], Tensor] | None = None
        self.fixed: StaticCache | None = None  # kept with `replay`: a graph holds addresses, not tensors

    def __call__(self, ids: list[int], cache: KVCache) -> Tensor | None:
        """Feed the next token of each row: the logits after it, [B,V]; the cache's lengths have moved on.

        None, and nothing has happened, where an ordinary step is better. The next call overwrites the logits.
        """
        if cache.keys is not self.keys:  # the first call, or the cache has grown
            self.keys, self.steps, self.replay, self.fixed = cache.keys, 0, None, None
        if self.replay is None and (self.failed or not pays(self.model, self.steps)):
            self.steps += 1
            return None
        if max(cache.lengths) >= cache.max_len:  # a kernel that writes outside would break CUDA for the whole process
            raise PromptError(f"{max(cache.lengths) + 1} tokens do not fit a cache made for {cache.max_len}")
        # A row not in use takes token 0 at position 0. Nobody sees what it writes there: whatever fills the slot next,
        # a prefill or a copy of another row, begins with position 0.
        unused = [0] * (cache.keys.shape[1] - len(ids))
        inputs = torch.tensor([ids + unused, cache.lengths + unused])
        replay = self.replay or self._capture(cache, inputs)
        if replay is None:
            return None
        self.inputs.copy_(inputs)
        cache.advance(1)
        return replay()[: len(ids)]

    def _capture(self, cache: KVCache, inputs: Tensor) -> Callable[[], Tensor] | None:
        """Make `replay` for this memory; None if that fails. The runs that it takes write what the replay will."""
        self.inputs = inputs.to(cache.keys.device)
        ids, positions = self.inputs
        fixed = self.fixed = cache.fixed(positions)

        def step() -> Tensor:
            return self.model.head(self.model.hidden(ids[:, None], fixed, ablate=self.heads)[:, -1])

        try:
            self.replay = captured(step, cache.keys.device)
        except RuntimeError as error:
            self.failed, self.fixed = True, None
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
