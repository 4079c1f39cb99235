"""The formats of a matrix on the CPU, and their products: see products.py, which chooses."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.errors import CheckpointError


class Product:
    """A weight [out,in] in some format. Called with x [...,in], of two dimensions or more, and a bias [out] or None."""

    name = "PyTorch"  # for --stats
    release: Callable[[], None] | None = None  # gives back the memory of `weight`, for a product that may copy it later

    def __init__(self, weight: Tensor) -> None:
        self.weight: Any = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class Plain(Product):
    """What every PyTorch can do."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class OneDNN(Product):
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


class Float32(OneDNN):
    """oneDNN on a copy in its own order."""

    name = "oneDNN, packed"

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)


class Use:
    """Whether steps of 5 to 64 rows are so frequent that oneDNN's order pays: of a prompt, the head sees one."""

    ordered, steps = False, 0

    def count(self, rows: int) -> None:
        self.steps = min(max(self.steps + (1 if 4 < rows <= 64 else -1), 0), 48)
        self.ordered = self.steps > (0 if self.ordered else 12)  # a change takes as long as 40 steps save


class InParts(OneDNN):
    """For a CPU without AVX-512: up to 4 rows by parts of the weight, more by oneDNN, on a copy that lies (out, in).

    The parts are a batch, of which each thread takes some. One row reads 32 GB/s so, and 18 in oneDNN's order, where 8
    rows are 1.2 times as fast (Zen 3; to sum a tensor, 33). The copy stands in for the file's pages and, while many
    rows are frequent, oneDNN's for it: so the calls before a call decide how it rounds.
    """

    name = "PyTorch in parts, oneDNN"
    parts = 16  # enough for 16 threads; fewer are not faster

    def __init__(self, weight: Tensor) -> None:
        if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
            raise NotImplementedError("oneDNN in its own order is as fast for one row")
        super().__init__(weight.contiguous())
        self.stored, self.is_head = weight, weight.is_contiguous()  # the blocks' matrices lie (in, out) in the file
        self.ordered: Float32 | None = None
        self.use = Use()  # shared by the products of a model

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if self.is_head:
            self.use.count(rows)
        if self.use.ordered is (self.ordered is None):
            ordered = self.use.ordered
            self.weight, self.ordered = (None, Float32(self.weight)) if ordered else (self.stored.contiguous(), None)
            if self.release:
                self.release()
        if self.ordered:
            return self.ordered(x, bias)
        if not 0 < rows <= 4:
            return super().__call__(x, bias)
        N, K = self.weight.shape
        some, column = N - N % self.parts, x.reshape(rows, K).t()
        out = torch.bmm(self.weight[:some].view(self.parts, -1, K), column.expand(self.parts, K, rows)).view(some, rows)
        out = (out if some == N else torch.cat([out, self.weight[some:] @ column])).t().contiguous()  # (rows, N)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], N)


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
