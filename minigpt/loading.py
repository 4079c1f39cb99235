"""Load a model by its name: find its files, read the config once, then the tokenizer and the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from minigpt.decoding.params import SamplingParams
from minigpt.errors import TokenizerError
from minigpt.files.checkpoint import load_model, read_config, read_generation
from minigpt.files.locate import Name, locate, own_folder
from minigpt.files.reading import ALIASES, read_json
from minigpt.language_model import LanguageModel
from minigpt.network.config import GPT2Config
from minigpt.network.device import find_device, find_dtype
from minigpt.text.tokenizer import Tokenizer

_log = logging.getLogger("minigpt")


def load(
    model: Name = "gpt2",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    offline: bool = False,
    progress: bool = False,
    draft: Name | LanguageModel = "lookup",
) -> LanguageModel:
    """Load a model with its tokenizer.

    model: "demo", an alias (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2), a folder, or a Hugging Face hub id.
    device: "auto" (CUDA if usable, else the CPU), "cpu", "cuda" or "cuda:N".
    dtype: "float32"; on CUDA also "float16" and "bfloat16"; on a CPU also "float16" (the weights alone) and "int8" (the
        weights, and each row of activations where it meets them): how weights are read, while parameters stay float32.
    revision: a branch, tag or commit on the hub.   offline: never use the network, only what is already in the cache.
    progress: show download bars on stderr.
    draft: what guesses tokens, so that one pass of the model verifies several; what is drawn stays the same.
        "lookup": what followed the same tokens before, on the CPU. "off".  "int8": a copy in int8, on the CPU, which
        takes a quarter of the memory more. A model of the same vocabulary: a name, folder (./int8 for a folder of that
        name) or LanguageModel. It pays where it is several times smaller.

    A tokenizer that cannot be read blocks text alone: token ids work, and text raises the TokenizerError.
    The weights of c_attn, c_proj and c_fc are transposed views of the file, which saves a copy of the model. Make them
    contiguous for what needs that (safetensors.torch.save_file, parameters_to_vector, LBFGS):
    `for p in lm.model.parameters(): p.data = p.data.contiguous()`.
    logging.getLogger("minigpt") tells at level DEBUG what was chosen.
    Raises ModelNotFoundError, CheckpointError or DeviceError; TypeError for a model in place of a name. Warns if the
    program enabled TF32 for float32 on CUDA (results differ from the CPU's), and if GPT-2's vocabulary is a guess.
    """
    device = find_device(device)
    dtype = find_dtype(dtype, device)
    folder = locate(model, revision=revision, offline=offline, progress=progress)
    config, tokenizer = _read(folder)
    # On a CPU parameters stay float32: the products alone are in another format.
    dtypes = {"products": dtype} if device.type == "cpu" else {"dtype": dtype}
    if not isinstance(draft, LanguageModel) and draft not in ("lookup", "off", "int8"):
        draft = load(draft, device=device, dtype=dtype, offline=offline, progress=progress, draft="off")
    network = load_model(folder, device=device, config=config, **dtypes)
    end_ids, settings = read_generation(folder, config)
    origin = tokenizer.origin if isinstance(tokenizer, Tokenizer) else f"none ({tokenizer or 'token ids only'})"
    _log.debug("%s: folder %s, device %s, dtype %s, tokenizer: %s", model, folder, device, dtype, origin)
    draft = draft if isinstance(draft, LanguageModel) else str(draft)
    return LanguageModel(network, tokenizer, end_ids, defaults=_defaults(folder, settings), draft=draft)


def load_tokenizer(
    model: Name, *, revision: str | None = None, offline: bool = False, progress: bool = False
) -> Tokenizer:
    """The tokenizer that `load` would load, without weights; GPT-2's own sizes need no download. Raises as `load`, and
    TokenizerError where there is none."""
    if own_folder(model) is None and model in ALIASES and revision is None:
        return Tokenizer.gpt2()
    _, found = _read(locate(model, revision=revision, offline=offline, progress=progress, weights=False))
    if not isinstance(found, Tokenizer):
        raise found or TokenizerError(f"{model} has no tokenizer: it takes token ids only")
    return found


def _read(folder: Path) -> tuple[GPT2Config, Tokenizer | TokenizerError | None]:
    """The config, and the tokenizer or why it cannot be read; None: there is none."""
    data = read_json(folder / "config.json")
    config = read_config(folder, data)
    try:
        return config, Tokenizer.from_folder(folder, config.vocab_size, data)
    except TokenizerError as error:
        return config, error


def _defaults(folder: Path, settings: Mapping[str, Any]) -> SamplingParams:
    """The model's own SamplingParams, without values that cannot be: nobody may have asked for them."""
    good = {}
    for name in settings.keys() & {field.name for field in fields(SamplingParams)}:
        try:
            SamplingParams(**{name: settings[name]})
            good[name] = settings[name]
        except ValueError as error:
            _log.debug("%s/generation_config.json: %s", folder, error)
    return SamplingParams(**good)
