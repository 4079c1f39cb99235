"""Write a model as OpenAI's checkpoints are: whole or not at all."""

from __future__ import annotations

import ctypes
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minigpt.errors import CheckpointError
from minigpt.files.mapping import DTYPES
from minigpt.files.names import TRANSPOSED, shapes
from minigpt.files.reading import INDEX, PICKLES, TOKENIZER_FILES, WEIGHTS
from minigpt.network.model import GPT2

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


def write_checkpoint(
    model: GPT2,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    others: Mapping[str, bytes] = _NOTHING,
) -> None:
    """Write config.json, generation_config.json, model.safetensors and `others`, {name: contents}: a tokenizer's files.

    dtype: a float format for the file, the model's own where not given. transformers loads the result. Every file
    appears whole or not at all, config.json last. Raises CheckpointError if the folder cannot be written, or holds a
    model or another tokenizer already; ValueError for a dtype that is no float.
    """
    folder, dtype = Path(folder), dtype or model.wte.weight.dtype
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPE_NAMES))}, not {dtype}")
    tokens = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.to_dict()["eos_token_id"]}
    try:
        _refuse_what_is_there(folder, others)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            temp = Path(temporary)
            _write_weights(temp / WEIGHTS, model, dtype)
            last = {"generation_config.json": tokens, "config.json": model.config.to_dict()}
            texts = {name: (json.dumps(data, indent=2) + "\n").encode() for name, data in last.items()}
            for name, content in {**others, **texts}.items():
                (temp / name).write_bytes(content)
            for name in (WEIGHTS, *others, *texts):
                os.replace(temp / name, folder / name)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise CheckpointError(f"cannot save to {folder}: {getattr(error, 'strerror', error)}") from error


def _refuse_what_is_there(folder: Path, others: Mapping[str, bytes]) -> None:
    """A model is never written over another one, nor a tokenizer beside another one."""
    names = ("config.json", "generation_config.json", INDEX, "*.safetensors", *PICKLES)
    if present := [path.name for name in names for path in folder.glob(name)]:
        raise CheckpointError(f"{folder} holds a model already ({present[0]}): choose another folder")
    for name in TOKENIZER_FILES if others else ():
        path = folder / name
        if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == others.get(name)):
            raise CheckpointError(f"{folder} holds another tokenizer already ({name}): choose another folder")


def _write_weights(path: Path, model: GPT2, dtype: torch.dtype) -> None:
    """A safetensors file, tensor by tensor: the library would need numpy, and the whole file in memory."""
    sizes, end = shapes(model.config), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in sizes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    state = model.state_dict()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sizes:
            tensor = state[name].t() if name.endswith(TRANSPOSED) else state[name]
            data = tensor.to("cpu", dtype).contiguous()
            file.write((ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr()))
