"""A weight file as memory: tensors that are the file itself, and whose pages are given back once they are copied."""

from __future__ import annotations

import ctypes
import math
import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.files.names import TRANSPOSED
from minigpt.network.products import Packed

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # any float format


class Stored(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    end: int


class Mapping:
    """A weight file as memory, which the system fills from the file when it is first read, page by page.

    Writes to it are private to this process. The file may be deleted meanwhile, but not be changed in place: where it
    is made shorter, the system ends the process (SIGBUS), and Python has no way to meet that. The official files are
    not aligned to 4 bytes; measured on x86, that costs nothing.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, item: Stored) -> Tensor:
        """The tensor as it lies in the file. It keeps the mapping alive."""
        count = math.prod(item.shape)
        return torch.frombuffer(self.memory, dtype=DTYPES[item.dtype], count=count, offset=item.start).view(item.shape)

    def read(self, name: str, item: Stored, device: str | torch.device, dtype: torch.dtype) -> Tensor:
        """The tensor as the model wants it. In the stored dtype on the CPU, that is the file itself, nothing copied."""
        stored = self.tensor(item)
        # Vectors are copied: reading one from the file would keep megabytes of what lies around it in memory.
        tensor = stored.to(device, dtype, copy=stored.dim() == 1)
        if tensor is not stored:
            self.release(item)
        return _turned(name, tensor)

    def packed(self, dtype: torch.dtype, name: str, item: Stored, weight: Tensor) -> Packed:
        """`weight`, which is this tensor, to be packed from here; then its pages can go, and the copies made for it."""

        def release() -> None:
            self.release(item)
            # The copies leave gaps in the heap, a quarter of the weights in all: glibc gives back what it is asked for.
            if trim := getattr(ctypes.pythonapi, "malloc_trim", None):
                trim(0)

        return Packed(dtype, weight, _turned(name, self.tensor(item)), release)

    def release(self, item: Stored | None = None) -> None:
        """Give back the memory of a tensor, or of all, that nobody wrote to: the file still has it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start, end = (item.start - item.start % mmap.PAGESIZE, item.end) if item else (0, len(self.memory))
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def _turned(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if name.endswith(TRANSPOSED) else tensor
