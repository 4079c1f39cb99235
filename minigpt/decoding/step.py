"""One step of decoding: the logits after each row's new tokens, as fast as it goes.

A step of GPT-2 124M calls 200 modules, for which Python needs a tenth of its time, a seventh with int8 (Zen 5). `bound`
takes weights and products out of them once, and is made of model.py's functions: the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minigpt.decoding.cuda_rows import Slots
from minigpt.decoding.sequence import Drawn, Sequence
from minigpt.network import model as gpt2
from minigpt.network.cache import KVCache
from minigpt.network.linear import Dropout, Embedding, Linear, taken
from minigpt.network.products import learns, product_of

_LAYERS = [Linear, Linear, Dropout]
_BLOCK = [gpt2.Block, nn.LayerNorm, gpt2.MultiHeadAttention, *_LAYERS, nn.LayerNorm, gpt2.MLP, *_LAYERS]
_METHODS = {"_call_impl", "forward", "hidden", "head", "logits", "positions"}


class Steps:
    """The steps of one call, in inference mode: bound, or else by the modules. Not for several threads at once."""

    def __init__(self, model: gpt2.GPT2) -> None:
        self.model = model
        self.state: list[int] | None = None  # while it stays, `step` is right

    def look(self) -> bool:
        """Look at the model, before each step: whether the step is bound to it, and runs no hook."""
        if self.state is None or self.state != self._state():
            self._bind()
        return self.step is not None

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Token ids [B,T] -> logits [B,T,V], which the next step may overwrite; the cache moves on."""
        self.look()
        return self._logits(ids, cache)

    def feed(self, rows: list[Sequence], cache: KVCache, drafts: list[list[int]]) -> Iterable[Iterable[Drawn | Tensor]]:
        """Feed each row's last token and its draft, after `look`: the logits [B,T,V], or what CUDA graphs draw."""
        if isinstance(cache, Slots) and (drawn := cache.draw(self.step, rows)) is not None:
            return [[one] for one in drawn]
        ids = [[row.history[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
        T = max(map(len, ids))
        return self._logits(torch.tensor([one + [0] * (T - len(one)) for one in ids], device=cache.keys.device), cache)

    def _logits(self, ids: Tensor, cache: KVCache) -> Tensor:
        return self.step(ids, cache) if self.step else self.model.head(self.model.hidden(ids, cache))

    def _bind(self) -> None:
        each = ((at._parameters, at._buffers, at._modules) for at in self.model.modules())
        self.tables: list[Any] = [table for tables in each for table in tables if table]
        self.kept = [*chain.from_iterable(map(dict.values, self.tables))]  # so that nothing else gets their id
        self.weights = list(self.model.parameters())
        self.matrices = [weight for weight in self.weights if weight.dim() == 2]
        self.counted = [weight for weight in self.matrices if not weight.is_inference()]
        self.step = bound(self.model)
        self.state = self._state()

    def _state(self) -> list[int]:
        """Moves with every change of weights, layers and hooks that is counted: old matrices never meet new biases."""
        # A list: a sum stays where two weights change places. 50 us a step of GPT-2 124M (Zen 3), 0.1 to 0.3 % of it.
        objects, versions = chain.from_iterable(map(dict.values, self.tables)), [one._version for one in self.counted]
        addresses, learning = map(Tensor.data_ptr, self.weights), map(learns, self.matrices)
        return [RemovableHandle.next_id, *map(id, objects), *addresses, *versions, *learning]


def bound(model: gpt2.GPT2) -> Callable[[Tensor, KVCache], Tensor] | None:
    """(ids [B,T], cache) -> logits [B,T,V], with the weights as they are now. None for a model that is not plain."""
    if not _is_plain(model):
        return None
    output = product_of(model.output.weight, model.output.packed)  # the largest first: memory holds it twice meanwhile
    wte, wpe, mask, ln_f = model.wte.weight, model.wpe.weight, next(model.buffers()), taken(model.ln_f)
    blocks = [_block(block) for block in model.h]

    def step(ids: Tensor, cache: KVCache) -> Tensor:
        positions, visible = model.positions(ids, cache), gpt2.visible_keys(mask, ids.shape[1], cache)
        x = torch.embedding(wte, ids) + torch.embedding(wpe, positions)  # (B, T, E)
        for block in blocks:
            x = block(x, cache, visible)
        cache.advance(ids.shape[1])
        return output(ln_f(x), None)  # (B, T, E) -> (B, T, V)

    return step


def _is_plain(model: Any) -> bool:
    """Whether the model is as model.py makes it, in eval, of one dtype, without hooks and replaced methods."""
    modules = list(model.modules())
    ends = [nn.LayerNorm, *[Linear] * (not model.config.tie_word_embeddings)]
    kinds = [gpt2.GPT2, Embedding, nn.Embedding, Dropout, nn.ModuleList, *_BLOCK * len(model.h), *ends]
    changed = (at.training or at._compiled_call_impl or not vars(at).keys().isdisjoint(_METHODS) for at in modules)
    if [type(module) for module in modules] != kinds or gpt2.has_hooks(model) or any(changed):
        return False
    first = model.h[0].attn.mask  # `.to(device)` gives each block one of its own
    alike = (at is first or (at.is_cuda and torch.equal(at, first)) for at in (block.attn.mask for block in model.h))
    return len({(weight.device, weight.dtype) for weight in model.parameters()}) == 1 and all(alike)


def _block(block: Any) -> Callable[[Tensor, KVCache, Tensor | None], Tensor]:
    """`Block.forward`, [B,T,E] -> [B,T,E]."""
    attn, mlp, ln_1, ln_2 = block.attn, block.mlp, taken(block.ln_1), taken(block.ln_2)
    c_attn, W_O, c_fc, c_proj = map(taken, (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj))

    def forward(x: Tensor, cache: KVCache, visible: Tensor | None) -> Tensor:
        q, k, v = gpt2.split_heads(c_attn(ln_1(x)), attn.n_head)
        k, v = cache.update(block.layer, k, v)
        x = x + W_O(gpt2.join_heads(gpt2.attend(q, k, v, visible, attn.scale, upcast=attn.upcast)))
        return x + c_proj(mlp.activation(c_fc(ln_2(x))))

    return forward
