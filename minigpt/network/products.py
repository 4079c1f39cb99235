"""Matrix products on the CPU: every speed trick and every weight format is here, behind `Linear` and `Embedding`.

To generate a token, every weight is read once, so what counts is how fast a product reads. One row through GPT-2 124M's
blocks, on 2 cores of a Zen 5 server where summing a tensor reads 43 GB/s: F.linear 18 GB/s, oneDNN 35, oneDNN on a copy
in its own order 40. With 8 rows F.linear takes three times as long as oneDNN on such a copy, with 512 rows twice.

On the CPU, checkpoint.py gives each weight a `Packed`: a copy in one of these formats, made when it is first used.

    float32   oneDNN's order. The copy stands in for the mapped file, whose pages are given back: memory does not grow.
    float16   half the bytes; FBGEMM widens each weight as it reads it; activations and sums are float32.
    int8      a quarter; a scale for each output and, found as it comes, for each row of input, which stay independent.

The parameters stay as the checkpoint has them, in float32, to be looked at, saved and changed. A weight that learns
(it has requires_grad, or a gradient) is never packed: fused optimizers write into it and count nothing. Every other
write that PyTorch counts is seen at the next product, and the weight is packed again. Nobody counts a write through
`.data`, numpy or C into a weight that does not learn: `forget` is for those.

PyTorch does not promise these operators. Each is tried once; where one is missing or wrong, a slower way gives the same
numbers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.network import formats
from minigpt.network.formats import Plain, Product

IN_PLACE: tuple[type[Product], ...] = (formats.OneDNN, Plain)  # of a weight that is not packed
FORMATS: dict[torch.dtype, tuple[type[Product], ...]] = {  # the first that works here is used
    torch.float32: (formats.InParts, formats.Float32, Plain),
    torch.float16: (formats.Float16, formats.PlainFloat16),
    torch.int8: (formats.Int8, formats.Int8Narrow, formats.PlainInt8),
}


def chosen(formats: tuple[type[Product], ...]) -> type[Product]:
    """The first of them that works here."""
    return next(product for product in formats if works(product))  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def works(product: type[Product]) -> bool:
    """Whether this PyTorch has the operators of `product`, and this CPU computes the right numbers with them."""
    K, N = 64, 40
    weight = torch.arange(N * K, dtype=torch.float32, device="cpu").mul_(0.7).sin_().view(N, K)
    weight[0] = 1.0  # with a row of ones, the largest sum: what overflows does so here
    for rows in (1, 3):
        x = torch.arange(rows * K, dtype=torch.float32, device="cpu").cos_().view(rows, K)
        x[0] = 1.0
        try:
            out = product(weight)(x, weight[:, 0])
        except (AttributeError, RuntimeError):  # NotImplementedError is one
            return False
        if not torch.allclose(out, F.linear(x, weight, weight[:, 0]), rtol=0.02, atol=0.02 * K**0.5):
            return False
    return True


class Packed:
    """A weight in one of FORMATS, made at its first use and again when the weight has changed.

    Modules that share a weight may share its Packed. copy.copy gives another of the same format, for another weight.
    stored: the same weight in memory of its own, which `release` gives back once it is packed.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        stored: Tensor | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.dtype, self.use = dtype, formats.Use()
        self._made: tuple[object, Tensor | None, Product | None] = (None, None, None)
        self._stored = None if weight is None else (_state(weight), stored, release)

    def __reduce__(self) -> Any:
        return Packed, (self.dtype,)  # for copy and pickle: packed memory cannot be copied, but made again

    def beside(self, dtype: torch.dtype) -> Packed:
        """The same weight in another format."""
        other = Packed(dtype)
        other._stored = self._stored
        return other

    def of(self, weight: Tensor) -> Product:
        """The product with this weight."""
        if learns(weight):
            self.forget()
            return chosen(IN_PLACE)(weight)
        state, _, product = self._made
        if product is None or state != _state(weight):
            product = self._pack(weight)
        return product

    def forget(self) -> None:
        """Drop the packed copy, and the stored weight too: whoever asks may have written into the weight."""
        self._made, self._stored = (None, None, None), None

    def _pack(self, weight: Tensor) -> Product:
        state, (known, stored, release) = _state(weight), self._stored or (None, None, None)
        product = chosen(FORMATS[self.dtype])(stored if stored is not None and known == state else weight.detach())
        # The weight is kept as well, so that no other can come to lie at its address.
        self._made, self._stored = (state, weight.detach(), product), None
        if isinstance(product, formats.InParts):
            product.release, product.use = release, self.use
        if release:
            release()
        return product


def learns(weight: Tensor) -> bool:
    """Whether an optimizer may write into the weight: some step wherever a gradient is, requires_grad or not."""
    return weight.requires_grad or weight.grad is not None


def _state(weight: Tensor) -> tuple[int, int]:
    """Changes whenever the weight does, as far as PyTorch counts."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def product_of(weight: Tensor, packed: Packed | None) -> Product:
    """The fastest product with this weight, right until the weight changes."""
    if not weight.is_cpu or weight.dtype != torch.float32:
        return Plain(weight)
    return packed.of(weight) if packed else chosen(IN_PLACE)(weight)


def format_name(layer: Any) -> str:
    """How the products of a Linear or Embedding are made, for --stats."""
    weight, packed = layer.weight, layer.packed
    if not weight.is_cpu or weight.dtype != torch.float32:
        return Plain.name
    return chosen(FORMATS[packed.dtype] if packed and not learns(weight) else IN_PLACE).name


def forget(model: nn.Module) -> None:
    """Say that the model's weights may have changed in a way that PyTorch does not count.

    Every packed copy is dropped, and counting the change makes bound steps and CUDA graphs look again.
    """
    for module in model.modules():
        packed = getattr(module, "packed", None)
        if isinstance(packed, Packed):
            packed.forget()
    for weight in model.parameters():
        if not weight.is_inference():
            torch.autograd.graph.increment_version(weight)


def sharing(module: Any) -> Any:
    """A copy of the module and of those in it, with the same tensors, products and hooks.

    Raises ValueError where a method was replaced: it may be bound to the original, and so to its weights.
    """
    replaced = [name for name in vars(module) if callable(getattr(type(module), name, None))]
    if replaced:
        raise ValueError(f"{type(module).__name__}.{replaced[0]} was replaced")
    shared = copy.copy(module)
    vars(shared).update({name: value.copy() for name, value in vars(module).items() if isinstance(value, dict)})
    for name, child in module.named_children():
        shared.add_module(name, sharing(child))
    return shared
