"""The files of a model's folder. One that cannot be used is a CheckpointError that names it and the cure. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from minigpt.errors import CheckpointError, MiniGPTError

_SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
ALIASES = {name: f"openai-community/{name}" for name in _SIZES} | {"distilgpt2": "distilbert/distilgpt2"}

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SIDES = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")  # beside the vocabulary
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", *SIDES)
# Files of tokenizers that this engine does not have: whoever sees one knows that GPT-2's vocabulary would be wrong.
OTHER_TOKENIZERS = ("*.model", "*.spm", "*.tiktoken", "vocab.txt", "tekken.json", "encoder.json", "vocab.bpe")
# What is downloaded beside the weights, where the repository has it. The official ones hold gigabytes of other formats.
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, *OTHER_TOKENIZERS)

MAX_HEADER = 2**25  # bytes of a JSON or text file, or of a weight file's header: in memory it can grow thirtyfold


def shipped(name: str) -> bytes:
    """A file of the package's data. Raises MiniGPTError where the installation lacks it."""
    try:
        return resources.files("minigpt").joinpath("data", name).read_bytes()
    except OSError:
        raise MiniGPTError(f"this installation of minigpt lacks data/{name}: install minigpt again") from None


def is_file(path: Path) -> bool:
    """Whether there is such a file. Raises for a folder, pipe or dead link: it must not count as absent."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} cannot be read: not a file, a link to nothing, or no access: download it again")
    return os.path.isfile(path)


def cure(path: Path) -> str:
    """What to do about a damaged file, to end a message with."""
    # Hugging Face's cache holds links: to download again, the file that they point to has to go.
    victim = path.resolve() if path.resolve().parent.name == "blobs" else path
    return f"delete {victim} and download it again"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The contents of a text file. Raises if it cannot be read, or is too large to belong to a model."""
    try:
        is_file(path)  # raises where it is a pipe, which would never end
        with open(path, "rb") as file:
            data = file.read(MAX_HEADER + 1)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}. Is this the folder of a model?") from problem
    if len(data) > MAX_HEADER:
        raise CheckpointError(f"{path} is larger than {MAX_HEADER >> 20} MiB: it does not belong to a GPT-2 model")
    return data


def as_text(path: Path, data: bytes) -> str:
    """What the UTF-8 file `path` holds, `data`, without the byte order mark that it may begin with."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"{path} is not UTF-8 ({problem}): {cure(path)}") from None


def as_json(path: Path, data: bytes) -> dict[str, Any]:
    """The object that the JSON file `path` holds, `data`. Raises if it is something else."""
    try:
        found = json.loads(as_text(path, data))
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not valid JSON ({problem}): {cure(path)}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(found).__name__}: {cure(path)}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises if it cannot be read, or is something else."""
    return as_json(path, read_bytes(path))


def is_model(folder: Path) -> bool:
    """Whether there is a model in this folder, or what somebody might take for one."""
    names = ("config.json", "adapter_config.json", "*.safetensors", *PICKLES, "checkpoint-*")
    return any(True for name in names for _ in folder.glob(name))


def weight_files(folder: Path) -> list[Path]:
    """The weight files: model.safetensors, else the shards that the index lists. Raises if one is missing, or all."""
    if is_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if is_file(folder / INDEX):
        files = [folder / name for name in shards(folder / INDEX)]
        if missing := [path.name for path in files if not is_file(path)]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)[:200]}, listed in {INDEX}: download it again")
        return files
    raise CheckpointError(f"{folder} has no {WEIGHTS}{almost(folder) or ': is this the folder of a model?'}")


def has_weights(folder: Path) -> bool:
    """Whether all weight files are there."""
    try:
        return bool(weight_files(folder))
    except CheckpointError:
        return False


def shards(index: Path) -> list[str]:
    """The names of the files that an index lists, which must lie beside it."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map that gives a file for each tensor: {cure(index)}")
    names = sorted(set(places.values()))
    for name in names:
        if re.search(r"[/\\:\0]", name) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} lists {name!r}: a shard must be a safetensors file in the same folder")
    return names


def almost(folder: Path) -> str:
    """Why a folder that lacks config.json or weights is not a model yet, and the cure; "" where nothing tells."""
    place, target, merged = str(folder), f"{folder}-safetensors", f"{folder}-merged"
    if (folder / "adapter_config.json").exists():
        return (
            ": it is a LoRA adapter, which needs its base model: merge the two, and load the result: "
            'python -c "from peft import AutoPeftModelForCausalLM as M; '
            f'M.from_pretrained({place!r}).merge_and_unload().save_pretrained({merged!r})"'
        )
    saved = [path for path in folder.glob("checkpoint-*") if (path / "config.json").exists()]
    if saved:
        newest = max(saved, key=lambda path: (len(path.name), path.name))
        return f", but {newest.name} inside has: did you mean {newest}?"
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        return ""
    if pickles[0].endswith(".pt") and not (folder / "config.json").exists():
        advice = "If it is nanoGPT's and you trust it, convert it: python scripts/convert_nanogpt.py "
        advice += f"{folder / pickles[0]} {target}"
    else:
        copy = f"from_pretrained({place!r}).save_pretrained({target!r})"
        code = f"from transformers import GPT2LMHeadModel as M; M.{copy}"
        if any((folder / name).exists() for name in TOKENIZER_FILES):
            code += f"; from transformers import AutoTokenizer as T; T.{copy}"
        advice = f'If you trust it, convert it: python -c "{code}"'
    return f", only {', '.join(pickles)}, a pickle, which can run code and is never opened. {advice}"
