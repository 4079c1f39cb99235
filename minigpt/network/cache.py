"""The key/value cache: what attention has to remember of the tokens already seen. An argument, never module state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.errors import PromptError
from minigpt.network.config import GPT2Config


class KVCache:
    """Preallocated keys and values of every block, [L,B,H,S,D], with one length per row.

    Rows may differ in length: each step writes at each row's own length, and what lies beyond it is padding on the
    right, which the causal mask hides. `lengths` says how many tokens each row holds and, by its own length, how many
    of the `batch_size` rows are in use; the caller may change both (shorten a row, add one, drop the last).

    max_len: the tokens that each row can hold, by default all n_positions of the model.
    device, dtype: the model's own.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_size: int = 1,
        max_len: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        head_dim = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, max_len or config.n_positions, head_dim)
        # Zeros, not empty: a hidden position has weight 0, and 0 * NaN would still be NaN.
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        if self.keys.is_cpu:  # one query times all keys is up to 1.4 times as fast if they lie as [L,B,H,D,S] (Zen 5)
            self.keys = self.keys.view(*shape[:3], head_dim, shape[3]).transpose(3, 4)
        self.lengths = [0] * batch_size

    @property
    def max_len(self) -> int:
        """How many tokens a row can hold."""
        return self.keys.shape[3]

    @property
    def start(self) -> int | None:
        """The length that all rows share, or None where they differ."""
        first = self.lengths[0]
        return first if self.lengths.count(first) == len(self.lengths) else None

    def positions(self, n_new: int) -> Tensor:
        """Positions of the next `n_new` tokens of each row, [B,T]."""
        starts = torch.tensor(self.lengths, device=self.keys.device)
        return starts[:, None] + torch.arange(n_new, device=self.keys.device)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values, [B,H,T,D], and return all of that block's, [B,H,S,D].

        The lengths move only in `advance`, once every block has written. Raises PromptError where a row would overflow.
        """
        rows, n_new, start = len(self.lengths), k.shape[2], self.start
        stop = max(self.lengths) + n_new
        if stop > self.max_len:
            raise PromptError(f"{stop} tokens do not fit a cache made for {self.max_len}")
        keys, values = self.keys[layer, :rows, :, :stop], self.values[layer, :rows, :, :stop]
        if start is not None:
            keys.narrow(2, start, n_new).copy_(k)
            values.narrow(2, start, n_new).copy_(v)
        else:
            row, position = torch.arange(rows, device=k.device)[:, None], self.positions(n_new)
            keys[row, :, position] = k.transpose(1, 2)  # indexed so, the target is [B,T,H,D]
            values[row, :, position] = v.transpose(1, 2)
        return (k, v) if start == 0 else (keys, values)  # what is all there is, as it came, is the faster to read

    def advance(self, n_new: int) -> None:
        """Count `n_new` more tokens in every row."""
        self.lengths = [length + n_new for length in self.lengths]

    def row(self, index: int) -> KVCache:
        """Row `index` as a cache of its own (one row, empty) on the same memory, to prefill it while others wait."""
        view = object.__new__(KVCache)
        view.keys, view.values = self.keys[:, index : index + 1], self.values[:, index : index + 1]
        view.lengths = [0]
        return view

    def fixed(self, starts: Tensor) -> FixedCache:
        """All rows on the same memory, for steps whose shapes do not depend on the lengths: those are in `starts`."""
        return FixedCache(self, starts)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` a copy of the first `length` tokens of row `source`."""
        for part in (self.keys, self.values):
            part[:, target, :, :length] = part[:, source, :, :length]
        self.lengths[target] = length

    def reserve(self, max_len: int) -> None:
        """Make room for `max_len` tokens per row, keeping what is there."""
        if max_len > self.max_len:
            more = max_len - self.max_len  # zeros after the last position
            self.values = F.pad(self.values, (0, 0, 0, more))
            if self.keys.is_cpu:
                self.keys = F.pad(self.keys.transpose(3, 4), (0, more)).transpose(3, 4)
            else:
                self.keys = F.pad(self.keys, (0, 0, 0, more))


class FixedCache(KVCache):
    """A KVCache for one new token per row, in which no Python number changes from step to step: for a CUDA graph.

    Every step sees all `max_len` positions of all rows in use or not, and the mask hides what a row does not hold. The
    lengths are read from `starts` [B] on the device, so only the caller can check them: each must be below `max_len`.
    """

    def __init__(self, cache: KVCache, starts: Tensor) -> None:
        self.keys, self.values, self.starts = cache.keys, cache.values, starts
        self.rows = torch.arange(len(starts), device=starts.device)
        self.lengths = [0] * len(starts)  # so many rows

    @property
    def start(self) -> None:
        """Rows may differ in length."""

    def positions(self, n_new: int) -> Tensor:
        """Positions of the next token of each row, [B,1]."""
        return self.starts[:, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new token's keys and values, [B,H,1,D], and return the whole block's, [B,H,max_len,D]."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.starts] = k[:, :, 0]  # indexed so, the target is [B,H,D]
        values[self.rows, :, self.starts] = v[:, :, 0]
        return keys, values

    def advance(self, n_new: int) -> None:
        """Nothing: the caller moves `starts`."""
