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

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.errors import CheckpointError


class Product:
    """A weight [out,in] in some format. Called with x [...,in], of two dimensions or more, and a bias [out] or None."""

    name = "PyTorch"  # for --stats

    def __init__(self, weight: Tensor) -> None:
        self.weight: Any = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class Plain(Product):
    """What every PyTorch can do."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class Unpacked(Product):
    """oneDNN on the weight as it is, (in, out) or (out, in) in memory.

    oneDNN compiles code for every number of rows that it meets and keeps it, 0.65 MB each, so that reading texts of all
    lengths would cost gigabytes. Only some numbers are used therefore: 1 to 8, then four for each power of two.
    """

    name = "oneDNN"
    most = 512

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise.default
        bias = None if bias is None else bias.contiguous()  # it takes another for contiguous
        rows = x.numel() // x.shape[-1]
        if rows <= 8 or rows == self._size(rows):
            whole: Tensor = multiply(x, self.weight, bias, "none", [], "")
            return whole
        out = x.new_empty(*x.shape[:-1], self.weight.shape[0])
        inputs, outputs = (torch.split(rows_of, self.most) for rows_of in (x.flatten(0, -2), out.flatten(0, -2)))
        for part, result in zip(inputs, outputs, strict=True):
            padded = F.pad(part, (0, 0, 0, self._size(len(part)) - len(part)))
            result.copy_(multiply(padded, self.weight, bias, "none", [], "")[: len(part)])
        return out

    def _size(self, rows: int) -> int:
        step = 1 << max(min(rows, self.most).bit_length() - 3, 0)
        return min(-(-rows // step) * step, self.most)


class Float32(Unpacked):
    """oneDNN on a copy in its own order."""

    name = "oneDNN, packed"

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)


class Float16(Product):
    """float16 weights, float32 activations."""

    name = "FBGEMM, float16 weights"

    def __init__(self, weight: Tensor) -> None:
        low, high = weight.aminmax()
        if not float(torch.maximum(-low, high)) <= torch.finfo(torch.float16).max:
            raise CheckpointError("a weight is not a number, or too large for float16: use float32")
        self._keep(weight.contiguous())

    def _keep(self, weight: Tensor) -> None:
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.weight)
        return out if bias is None else out.add_(bias)


class PlainFloat16(Float16):
    name = "PyTorch, float16 weights"

    def _keep(self, weight: Tensor) -> None:
        self.weight = weight.half()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight.float(), bias)


# torch.quantize_per_channel, but for its warning that quantized tensors will go (without them, PlainInt8 takes over).
# A warning from C++ belongs to the module of the function that called, and Python gives none for one without a name.
# Filters stay as they are: they are the whole process's, and threads that change and restore them lose some.
_quantize: Any = types.FunctionType(
    (lambda *args: torch.quantize_per_channel(*args)).__code__, {"__name__": None, "torch": torch}
)


class Int8(Product):
    """8-bit weights and activations, summed exactly: W = scale * Q with Q in -127..127, a scale for each output.

    An input row is divided by its largest magnitude, so that one fixed scale fits all rows and none depends on another.
    """

    name = "FBGEMM, int8"
    levels = 127  # of an activation, on either side of 0

    def __init__(self, weight: Tensor) -> None:
        scale = weight.abs().amax(1).clamp_min(1e-30) / 127
        self._keep(weight.contiguous(), scale)

    def _keep(self, weight: Tensor, scale: Tensor) -> None:
        zeros = torch.zeros_like(scale, dtype=torch.long)
        with torch._C.DisableTorchFunction():  # set_default_device calls it from torch
            quantized = _quantize(weight, scale.double(), zeros, 0, torch.qint8)
        self.weight = torch.ops.quantized.linear_prepack(quantized, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        size = x.abs().amax(-1, keepdim=True).clamp_min_(1e-30)
        out = self._multiply(x / size)
        return out.mul_(size) if bias is None else torch.addcmul(bias, out, size)

    def _multiply(self, x: Tensor) -> Tensor:
        """x W^T for -1 <= x <= 1."""
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        out: Tensor = multiply(x, 1 / self.levels, self.levels + 1, self.weight)
        return out


class Int8Narrow(Int8):
    """With 7-bit activations: CPUs without VNNI add pairs of products in 16 bits, where those of 8 bits overflow."""

    name = "FBGEMM, int8 with 7-bit activations"
    levels = 63


class PlainInt8(Int8):
    name = "PyTorch, int8"

    def _keep(self, weight: Tensor, scale: Tensor) -> None:
        self.scale = scale
        self.weight = (weight / scale[:, None]).round().to(torch.int8)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear((x * self.levels).round(), self.weight.float()) * (self.scale / self.levels)


IN_PLACE: tuple[type[Product], ...] = (Unpacked, Plain)  # of a weight that is not packed


FORMATS: dict[torch.dtype, tuple[type[Product], ...]] = {  # the first that works here is used
    torch.float32: (Float32, Plain),
    torch.float16: (Float16, PlainFloat16),
    torch.int8: (Int8, Int8Narrow, PlainInt8),
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
        self.dtype = dtype
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
