"""Decoding on a CPU: the operators of a step, and nothing between them.

A step of GPT-2 124M calls 200 modules. As its weights drive everything else out of the CPU's caches, Python needs a
tenth of the step's time for that, a seventh with int8 (Zen 5). So what model.py says of attention and MLP is said here
once more, for one token per row; the tests compare the two bit for bit. Where anybody has changed what the model does,
its own modules are called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minigpt.network.cache import KVCache
from minigpt.network.linear import Dropout, Embedding, Linear
from minigpt.network.model import GPT2, MLP, Block, MultiHeadAttention, has_hooks

_BLOCK = [Block, nn.LayerNorm, MultiHeadAttention, Linear, Linear, Dropout, nn.LayerNorm, MLP, Linear, Linear, Dropout]


_CLASSES = {*_BLOCK, GPT2, Embedding, nn.Embedding, nn.ModuleList}


_CALLED = ("__call__", "_call_impl", "__getattr__", "forward", "hidden", "head", "logits", "written_out")


_USED = (*_CALLED, "_project", "_visible", "_weights", "_join")


def _methods() -> list[Any]:
    return [getattr(kind, name, None) for kind in _CLASSES for name in _USED]


_METHODS = _methods()  # as they are before anybody can replace one


class FlatStep:
    """The next token of each row: what `GPT2.hidden` and `GPT2.head` do, as long as they do what model.py says.

    Before each step it looks for other weights, layers and hooks; for replaced methods, at the first step and whenever
    it finds any of these. A model that does not fit, or no longer, takes its own steps from then on.
    """

    def __init__(self, heads: Collection[tuple[int, int]]) -> None:
        self.heads = heads
        self.model: GPT2 | None = None
        self.blocks: list[Callable[[Tensor, KVCache, Tensor | None], Tensor]] | None = None

    def __call__(self, model: GPT2, ids: Tensor, cache: KVCache) -> Tensor | None:
        """Token ids [B,1] -> logits [B,V], and the cache moves on; or None, and nothing has happened."""
        if self.heads or not ids.is_cpu:
            return None
        if model is not self.model or (self.blocks is not None and self._changed()):
            self._look_at(model)
        if self.blocks is None:
            return None
        positions = cache.positions(1)
        x = model.wte(ids) + model.wpe(positions)  # (B, 1, E)
        masked = None
        if cache.start is None:  # rows of different lengths: what lies beyond each is padding, (B, 1, 1, S)
            masked = ~self.mask[positions, : max(cache.lengths) + 1].unsqueeze(1)
        for block in self.blocks:
            x = block(x, cache, masked)
        cache.advance(1)
        logits: Tensor = model.head(model.ln_f(x)[:, -1])
        return logits

    def _changed(self) -> bool:
        now = [value for part in self.parts for value in part.values()]
        return (
            len(now) != len(self.known) or any(map(is_not, now, self.known)) or self.handles != RemovableHandle.next_id
        )

    def _look_at(self, model: Any) -> None:
        modules = list(model.modules())
        self.model = model
        self.parts = [part for at in modules for part in (at._parameters, at._buffers, at._modules) if part]
        self.known = [value for part in self.parts for value in part.values()]
        self.handles = RemovableHandle.next_id  # so many hooks were ever registered
        self.blocks = None
        if _is_plain(model, modules):
            self.mask: Tensor = model.h[0].attn.mask
            self.blocks = [_flat(block) for block in model.h]


def _is_plain(model: Any, modules: list[nn.Module]) -> bool:
    """Whether these are the modules of model.py, in eval, in float32 on a CPU, with the methods and masks they had."""
    ends: list[type] = [nn.LayerNorm] if model.config.tie_word_embeddings else [nn.LayerNorm, Linear]
    kinds = [GPT2, Embedding, nn.Embedding, Dropout, nn.ModuleList, *_BLOCK * len(model.h), *ends]
    if [type(module) for module in modules] != kinds:
        return False
    if any(map(is_not, _methods(), _METHODS)):
        return False
    if has_hooks(model):
        return False
    if any(
        module.training or module._compiled_call_impl or not vars(module).keys().isdisjoint(_USED) for module in modules
    ):
        return False
    masks = [block.attn.mask for block in model.h]
    if len(masks[0]) != model.config.n_positions or any(mask is not masks[0] for mask in masks):
        return False
    return all(weight.is_cpu and weight.dtype == torch.float32 for weight in model.parameters())


def _flat(block: Any) -> Callable[[Tensor, KVCache, Tensor | None], Tensor]:
    """`Block.forward`, [B,1,E] -> [B,1,E]."""
    attn, mlp = block.attn, block.mlp
    ln_1, ln_2 = _norm(block.ln_1), _norm(block.ln_2)
    c_attn, W_O, c_fc, c_proj = map(_product, (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj))

    def forward(x: Tensor, cache: KVCache, masked: Tensor | None) -> Tensor:
        B, H, D = len(x), attn.n_head, attn.head_dim
        q, k, v = c_attn(ln_1(x)).view(B, 1, 3 * H, D).transpose(1, 2).split(H, dim=1)
        k, v = cache.update(block.layer, k, v)
        scores = q @ k.transpose(-2, -1) * attn.scale  # (B, H, 1, D) @ (B, H, D, S) -> (B, H, 1, S)
        if masked is not None:
            scores = scores.masked_fill(masked, float("-inf"))
        heads = scores.softmax(-1) @ v  # (B, H, 1, S) @ (B, H, S, D) -> (B, H, 1, D)
        x = x + W_O(heads.transpose(1, 2).reshape(B, 1, H * D))
        out: Tensor = x + c_proj(mlp.activation(c_fc(ln_2(x))))
        return out

    return forward


def _norm(layer: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight, layer.bias
    return lambda x: torch.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _product(layer: Linear) -> Callable[[Tensor], Any]:
    weight, bias = layer.weight, layer.bias
    return lambda x: layer.packed.of(weight)(x, bias) if layer.packed else layer.forward(x)


class Steps:
    """Logits [B,T,V] of the next tokens [B,T]."""

    def __init__(self, model: GPT2) -> None:
        self.model, self.flat = model, FlatStep(())

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        if ids.shape[1] == 1 and (logits := self.flat(self.model, ids, cache)) is not None:
            return logits[:, None]
        return self.model(ids, cache)
