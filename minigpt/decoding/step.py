"""One step of decoding: the logits after each row's new tokens, as fast as it goes.

A step of GPT-2 124M calls 200 modules. As its weights drive everything else out of the CPU's caches, Python needs a
tenth of the step's time for that, a seventh with int8 (Zen 5). `bound` takes weights and products out of the modules
once, and is made of the same functions as model.py: the tests compare the two bit for bit. Where anybody has changed
what the model does, its own modules are called.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minigpt.decoding.cuda_graph import Graph
from minigpt.network.cache import KVCache
from minigpt.network.linear import Dropout, Embedding, Linear
from minigpt.network.model import (
    GPT2,
    MLP,
    Block,
    MultiHeadAttention,
    attend,
    has_hooks,
    join_heads,
    split_heads,
    visible_keys,
)
from minigpt.network.products import learns, product_of

_BLOCK = [Block, nn.LayerNorm, MultiHeadAttention, Linear, Linear, Dropout, nn.LayerNorm, MLP, Linear, Linear, Dropout]
_METHODS = {"_call_impl", "forward", "hidden", "head", "logits", "positions"}

Bound = Callable[[Tensor, KVCache], Tensor]


class Steps:
    """The steps of one call: token ids [B,T] -> logits [B,T,V], and the cache moves on. Within inference mode.

    On CUDA by a graph, where that pays; else by the bound step; else by the modules. The next call may overwrite the
    logits. Not for several threads at once.
    """

    def __init__(self, model: GPT2) -> None:
        self.model = model
        self.tables: list[Any] = []  # of the modules: the dicts that hold parameters, buffers and modules
        self.known: list[Any] | None = None
        self.graph = Graph()

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        """The logits after each of the new tokens."""
        if self._changed():
            self._bind()
        if self.step is None:
            logits: Tensor = self.model(ids, cache)
            return logits
        replayed = self.graph(self.step, ids, cache)
        return self.step(ids, cache) if replayed is None else replayed

    def _bind(self) -> None:
        modules = list(self.model.modules())
        self.tables = [table for at in modules for table in (at._parameters, at._buffers, at._modules) if table]
        self.known = [value for table in self.tables for value in table.values()]
        self.weights = list(self.model.parameters())
        self.matrices = [weight for weight in self.weights if weight.dim() == 2]
        self.counted = [weight for weight in self.matrices if not weight.is_inference()]
        self.step = bound(self.model)
        self.state = self._state()
        self.graph.forget()

    def _changed(self) -> bool:
        """Whether anybody gave the model other weights, layers or hooks: old matrices must not meet new biases.

        40 us a step of GPT-2 124M (Zen 3, one core), 0.1 to 0.4 % of it. Products look no more at each weight, which
        took as long.
        """
        now = [value for table in self.tables for value in table.values()]
        known = self.known
        if known is None or len(now) != len(known) or any(map(is_not, now, known)):
            return True
        return self.state != self._state()

    def _state(self) -> list[int]:
        """Moves with every write that PyTorch counts. A list: a sum stays as it was where two weights change places."""
        addresses = map(Tensor.data_ptr, self.weights)
        versions = [weight._version for weight in self.counted]
        return [RemovableHandle.next_id, *addresses, *versions, *map(learns, self.matrices)]


def bound(model: GPT2) -> Bound | None:
    """`model(ids, cache)` with its weights and products as they are now: right until one changes. Without gradients.

    None if the model is not what model.py makes, or has hooks.
    """
    if not _is_plain(model):
        return None
    output = product_of(model.output.weight, model.output.packed)  # the largest first: until it is packed, memory
    wte, wpe, mask = model.wte.weight, model.wpe.weight, model.h[0].attn.mask  # holds it twice
    blocks, ln_f = [_block(block) for block in model.h], _norm(model.ln_f)

    def step(ids: Tensor, cache: KVCache) -> Tensor:
        positions, visible = model.positions(ids, cache), visible_keys(mask, ids.shape[1], cache)
        x = torch.embedding(wte, ids) + torch.embedding(wpe, positions)  # (B, T, E)
        for block in blocks:
            x = block(x, cache, visible)
        cache.advance(ids.shape[1])
        return output(ln_f(x), None)

    return step


def _is_plain(model: Any) -> bool:
    """Whether these are the modules of model.py, in eval, with the methods and the mask that they had."""
    modules = list(model.modules())
    ends: list[type] = [nn.LayerNorm] if model.config.tie_word_embeddings else [nn.LayerNorm, Linear]
    kinds = [GPT2, Embedding, nn.Embedding, Dropout, nn.ModuleList, *_BLOCK * len(model.h), *ends]
    if [type(module) for module in modules] != kinds or has_hooks(model):
        return False
    if any(at.training or at._compiled_call_impl or not vars(at).keys().isdisjoint(_METHODS) for at in modules):
        return False
    masks = [block.attn.mask for block in model.h]
    if len(masks[0]) != model.config.n_positions or any(mask is not masks[0] for mask in masks):
        return False
    return len({(weight.device, weight.dtype) for weight in model.parameters()}) == 1


def _block(block: Any) -> Callable[[Tensor, KVCache, Tensor | None], Tensor]:
    """`Block.forward`, [B,T,E] -> [B,T,E]."""
    attn, mlp = block.attn, block.mlp
    ln_1, ln_2 = _norm(block.ln_1), _norm(block.ln_2)
    c_attn, W_O, c_fc, c_proj = map(_product, (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj))

    def forward(x: Tensor, cache: KVCache, visible: Tensor | None) -> Tensor:
        q, k, v = split_heads(c_attn(ln_1(x)), attn.n_head)
        k, v = cache.update(block.layer, k, v)
        x = x + W_O(join_heads(attend(q, k, v, visible, attn.scale, upcast=attn.upcast)))
        return x + c_proj(mlp.activation(c_fc(ln_2(x))))

    return forward


def _norm(layer: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight, layer.bias
    return lambda x: torch.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _product(layer: Linear) -> Callable[[Tensor], Tensor]:
    product, bias = product_of(layer.weight, layer.packed), layer.bias
    return lambda x: product(x, bias)
