"""TODO."""

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
from minigpt.files.mapping import _DTYPES, _TRANSPOSED
from minigpt.files.reading import INDEX, PICKLES, WEIGHTS
from minigpt.network.config import GPT2Config
from minigpt.network.model import GPT2

_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the official layout with its shape, (in, out) for the weights in _TRANSPOSED."""
    E, inner = config.n_embd, config.inner_dim
    block = {
        "ln_1.weight": (E,),
        "ln_1.bias": (E,),
        "attn.c_attn.weight": (E, 3 * E),
        "attn.c_attn.bias": (3 * E,),
        "attn.c_proj.weight": (E, E),
        "attn.c_proj.bias": (E,),
        "ln_2.weight": (E,),
        "ln_2.bias": (E,),
        "mlp.c_fc.weight": (E, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, E),
        "mlp.c_proj.bias": (E,),
    }
    return {
        "wte.weight": (config.vocab_size, E),
        "wpe.weight": (config.n_positions, E),
        **{f"h.{layer}.{name}": shape for layer in range(config.n_layer) for name, shape in block.items()},
        "ln_f.weight": (E,),
        "ln_f.bias": (E,),
        **({} if config.tie_word_embeddings else {"lm_head.weight": (config.vocab_size, E)}),
    }


def write_checkpoint(
    model: GPT2, folder: Path, dtype: torch.dtype | None = None, others: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    """Write `model` as OpenAI's checkpoints are: config.json, generation_config.json and model.safetensors.

    dtype: a float format for the file, the model's own where not given. A vocabulary is not written: copy it beside.
    transformers loads the result. Every file appears whole or not at all, config.json last.

    Raises CheckpointError if the folder holds a model already, or cannot be written; ValueError for a dtype that is no
    float.
    """
    folder, dtype = Path(folder), dtype or model.wte.weight.dtype
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPE_NAMES))}, not {dtype}")
    names = ("config.json", "generation_config.json", INDEX, "*.safetensors", *PICKLES)
    tokens = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.to_dict()["eos_token_id"]}
    try:
        present = [path.name for name in names for path in folder.glob(name)]
        if present:
            raise CheckpointError(f"{folder} holds a model already ({present[0]}): choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            temp = Path(temporary)
            _write_weights(temp / WEIGHTS, model, dtype)
            (temp / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
            (temp / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
            for name in (WEIGHTS, "generation_config.json", "config.json"):
                os.replace(temp / name, folder / name)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise CheckpointError(f"cannot save to {folder}: {getattr(error, 'strerror', error)}") from error


def _write_weights(path: Path, model: GPT2, dtype: torch.dtype) -> None:
    """A safetensors file, tensor by tensor: the library would need numpy, and the whole file in memory."""
    shapes, end = _shapes(model.config), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    state = model.state_dict()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            tensor = state[name].t() if name.endswith(_TRANSPOSED) else state[name]
            data = tensor.to("cpu", dtype).contiguous()
            file.write((ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr()))
