"""TODO."""

from __future__ import annotations

import os

import torch

from minigpt.files import checkpoint, locate
from minigpt.language_model import LanguageModel
from minigpt.network.device import find_device, find_dtype
from minigpt.text.tokenizer import Tokenizer


def load(
    model: str | os.PathLike[str] = "gpt2",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    offline: bool = False,
    progress: bool = False,
) -> LanguageModel:
    """Load a model with its tokenizer.

    model: "demo", an alias (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2), a folder, or a Hugging Face hub id.
    device: "auto" (CUDA if usable, else the CPU), "cpu", "cuda" or "cuda:N".
    dtype: "float32"; on CUDA also "float16" and "bfloat16"; on a CPU also "float16" (the weights alone) and "int8" (the
        weights, and each row of activations where it meets them): how weights are read, while parameters stay float32.
    revision: a branch, tag or commit on the hub.
    offline: never use the network, only what is already in the cache.
    progress: show download bars on stderr.

    Raises ModelNotFoundError, CheckpointError, TokenizerError or DeviceError, each saying what to do. Warns if the
    program has enabled TF32 and float32 on CUDA is asked for: the results will differ from the CPU's.
    """
    place = find_device(device)
    precision = find_dtype(dtype, place)
    folder = locate.locate(model, revision=revision, offline=offline, progress=progress)
    config = checkpoint.read_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    dtypes = {"products": precision} if place.type == "cpu" else {"dtype": precision}
    network = checkpoint.load_model(folder, device=place, **dtypes)
    return LanguageModel(network, tokenizer, checkpoint.end_ids(folder, config))
