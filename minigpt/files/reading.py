"""TODO."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from minigpt.errors import CheckpointError, MiniGPTError

WEIGHTS = "model.safetensors"


INDEX = "model.safetensors.index.json"


MAX_HEADER = 2**25  # bytes of a JSON or text file, or of a weight file's header: in memory it can grow thirtyfold


_MAX_DEPTH = 50  # of JSON: deeper is a trap for whoever compares or prints it


PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The weight files to read: model.safetensors if it is there, else the shards that the index lists; nothing else.

    Raises CheckpointError if there are none, if a shard is missing, or if there are only pickles.
    """
    if is_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if is_file(folder / INDEX):
        files = [folder / name for name in _shards(folder / INDEX)]
        missing = [path.name for path in files if not is_file(path)]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            names = ", ".join(missing[:5]) + more
            raise CheckpointError(f"{folder} lacks {names}, listed in {INDEX}: download it again")
        return files
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}, only {', '.join(pickles)}, a pickle, which can run code and is never opened. "
            'If you trust it, convert it: python -c "from transformers import GPT2LMHeadModel as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS}: is this the folder of a model?")


def _shards(index: Path) -> list[str]:
    """The names of the files that an index lists, which must lie beside it."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map that gives a file for each tensor: {cure(index)}")
    names = sorted(set(places.values()))
    for name in names:
        if re.search(r"[/\\:\0]", name) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} lists {name!r}: a shard must be a safetensors file in the same folder")
    return names


def is_file(path: Path, error: type[MiniGPTError] = CheckpointError) -> bool:
    """Whether there is such a file. Raises `error` for a folder, pipe or dead link: it must not count as absent."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return True
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(path):
            return False
        raise error(f"{path} cannot be read: it is a link to nothing: delete it and download it again") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    raise error(f"{path} cannot be read: it is not a file: delete it and download it again")


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


def read_json(path: Path, error: type[MiniGPTError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file. Raises `error` if it cannot be read, or is something else."""
    try:
        data = json.loads(read_text(path, error))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON ({problem}): {cure(path)}") from None
    if not isinstance(data, dict):
        raise error(f"{path} must hold a JSON object, not {type(data).__name__}: {cure(path)}")
    level: list[Any] = [data]
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in inner for child in items if isinstance(child, (dict, list))]
    if level:
        raise error(f"{path} is nested too deeply: {cure(path)}")
    return data


def read_text(path: Path, error: type[MiniGPTError] = CheckpointError) -> str:
    """A UTF-8 file, without the byte order mark that it may begin with. Raises `error` if it cannot be read."""
    try:
        is_file(path, error)  # raises where it is a pipe, which would never end
        with open(path, "rb") as file:
            data = file.read(MAX_HEADER + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}. Is this the folder of a model?") from problem
    if len(data) > MAX_HEADER:
        raise error(f"{path} is larger than {MAX_HEADER >> 20} MiB: it does not belong to a GPT-2 model")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 ({problem}): {cure(path)}") from None
