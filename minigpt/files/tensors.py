"""A safetensors file: the names and shapes of its tensors, its header, itself as memory, and how one is written."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minigpt.errors import CheckpointError
from minigpt.files.reading import MAX_HEADER, cure
from minigpt.network.config import GPT2Config
from minigpt.network.model import GPT2
from minigpt.network.products import Packed

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # any float format

# OpenAI's Conv1D keeps its weight as (in, out), torch's Linear as (out, in).
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Wrappers put names before those of the body: torch.compile, DataParallel, transformers, PEFT, TRL.
_PREFIX = re.compile(r"^(module\.|transformer\.|base_model\.model\.|pretrained_model\.)+")
MASK = re.compile(r"\.attn\.(masked_)?bias$")  # a causal mask, which older files hold; not attn.c_attn.bias
OTHER_HEAD = re.compile(r"^(score|classifier|multiple_choice_head|qa_outputs|v_head)\.")  # a head for another task


def shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the official layout with its shape, (in, out) for the weights in _TRANSPOSED."""
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


def header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by their names in it. Reads the header only."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            str(path).encode()  # raises where safetensors would refuse the name
            with safe_open(path, framework="pt"):
                pass  # the library checks it all: sizes, overlaps, gaps, the file's length
            entries = json.loads(file.read(length))
    except UnicodeEncodeError:
        raise CheckpointError(f"{path} is a path that is not UTF-8: rename the folder") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} {_damage(path, error)}") from error
    entries.pop("__metadata__", None)
    found = {}
    for name, item in entries.items():
        start, end = (8 + length + at for at in item["data_offsets"])
        plain = _PREFIX.sub("", name.replace("_orig_mod.", ""))
        found[name] = Stored(plain, path, item["dtype"], tuple(item["shape"]), start, end)
    return found


def _damage(path: Path, error: Exception) -> str:
    """What is wrong with a file that is not safetensors, and the cure."""
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights: run `git lfs pull`, or download it again"
    if start.startswith((b"PK\x03\x04", b"\x80")) and start[8:9] != b"{":  # (128 may also be the length of a header)
        return "is a pickle under another name, which is never opened: convert it to safetensors with transformers"
    return f"is incomplete or not a safetensors file ({error}): {cure(path)}"


class MappedFile:
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

    def read(self, item: Stored, device: str | torch.device, dtype: torch.dtype) -> Tensor:
        """The tensor as the model wants it. In the stored dtype on the CPU, that is the file itself, nothing copied."""
        stored = self.tensor(item)
        # Vectors are copied: reading one from the file would keep megabytes of what lies around it in memory.
        tensor = stored.to(device, dtype, copy=stored.dim() == 1)
        if tensor is not stored:
            self.release(item)
        return _turned(item.name, tensor)

    def packed(self, dtype: torch.dtype, item: Stored, weight: Tensor) -> Packed:
        """`weight`, which is this tensor, to be packed from here; then its pages can go, and the copies made for it."""

        def release() -> None:
            self.release(item)
            # The copies leave gaps in the heap, a quarter of the weights in all: glibc gives back what it is asked for.
            if trim := getattr(ctypes.pythonapi, "malloc_trim", None):
                trim(0)

        return Packed(dtype, weight, _turned(item.name, self.tensor(item)), release)

    def release(self, item: Stored | None = None) -> None:
        """Give back the memory of a tensor, or of all, that nobody wrote to: the file still has it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start, end = (item.start - item.start % mmap.PAGESIZE, item.end) if item else (0, len(self.memory))
            self.memory.madvise(mmap.MADV_DONTNEED, start, end - start)


def _turned(name: str, tensor: Tensor) -> Tensor:
    """(in, out) <-> (out, in), for the weights in _TRANSPOSED."""
    return tensor.t() if name.endswith(_TRANSPOSED) else tensor


def write_weights(path: Path, model: GPT2, dtype: torch.dtype) -> None:
    """A safetensors file, tensor by tensor: the library would need numpy, and the whole file in memory."""
    sizes, end = shapes(model.config), 0
    stored = next(name for name, known in DTYPES.items() if known == dtype)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in sizes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": stored, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    state = model.state_dict()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sizes:
            data = _turned(name, state[name]).to("cpu", dtype).contiguous()
            file.write((ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr()))
