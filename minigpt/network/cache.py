"""The key/value cache: the keys and values of the tokens already seen. An argument of calls, never a module's state."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from minigpt.errors import PromptError
from minigpt.network.config import GPT2Config


class KVCache:
    """Preallocated keys and values of every block, [L,B,H,S,D], with one length per row.

    Each step writes at each row's own length. Beyond it is padding, which the causal mask hides.
    lengths: the tokens of each row in use (only read it).    rows: how many are in use at first.
    max_len: the tokens that a row can hold, by default n_positions.    device, dtype: the model's.
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
        self.keys, self.values = (torch.zeros(shape, device=device or "cpu", dtype=dtype) for _ in range(2))
        if self.keys.is_cpu:  # [L,B,H,D,S] in memory: one query times all keys is up to 1.4 x faster (Zen 5)
            self.keys = self.keys.view(*shape[:3], head_dim, shape[3]).transpose(3, 4)
        self.lengths = [0] * (batch_size if rows is None else rows)
        self._whole: tuple[KVCache, int] | None = None  # the cache and row that this is a view of
        self._step: tuple[tuple[int, ...], Tensor, Tensor] | None = None  # T and lengths, rows [B,1], positions [B,T]
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None  # positions, mask, and what is visible by them

    @property
    def max_len(self) -> int:
        return self.keys.shape[3]

    @property
    def start(self) -> int | None:
        """The length that all rows share, or None where they differ."""
        return self.lengths[0] if self.lengths.count(self.lengths[0]) == len(self.lengths) else None

    def indices(self, n_new: int) -> tuple[Tensor, Tensor]:
        """Rows [B,1] and positions [B,T] of the next `n_new` tokens of each row: made once a step, not once a block."""
        step = (n_new, *self.lengths)
        if self._step is None or self._step[0] != step:
            rows = torch.tensor([[*range(len(self.lengths))], self.lengths], device=self.keys.device)[..., None]
            self._step = step, rows[0], rows[1] + torch.arange(n_new, device=self.keys.device)
        return self._step[1:]

    def stop(self, n_new: int) -> int:
        """The S of a step: the length of the longest row after it. Raises PromptError if no row can be so long."""
        if (stop := max(self.lengths) + n_new) > self.max_len:
            raise PromptError(f"{stop} tokens do not fit a cache made for {self.max_len}")
        return stop

    def visible(self, mask: Tensor, n_new: int) -> Tensor:
        """The keys that the new tokens of rows of any length may see, by a causal mask: [B,1,T,S]. Once a step, too."""
        _, positions = self.indices(n_new)
        if self._seen is None or self._seen[0] is not positions or self._seen[1] is not mask:
            self._seen = positions, mask, mask[positions, : self.stop(n_new)].unsqueeze(1)
        return self._seen[2]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values, [B,H,T,D], and return all of that block's, [B,H,S,D]."""
        rows, start, stop = len(self.lengths), self.start, self.stop(k.shape[2])
        keys, values = self.keys[layer, :rows, :, :stop], self.values[layer, :rows, :, :stop]
        if start is not None:
            keys[:, :, start:].copy_(k)
            values[:, :, start:].copy_(v)
        else:
            row, position = self.indices(k.shape[2])
            keys[row, :, position] = k.transpose(1, 2)  # indexed so, the target is [B,T,H,D]
            values[row, :, position] = v.transpose(1, 2)
        return (k, v) if start == 0 else (keys, values)  # in an empty cache, k and v are all there is, and contiguous

    def advance(self, n_new: int) -> None:
        """Count `n_new` more tokens in every row, once every block has written them."""
        self.lengths = [length + n_new for length in self.lengths]
        if self._whole:
            self._whole[0].lengths[self._whole[1]] = self.lengths[0]

    def add_row(self) -> int:
        """Take the next slot into use, with length 0, and return its index."""
        if len(self.lengths) == self.keys.shape[1]:
            raise ValueError(f"all {len(self.lengths)} rows of the cache are in use")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def row(self, index: int, length: int = 0) -> KVCache:
        """Row `index` cut to `length` tokens, to fill it while others wait: a cache in the same memory."""
        view = copy.copy(self)
        view.keys, view.values = self.keys[:, index : index + 1], self.values[:, index : index + 1]
        view._whole, view.lengths, self.lengths[index] = (self, index), [length], length
        return view

    def cut(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} has {self.lengths[row]} tokens and cannot be cut to {length}")
        self.lengths[row] = length

    def drop_row(self, row: int, damaged: bool = False) -> None:
        """Free the slot of a row; the last row moves into the gap."""
        last = len(self.lengths) - 1
        if damaged:  # a NaN would reach whatever gets the slot next, although hidden: 0 * NaN is NaN
            self.keys[:, row] = self.values[:, row] = 0
        if row != last:
            self.copy_row(last, row, self.lengths[last])
        self.lengths.pop()

    def copy_row(self, source: int, target: int, length: int, shared: int = 0) -> None:
        """Make row `target` a copy of the first `length` tokens of row `source`; `shared` of them are there already."""
        for part in (self.keys, self.values):
            part[:, target, :, shared:length] = part[:, source, :, shared:length]
        self.lengths[target] = length

    def reserve(self, max_len: int, rows: int = 0) -> None:
        """Make room for `max_len` tokens per row, and for so many rows: zeros after the last ones."""
        longer, more = max(max_len - self.max_len, 0), max(rows - self.keys.shape[1], 0)
        if longer or more:
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, longer, 0, 0, 0, more))
            keys = torch.nn.functional.pad(self.keys.transpose(3, 4), (0, longer, 0, 0, 0, 0, 0, more)).transpose(3, 4)
            self.keys = keys if keys.is_cpu else keys.contiguous()
