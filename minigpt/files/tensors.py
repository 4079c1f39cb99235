"""The tensors of a weight file: their names and shapes, and the file as memory, whose pages go back once copied."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.network.config import GPT2Config
from minigpt.network.products import Packed

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # any float format

# OpenAI's Conv1D keeps its weight as (in, out), torch's Linear as (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Wrappers put names before those of the body: torch.compile, DataParallel, transformers, PEFT, TRL.
_PREFIX = re.compile(r"^(module\.|transformer\.|base_model\.model\.|pretrained_model\.)+")
MASK = re.compile(r"\.attn\.(masked_)?bias$")  # a causal mask, which older files hold; not attn.c_attn.bias
OTHER_HEAD = re.compile(r"^(score|classifier|multiple_choice_head|qa_outputs|v_head)\.")  # a head for another task


def plain(stored: str) -> str:
    """A stored tensor's name without the prefixes of wrappers."""
    return _PREFIX.sub("", stored.replace("_orig_mod.", ""))


def shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the official layout with its shape, (in, out) for the weights in TRANSPOSED."""
    E, inner = config.n_embd, config.inner_dim
    block: dict[str, tuple[int, ...]] = {"ln_1": (E,), "attn.c_attn": (E, 3 * E), "attn.c_proj": (E, E)}
    block |= {"ln_2": (E,), "mlp.c_fc": (E, inner), "mlp.c_proj": (inner, E)}
    found: dict[str, tuple[int, ...]] = {"wte.weight": (config.vocab_size, E), "wpe.weight": (config.n_positions, E)}
    for layer in range(config.n_layer):
        for name, shape in block.items():
            found |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[-1:]}
    head = {} if config.tie_word_embeddings else {"lm_head.weight": found["wte.weight"]}
    return {**found, "ln_f.weight": (E,), "ln_f.bias": (E,), **head}


def parameter_counts(config: GPT2Config) -> dict[str, int]:
    """How many parameters each component has: embeddings, attention, MLP, norms, head (0 where it is tied)."""
    counts = dict.fromkeys(("embeddings", "attention", "MLP", "norms", "head"), 0)
    kinds = {"wte": "embeddings", "wpe": "embeddings", "attn": "attention", "mlp": "MLP", "lm_head": "head"}
    for name, shape in shapes(replace(config, n_layer=1)).items():  # of one block: n_layer is not proven yet
        in_block = name.startswith("h.")
        kind = kinds.get(name.split(".")[2 if in_block else 0], "norms")
        counts[kind] += math.prod(shape) * (config.n_layer if in_block else 1)
    return counts


class Stored(NamedTuple):
    """Where one tensor lies."""

    name: str  # the plain one
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
        """The tensor in the file's memory, turned to (out, in) where it is stored as (in, out). It keeps that alive."""
        count = math.prod(item.shape)
        stored = torch.frombuffer(self.memory, dtype=DTYPES[item.dtype], count=count, offset=item.start)
        return stored.view(item.shape).t() if item.name.endswith(TRANSPOSED) else stored.view(item.shape)

    def read(self, item: Stored, device: str | torch.device, dtype: torch.dtype) -> Tensor:
        """The tensor as the model wants it. In the stored dtype on the CPU, that is the file itself, nothing copied."""
        stored = self.tensor(item)
        # Vectors are copied: reading one from the file would keep megabytes of what lies around it in memory.
        tensor = stored.to(device, dtype, copy=stored.dim() == 1)
        if tensor is not stored:
            self.release(item)
        return tensor

    def packed(self, dtype: torch.dtype, item: Stored, weight: Tensor) -> Packed:
        """`weight`, which is this tensor, to be packed from here; then its pages can go, and the copies made for it."""

        def release() -> None:
            self.release(item)
            # The copies leave gaps in the heap, a quarter of the weights in all: glibc gives back what it is asked for.
            if trim := getattr(ctypes.pythonapi, "malloc_trim", None):
                trim(0)

        return Packed(dtype, weight, self.tensor(item), release)

    def release(self, item: Stored | None = None) -> None:
        """Give back the memory of a tensor, or of all, that nobody wrote to: the file still has it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start, end = (item.start - item.start % mmap.PAGESIZE, item.end) if item else (0, len(self.memory))
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)
