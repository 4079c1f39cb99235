"""A checkpoint: check its config and weights, read them into a GPT2, and write one as OpenAI's are.

Only safetensors is read: a pickle can run code when it is opened, so it never is. Names, shapes and dtypes in the
weight file's header are compared with config.json before any memory is taken. A problem is one CheckpointError.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from minigpt.errors import CheckpointError
from minigpt.files.reading import INDEX, PICKLES, TOKENIZER_FILES, WEIGHTS, is_file, read_json, sha256, weight_files
from minigpt.files.tensors import DTYPES, MASK, OTHER_HEAD, MappedFile, Stored, header, shapes, write_weights
from minigpt.network.config import GPT2Config
from minigpt.network.formats import Use
from minigpt.network.linear import Linear
from minigpt.network.model import GPT2
from minigpt.network.products import Packed

Files = Mapping[str, bytes]  # {name: contents}

# What generation_config.json may set that transformers applies always, and where do_sample is true (with its defaults).
_ALWAYS = (
    *("max_new_tokens", "min_new_tokens", "num_beams", "length_penalty", "early_stopping", "repetition_penalty"),
    *("no_repeat_ngram_size", "sequence_bias", "suppress_tokens", "bad_words_ids"),
)
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "typical_p": None}
_SAMPLING |= {"epsilon_cutoff": None, "eta_cutoff": None}


def read_config(folder: Path, data: Mapping[str, Any] | None = None) -> GPT2Config:
    """The folder's config.json, whose contents are `data` if read already. Raises CheckpointError if no GPT2 has it."""
    path = folder / "config.json"
    try:
        return GPT2Config.from_dict(read_json(path) if data is None else data)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_generation(folder: Path, config: GPT2Config) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The ids that end a text, and how generation_config.json says to decode, as fields of SamplingParams.

    The end ids are eos_token_id of generation_config.json, else of config.json, if in the vocabulary.
    The settings are those that transformers 5 would apply: see _ALWAYS and _SAMPLING. Left out are max_length, which
    counts the prompt, and settings that SamplingParams does not have (guidance_scale, ...).
    """
    path = folder / "generation_config.json"
    data = read_json(path) if is_file(path) else {}
    found = data.get("eos_token_id")
    try:
        value = config.eos_token_id if found is None else replace(config, eos_token_id=found).eos_token_id
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    ids = value if isinstance(value, tuple) else () if value is None else (value,)
    names = dict.fromkeys(_ALWAYS) | (_SAMPLING if data.get("do_sample") is True else {})
    settings = {name: default if data.get(name) is None else data[name] for name, default in names.items()}
    settings = {name: value for name, value in settings.items() if value is not None}
    return tuple(id for id in ids if 0 <= id < config.vocab_size), settings


def check(folder: Path, config: GPT2Config) -> dict[str, Stored]:
    """Where each weight lies, by its plain name. Raises CheckpointError if they are not what config.json calls for."""
    tensors: dict[str, Stored] = {}
    heads: list[str] = []
    for path in weight_files(folder):
        for stored, item in header(path).items():
            if OTHER_HEAD.search(name := item.name):
                heads.append(name)
            elif name in tensors:
                raise CheckpointError(f"{path} has {name} as {stored}, but {tensors[name].file.name} has it already")
            elif not MASK.search(name):
                tensors[name] = item
    if heads and not any(name.startswith(("h.", "wte.")) for name in tensors):
        raise CheckpointError(f"{folder} holds only a head ({', '.join(heads[:3])}), without GPT-2's body")
    if config.tie_word_embeddings and "wte.weight" not in tensors and "lm_head.weight" in tensors:
        tensors["wte.weight"] = tensors.pop("lm_head.weight")
    if problems := _problems(config, tensors):
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)[:1000]}")
    return tensors


def _problems(config: GPT2Config, tensors: dict[str, Stored]) -> list[str]:
    """How the stored tensors differ from what config.json calls for."""
    problems = []
    blocks = {name.split(".")[1] for name in tensors if name.startswith("h.")}
    if len(blocks) != config.n_layer:
        problems.append(f"n_layer is {config.n_layer} but {len(blocks)} blocks are stored")
        if config.n_layer > len(tensors):
            return problems  # too many to list, perhaps too many for the memory
    expected = shapes(config)
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        expected["lm_head.weight"] = expected["wte.weight"]
    for name, shape in expected.items():
        if name not in tensors:
            head = ", but tie_word_embeddings is false: these weights are no language model's, or lost its head"
            problems.append(f"{name} is missing{head * (name == 'lm_head.weight')}")
        elif tensors[name].shape != shape:
            problems.append(f"{name} has the shape {list(tensors[name].shape)}, not {list(shape)}")
        elif (dtype := tensors[name].dtype) not in DTYPES:
            problems.append(f"{name} is {dtype}, not one of {', '.join(DTYPES)}")
    return problems + [f"{name} is not known" for name in tensors if name not in expected]


class _ShapesOnly(TorchFunctionMode):
    """Leaves initialisation out: on the meta device it would import torch._dynamo, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tril or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else None
        return func(*args, **(kwargs or {}))


def load_model(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    products: torch.dtype = torch.float32,
    config: GPT2Config | None = None,
) -> GPT2:
    """The model in `folder`, in eval mode, without gradients, in `dtype` on `device` whatever format is stored.

    products: the format in which a CPU keeps the weights for matrix products (linear.py), where `dtype` is float32.
    config: what read_config gives, where it is known. A stored head that differs from wte is used although config.json
    calls it tied, as in transformers. Raises CheckpointError.
    """
    config = config or read_config(folder)
    tensors = check(folder, config)
    try:
        mappings = {path: MappedFile(path) for path in {item.file for item in tensors.values()}}
        if config.tie_word_embeddings and "lm_head.weight" in tensors:
            pair = (tensors["lm_head.weight"], tensors["wte.weight"])
            head, wte = (mappings[item.file].tensor(item) for item in pair)
            if head.dtype == wte.dtype and torch.equal(head, wte):
                del tensors["lm_head.weight"]
            else:
                config = replace(config, tie_word_embeddings=False)
        with torch.inference_mode(False):  # weights that may be changed, and whose changes are counted
            state = {name: mappings[item.file].read(item, device, dtype) for name, item in tensors.items()}
        for mapping in mappings.values():
            mapping.release()
        with torch.device("meta"), _ShapesOnly():
            model = GPT2(config)
        model.load_state_dict(state, assign=True)
        if torch.device(device).type == "cpu" and dtype == torch.float32:
            _choose_products(model, tensors, products)
    except (OSError, ValueError) as error:  # ValueError: a file that has become shorter since it was checked
        raise CheckpointError(f"{folder}: the weights cannot be read: {getattr(error, 'strerror', error)}") from error
    model.make_masks(device)
    return model.requires_grad_(False).eval()


def _choose_products(model: GPT2, tensors: dict[str, Stored], products: torch.dtype) -> None:
    """Have each matrix packed at its first use, from a second mapping, whose pages are given back then.

    The first one's pages hold the parameters, which stay.
    """
    mappings, use = {path: MappedFile(path) for path in {item.file for item in tensors.values()}}, Use()
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) or (layer is model.wte and model.config.tie_word_embeddings):
            item = tensors[f"{name}.weight"]
            if item.dtype == "F32":
                layer.packed = mappings[item.file].packed(products, item, layer.weight)
                layer.packed.use = use
            elif products != torch.float32:  # (a second float32 copy beside that of another format costs too much)
                layer.packed = Packed(products, layer.weight)


def describe(folder: Path) -> dict[str, Any]:
    """What the weight files hold: each one's name, bytes and sha256; tensors, dtypes, bytes in all.

    left_out: the tensors of heads for other tasks, which are not loaded. Raises CheckpointError for a damaged file.
    """
    paths = weight_files(folder)
    stored = [item for path in paths for item in header(path).values()]
    files = [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths]
    left_out = [item.name for item in stored if OTHER_HEAD.search(item.name)]
    counts = {"tensors": len(stored), "dtypes": dict(Counter(item.dtype for item in stored))}
    return {"files": files, **counts, "bytes": sum(file["bytes"] for file in files), "left_out": left_out}


def write_checkpoint(
    model: GPT2, folder: str | Path, dtype: torch.dtype | None = None, others: Files = MappingProxyType({})
) -> None:
    """Write config.json, generation_config.json, model.safetensors and `others`, a tokenizer's files.

    dtype: a float format for the file, the model's own where not given. transformers loads the result. Every file
    appears whole or not at all, config.json last. Raises CheckpointError if the folder cannot be written, or holds a
    model or another tokenizer already; ValueError for a dtype that is no float.
    """
    folder, dtype = Path(folder), dtype or model.wte.weight.dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES.values()))}, not {dtype}")
    tokens = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.to_dict()["eos_token_id"]}
    try:
        _refuse_what_is_there(folder, others)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            temp = Path(temporary)
            write_weights(temp / WEIGHTS, model, dtype)
            last = {"generation_config.json": tokens, "config.json": model.config.to_dict()}
            texts = {name: (json.dumps(data, indent=2) + "\n").encode() for name, data in last.items()}
            for name, content in {**others, **texts}.items():
                (temp / name).write_bytes(content)
            for name in (WEIGHTS, *others, *texts):
                os.replace(temp / name, folder / name)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise CheckpointError(f"cannot save to {folder}: {getattr(error, 'strerror', error)}") from error


def _refuse_what_is_there(folder: Path, others: Files) -> None:
    """A model is never written over another one, nor a tokenizer beside another one."""
    names = ("config.json", "generation_config.json", INDEX, "*.safetensors", *PICKLES)
    if present := [path.name for name in names for path in folder.glob(name)]:
        raise CheckpointError(f"{folder} holds a model already ({present[0]}): choose another folder")
    for name in TOKENIZER_FILES if others else ():
        path = folder / name
        if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == others.get(name)):
            raise CheckpointError(f"{folder} holds another tokenizer already ({name}): choose another folder")
