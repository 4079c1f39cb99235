"""The layers of model.py: torch.nn's, but for their speed on a CPU. products.py has the products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.network.products import Packed, learns, product_of

# GPT-2 was trained with the tanh approximation of GELU (https://arxiv.org/abs/1606.08415): configs call it gelu_new.
_gelu_new = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu_new": _gelu_new, "gelu_pytorch_tanh": _gelu_new}
ACTIVATIONS |= {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


class Linear(nn.Linear):
    """torch.nn.Linear, fast on a CPU: [...,in_features] -> [...,out_features]."""

    packed: Packed | None = None
    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return multiply(x, self.weight, self.bias, self.packed)


class Embedding(nn.Embedding):
    """torch.nn.Embedding that can be used backwards, too, as an output head: [...,E] -> [...,V]."""

    packed: Packed | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`."""
        if self.packed and self.weight.is_cpu and self.weight.dtype == torch.float32:
            self.packed.of(self.weight)  # now, for `logits`: the largest first, as memory holds it twice meanwhile
        return super().forward(ids)

    def logits(self, x: Tensor) -> Tensor:
        """x W^T."""
        return multiply(x, self.weight, None, self.packed)


class Dropout(nn.Dropout):
    """torch.nn.Dropout, but for its time in eval: 25 calls a token took 1 % of it."""

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes some of x in training."""
        return super().forward(x) if self.training else x


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed | None = None) -> Tensor:
    """x W^T + b, [...,in] -> [...,out], as fast as it goes."""
    if packed and learns(weight):
        packed.forget()
    records = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    if records or not (x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu):
        return F.linear(x, weight, bias)
    product = product_of(weight, packed)
    return product(x, bias) if x.dim() > 1 else product(x[None], bias)[0]


def taken(layer: Any) -> Callable[[Tensor], Tensor]:
    """The forward of a Linear or LayerNorm without the module, without gradients: right until its weight changes."""
    weight, bias = layer.weight, layer.bias
    if isinstance(layer, nn.LayerNorm):
        return lambda x: torch.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    product = product_of(weight, layer.packed)
    return lambda x: product(x, bias)
