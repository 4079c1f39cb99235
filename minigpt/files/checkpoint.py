"""A checkpoint's files: check the config and the weights, read them into a GPT2.

Only safetensors is read: a pickle can run code when it is opened, so it never is. Nothing is taken on trust: names,
shapes and dtypes in the weight file's header are compared with config.json before any memory is taken, and a problem is
one CheckpointError that names the file. locate.py finds the folder.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping as Fields
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from minigpt.errors import CheckpointError
from minigpt.files.folder import weight_files
from minigpt.files.mapping import DTYPES, Mapping, Stored
from minigpt.files.names import is_mask, is_other_head, plain, shapes
from minigpt.files.reading import MAX_HEADER, cure, is_file, read_json, sha256
from minigpt.network.config import GPT2Config
from minigpt.network.linear import Linear
from minigpt.network.model import GPT2
from minigpt.network.products import Packed

# What generation_config.json may set that transformers applies always, and where do_sample is true (with its defaults).
_ALWAYS = (
    *("max_new_tokens", "min_new_tokens", "num_beams", "length_penalty", "early_stopping", "repetition_penalty"),
    *("no_repeat_ngram_size", "sequence_bias", "suppress_tokens", "bad_words_ids"),
)
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "typical_p": None}
_SAMPLING |= {"epsilon_cutoff": None, "eta_cutoff": None}


def read_config(folder: Path, data: Fields[str, Any] | None = None) -> GPT2Config:
    """The folder's config.json, whose contents are `data` where they are read already.

    Raises CheckpointError if it is missing, damaged, or not of a model that can be run.
    """
    path = folder / "config.json"
    try:
        return GPT2Config.from_dict(read_json(path) if data is None else data)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_generation(folder: Path, config: GPT2Config) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The ids that end a text, and how else generation_config.json says to decode, as fields of SamplingParams.

    The end ids are eos_token_id of generation_config.json, else of config.json, if in the vocabulary.
    The rest is what transformers 5 would apply, and {} where there is no such file: temperature, top_k, top_p and min_p
    only where do_sample is true, and then temperature 1 and top_k 50 where the file does not give them. Left out are
    max_length, which counts the prompt, and settings that SamplingParams does not have (guidance_scale, ...).
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


def _header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by their names in it. Reads the header only."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            with safe_open(_unicode(path, file.fileno()), framework="pt"):
                pass  # the library checks it all: sizes, overlaps, gaps, the file's length
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} {_damage(path, error)}") from error
    header.pop("__metadata__", None)
    return {
        name: Stored(path, item["dtype"], tuple(item["shape"]), *(8 + length + at for at in item["data_offsets"]))
        for name, item in header.items()
    }


def _unicode(path: Path, descriptor: int) -> str:
    """A name of an open file that safetensors takes: `path`, unless it is not UTF-8."""
    try:
        str(path).encode()
        return str(path)
    except UnicodeEncodeError:
        if os.path.exists(f"/dev/fd/{descriptor}"):
            return f"/dev/fd/{descriptor}"
        raise CheckpointError(f"{path} is a path that is not UTF-8: rename the folder") from None


def _damage(path: Path, error: Exception) -> str:
    """What is wrong with a file that is not safetensors, and the cure."""
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights: run `git lfs pull`, or download it again"
    if start.startswith((b"PK\x03\x04", b"\x80")) and start[8:9] != b"{":  # (128 may also be the length of a header)
        return "is a pickle under another name, which is never opened: convert it to safetensors with transformers"
    return f"is incomplete or not a safetensors file ({error}): {cure(path)}"


def _tensors(folder: Path) -> dict[str, Stored]:
    """All stored tensors by their plain names, without prefixes, masks and heads for other tasks."""
    tensors: dict[str, Stored] = {}
    others: list[str] = []
    for path in weight_files(folder):
        for stored, item in _header(path).items():
            name = plain(stored)
            if is_mask(name) or is_other_head(name):
                others += [name] if is_other_head(name) else []
                continue
            if name in tensors:
                raise CheckpointError(f"{path} has {name} as {stored}, but {tensors[name].file.name} has it already")
            tensors[name] = item
    if others and not any(name.startswith(("h.", "wte.")) for name in tensors):
        raise CheckpointError(f"{folder} holds only a head ({', '.join(others[:3])}), without GPT-2's body")
    if lora := next((name for name in tensors if ".lora_" in name), None):
        raise CheckpointError(f"{folder} holds LoRA weights ({lora}): merge them with PEFT, and save the result")
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
    for name, field in (("wte.weight", "vocab_size"), ("wpe.weight", "n_positions")):
        if name in tensors and tensors[name].shape[1:] and tensors[name].shape[:1] != expected[name][:1]:
            problems.append(f"{field} is {getattr(config, field)} but {name} has {tensors[name].shape[0]} rows")
    for name in expected:
        if name not in tensors:
            head = ", but tie_word_embeddings is false: these weights are no language model's, or lost its head"
            problems.append(f"{name} is missing{head * (name == 'lm_head.weight')}")
        elif tensors[name].shape != expected[name]:
            problems.append(f"{name} has the shape {list(tensors[name].shape)}, not {list(expected[name])}")
    problems += [f"{name} is not known" for name in tensors if name not in expected]
    problems += [
        f"{name} is {item.dtype}, not one of {', '.join(DTYPES)}"
        for name, item in tensors.items()
        if name in expected and item.dtype not in DTYPES
    ]
    return problems


def check(folder: Path, config: GPT2Config) -> dict[str, Stored]:
    """Where each weight lies, by its plain name. Raises CheckpointError if they are not what config.json calls for."""
    tensors = _tensors(folder)
    if config.tie_word_embeddings and "wte.weight" not in tensors and "lm_head.weight" in tensors:
        tensors["wte.weight"] = tensors.pop("lm_head.weight")
    problems = [problem if len(problem) < 300 else problem[:300] + "..." for problem in _problems(config, tensors)]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {'; '.join(problems[:10])}{more}")
    return tensors


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
    config: what read_config gives, where it is known.
    Tied or not is what config.json says, but a head that is stored and differs from wte is used, as transformers does.
    Raises CheckpointError.
    """
    config = config or read_config(folder)
    tensors = check(folder, config)
    try:
        mappings = {path: Mapping(path) for path in {item.file for item in tensors.values()}}
        if config.tie_word_embeddings and "lm_head.weight" in tensors:
            pair = (tensors["lm_head.weight"], tensors["wte.weight"])
            head, wte = (mappings[item.file].tensor(item) for item in pair)
            if head.dtype == wte.dtype and torch.equal(head, wte):
                del tensors["lm_head.weight"]
            else:
                config = replace(config, tie_word_embeddings=False)
        with torch.inference_mode(False):  # weights that may be changed, and whose changes are counted
            state = {name: mappings[item.file].read(name, item, device, dtype) for name, item in tensors.items()}
        for mapping in mappings.values():
            mapping.release()
        model = empty_model(config)
        model.load_state_dict(state, assign=True)
        if torch.device(device).type == "cpu" and dtype == torch.float32:
            _choose_products(model, tensors, products)
    except (OSError, ValueError) as error:  # ValueError: a file that has become shorter since it was checked
        raise CheckpointError(f"{folder}: the weights cannot be read: {getattr(error, 'strerror', error)}") from error
    model.make_masks(device)
    return model.requires_grad_(False).eval()


def _choose_products(model: GPT2, tensors: dict[str, Stored], products: torch.dtype) -> None:
    """Have each matrix packed at its first use, from a mapping of its own whose pages are given back then."""
    mappings = {path: Mapping(path) for path in {item.file for item in tensors.values()}}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) or (layer is model.wte and model.config.tie_word_embeddings):
            item = tensors[f"{name}.weight"]
            if item.dtype == "F32":
                layer.packed = mappings[item.file].packed(products, f"{name}.weight", item, layer.weight)
            elif products != torch.float32:  # (a second float32 copy beside that of another format costs too much)
                layer.packed = Packed(products, layer.weight)


def empty_model(config: GPT2Config) -> GPT2:
    """A GPT2 that has shapes but no memory (on the meta device), to be given a checkpoint's weights."""

    class ShapesOnly(TorchFunctionMode):
        """Leaves initialisation out: on the meta device it would import torch._dynamo, which takes a second."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.tril or getattr(func, "__module__", None) == "torch.nn.init":
                return args[0] if args else None
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), ShapesOnly():
        return GPT2(config)


def describe(folder: Path) -> dict[str, Any]:
    """What the weight files hold, for `info`: each one's name, bytes and sha256; tensors, dtypes, bytes in all.

    left_out: the tensors of heads for other tasks, which are not loaded.
    Raises CheckpointError as loading would for a damaged file.
    """
    paths = weight_files(folder)
    stored = [(plain(name), item.dtype) for path in paths for name, item in _header(path).items()]
    dtypes = Counter(dtype for _, dtype in stored)
    files = [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths]
    return {
        "files": files,
        "tensors": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "bytes": sum(path.stat().st_size for path in paths),
        "left_out": [name for name, _ in stored if is_other_head(name)],
    }
