"""Decoding on a CPU: the operators of a step, and nothing between them.

A step of GPT-2 124M calls 200 modules. As its weights drive everything else out of the CPU's caches, Python needs a
tenth of the step's time for that, a seventh with int8 (Zen 5). So what model.py says of attention and MLP is said here
once more, for one token per row; the tests compare the two bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.cache import KVCache
from minigpt.linear import Dropout, Embedding, Linear
from minigpt.model import GPT2, MLP, Block, MultiHeadAttention

# What a model consists of, and what it would be changed by.
_KNOWN = {GPT2, nn.ModuleList, Block, MultiHeadAttention, MLP, nn.LayerNorm, Linear, Embedding, nn.Embedding, Dropout}
_METHODS = {"forward", "hidden", "head"}


def untouched(model: GPT2) -> bool:
    """Whether `model` computes what model.py says, in eval: no hooks, no modules or methods of anybody else's."""
    everywhere = vars(nn.modules.module)
    return not (everywhere["_global_forward_hooks"] or everywhere["_global_forward_pre_hooks"]) and not any(
        module.training
        or module._forward_hooks
        or module._forward_pre_hooks
        or type(module) not in _KNOWN
        or _METHODS & vars(module).keys()
        for module in model.modules()
    )


def flat_step(model: GPT2, heads: Collection[tuple[int, int]]) -> FlatStep | None:
    """A FlatStep, where it does what `model` with `heads` switched off does."""
    plain = all(weight.is_cpu and weight.dtype == torch.float32 for weight in model.parameters())
    return FlatStep(model) if plain and not heads and untouched(model) else None


class FlatStep:
    """The next token of each row: what `GPT2.hidden` and `GPT2.head` do in an untouched float32 model on a CPU.

    What is done to the model later, other than changing weights in place, is not seen: make one for each generation.
    """

    def __init__(self, model: GPT2) -> None:
        self.model = model
        self.blocks = [_flat(block) for block in model.h]
        self.ln_f = _norm(model.ln_f)

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Token ids [B,1] -> logits [B,V]; the cache moves on."""
        model, positions = self.model, cache.positions(1)
        x = model.wte(ids) + F.embedding(positions, model.wpe.weight)  # (B, 1, E)
        hidden = None
        if cache.start is None:  # rows of different lengths: what lies beyond each is padding, (B, 1, 1, S)
            hidden = torch.arange(max(cache.lengths) + 1, device=ids.device) > positions[:, :, None, None]
        for block in self.blocks:
            x = block(x, cache, hidden)
        cache.advance(1)
        logits: Tensor = model.head(self.ln_f(x)[:, -1])
        return logits


def _flat(block: Any) -> Callable[[Tensor, KVCache, Tensor | None], Tensor]:
    """`Block.forward`, [B,1,E] -> [B,1,E]."""
    attn, mlp = block.attn, block.mlp
    ln_1, ln_2 = _norm(block.ln_1), _norm(block.ln_2)
    c_attn, W_O, c_fc, c_proj = map(_product, (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj))
    layer, activation, H, D, scale = block.layer, mlp.activation, attn.n_head, attn.head_dim, attn.scale

    def forward(x: Tensor, cache: KVCache, hidden: Tensor | None) -> Tensor:
        B = len(x)
        q, k, v = c_attn(ln_1(x)).view(B, 1, 3 * H, D).transpose(1, 2).split(H, dim=1)
        k, v = cache.update(layer, k, v)
        scores = q @ k.transpose(-2, -1) * scale  # (B, H, 1, D) @ (B, H, D, S) -> (B, H, 1, S)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        heads = scores.softmax(-1) @ v  # (B, H, 1, S) @ (B, H, S, D) -> (B, H, 1, D)
        x = x + W_O(heads.transpose(1, 2).reshape(B, 1, H * D))
        out: Tensor = x + c_proj(activation(c_fc(ln_2(x))))
        return out

    return forward


def _norm(layer: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    shape, weight, bias, eps = layer.normalized_shape, layer.weight, layer.bias, layer.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _product(layer: Linear) -> Callable[[Tensor], Any]:
    packed, weight, bias = layer.packed, layer.weight, layer.bias
    if packed is None:
        return layer.forward
    return lambda x: packed.of(weight)(x, bias)
