"""The key/value cache: the keys and values of the tokens already seen.

A cache is an argument of every call, never a module's state.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.errors import PromptError
from minigpt.network.config import GPT2Config


class KVCache:
    """Preallocated keys and values of every block, [L,B,H,S,D], with one length per row.

    Rows may differ in length: each step writes at each row's own length. What lies beyond a row's
    length is padding on the right, which the causal mask hides. `lengths` holds the number of
    tokens of each row in use. Read it; add_row, cut, drop_row, copy_row and advance change it.

    max_len: the tokens that each row can hold, by default all n_positions of the model.
    device, dtype: the model's own; by default the CPU and float32.
    rows: how many of the `batch_size` rows are in use at first, by default all.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_size: int = 1,
        max_len: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        rows: int | None = None,
    ) -> None:
        head_dim = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, max_len or config.n_positions, head_dim)
        # Zeros, not empty: a hidden position has weight 0, and 0 * NaN would still be NaN.
        self.keys = torch.zeros(shape, device=device or "cpu", dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        if self.keys.is_cpu:  # [L,B,H,D,S] in memory: one query times all keys is up to 1.4 x faster (Zen 5)
            self.keys = self.keys.view(*shape[:3], head_dim, shape[3]).transpose(3, 4)
        self.lengths = [0] * (batch_size if rows is None else rows)
        self._whole: tuple[KVCache, int] | None = None  # of which cache, and which row, `row` made this view
        self._step: tuple[object, Tensor, Tensor] | None = None  # of which step, rows [B,1], positions [B,T]
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None  # positions, mask, the rows of the mask at them

    @property
    def max_len(self) -> int:
        """The number of tokens that a row can hold."""
        return self.keys.shape[3]

    @property
    def start(self) -> int | None:
        """The length that all rows share, or None where they differ."""
        first = self.lengths[0]
        return first if self.lengths.count(first) == len(self.lengths) else None

    def positions(self, n_new: int) -> Tensor:
        """Positions of the next `n_new` tokens of each row, [B,T]."""
        return self._indices(n_new)[1]

    def visible(self, mask: Tensor, n_new: int) -> Tensor:
        """The rows of a causal mask for the next `n_new` tokens of rows that differ in length, [B,1,T,S]."""
        positions = self.positions(n_new)
        if self._seen is None or self._seen[0] is not positions or self._seen[1] is not mask:
            stop = max(self.lengths) + n_new
            self._seen = positions, mask, mask[positions, :stop].unsqueeze(1)
        return self._seen[2]

    def _indices(self, n_new: int) -> tuple[Tensor, Tensor]:
        """Rows [B,1] and positions [B,T] of the new tokens: made once a step, not once a block."""
        step = (n_new, *self.lengths)
        if self._step is None or self._step[0] != step:
            device = self.keys.device
            starts = torch.tensor(self.lengths, device=device)[:, None]
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            self._step = step, rows, starts + torch.arange(n_new, device=device)
        return self._step[1:]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values, [B,H,T,D], and return all of that block's, [B,H,S,D].

        The lengths move only in `advance`, once every block has written.
        Raises PromptError where a row would overflow.
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
            row, position = self._indices(n_new)
            keys[row, :, position] = k.transpose(1, 2)  # indexed so, the target is [B,T,H,D]
            values[row, :, position] = v.transpose(1, 2)
        return (k, v) if start == 0 else (keys, values)  # an empty cache: k and v are all, and contiguous

    def advance(self, n_new: int) -> None:
        """Count `n_new` more tokens in every row."""
        self.lengths = [length + n_new for length in self.lengths]
        if self._whole:
            cache, row = self._whole
            cache.lengths[row] = self.lengths[0]

    def add_row(self) -> int:
        """Take the next slot into use, with length 0, and return its index."""
        if len(self.lengths) == self.keys.shape[1]:
            raise ValueError(f"all {len(self.lengths)} rows of the cache are in use")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def row(self, index: int) -> KVCache:
        """Row `index` from its beginning, as a cache of its own on the same memory.

        Prefill it while the other rows wait: what it advances by is the row's length here, too.
        """
        view = copy.copy(self)
        view.keys, view.values = self.keys[:, index : index + 1], self.values[:, index : index + 1]
        view.lengths, view._whole, view._step, view._seen = [0], (self, index), None, None
        self.lengths[index] = 0
        return view

    def cut(self, row: int, length: int) -> None:
        """Forget the tokens of `row` beyond the first `length`."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} has {self.lengths[row]} tokens and cannot be cut to {length}")
        self.lengths[row] = length

    def drop_row(self, row: int, damaged: bool = False) -> None:
        """Free the slot of `row`; the last row moves into the gap.

        damaged: clear the slot first. A NaN left there would reach the prompt that gets the slot
        next, although hidden: 0 * NaN is NaN.
        """
        last = len(self.lengths) - 1
        if damaged:
            self.keys[:, row].zero_()
            self.values[:, row].zero_()
        if row != last:
            self.copy_row(last, row, self.lengths[last])
        self.lengths.pop()

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` a copy of the first `length` tokens of row `source`."""
        for part in (self.keys, self.values):
            part[:, target, :, :length] = part[:, source, :, :length]
        self.lengths[target] = length

    def reserve(self, max_len: int) -> None:
        """Make room for `max_len` tokens per row, and keep the tokens there."""
        if max_len > self.max_len:
            more = max_len - self.max_len  # zeros after the last position
            self.values = F.pad(self.values, (0, 0, 0, more))
            if self.keys.is_cpu:
                self.keys = F.pad(self.keys.transpose(3, 4), (0, more)).transpose(3, 4)
            else:
                self.keys = F.pad(self.keys, (0, 0, 0, more))


class StaticCache(KVCache):
    """A KVCache on another's memory in which no Python number changes from step to step, for a CUDA graph.

    Every step computes all rows, in use or not, over all `max_len` positions. The mask hides the
    positions that a row does not hold. The new tokens' positions are read from `at` [B,T] on the
    device, which the caller moves on and checks: each must be below `max_len`.
    """

    def __init__(self, cache: KVCache, at: Tensor) -> None:
        self.keys, self.values, self.at = cache.keys, cache.values, at
        self.rows = torch.arange(len(at), device=at.device)[:, None]
        self.lengths = [0] * len(at)  # so many rows

    @property
    def start(self) -> None:
        """Rows may differ in length."""

    def positions(self, n_new: int) -> Tensor:
        """Positions of the new tokens of each row, [B,T]."""
        return self.at

    def visible(self, mask: Tensor, n_new: int) -> Tensor:
        """The rows of a causal mask for the new tokens, [B,1,T,max_len]."""
        return mask[self.at, : self.max_len].unsqueeze(1)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values, [B,H,T,D], and return the whole block's, [B,H,max_len,D]."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.at] = k.transpose(1, 2)  # indexed so, the target is [B,T,H,D]
        values[self.rows, :, self.at] = v.transpose(1, 2)
        return keys, values

    def advance(self, n_new: int) -> None:
        """Nothing: the caller moves `at`."""
