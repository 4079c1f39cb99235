"""Names of files, and how one is read: a file that cannot be used is an error that names it and the cure. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from minigpt.errors import CheckpointError, MiniGPTError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
# Files of tokenizers that this engine does not have: whoever sees one knows that GPT-2's vocabulary would be wrong.
OTHER_TOKENIZERS = ("*.model", "*.spm", "*.tiktoken", "vocab.txt", "tekken.json", "encoder.json", "vocab.bpe")

MAX_HEADER = 2**25  # bytes of a JSON or text file, or of a weight file's header: in memory it can grow thirtyfold
_MAX_DEPTH = 50  # of JSON: deeper is a trap for whoever compares or prints it


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


def read_bytes(path: Path, error: type[MiniGPTError] = CheckpointError) -> bytes:
    """The contents of a text file. Raises `error` if it cannot be read, or is too large to belong to a model."""
    try:
        is_file(path, error)  # raises where it is a pipe, which would never end
        with open(path, "rb") as file:
            data = file.read(MAX_HEADER + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}. Is this the folder of a model?") from problem
    if len(data) > MAX_HEADER:
        raise error(f"{path} is larger than {MAX_HEADER >> 20} MiB: it does not belong to a GPT-2 model")
    return data


def as_text(path: Path, data: bytes, error: type[MiniGPTError] = CheckpointError) -> str:
    """What the UTF-8 file `path` holds, `data`, without the byte order mark that it may begin with."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 ({problem}): {cure(path)}") from None


def as_json(path: Path, data: bytes, error: type[MiniGPTError] = CheckpointError) -> dict[str, Any]:
    """The object that the JSON file `path` holds, `data`. Raises `error` if it is something else, or a trap."""
    try:
        found = json.loads(as_text(path, data, error))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON ({problem}): {cure(path)}") from None
    if not isinstance(found, dict):
        raise error(f"{path} must hold a JSON object, not {type(found).__name__}: {cure(path)}")
    level: list[Any] = [found]
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in inner for child in items if isinstance(child, (dict, list))]
    if level:
        raise error(f"{path} is nested too deeply: {cure(path)}")
    return found


def read_json(path: Path, error: type[MiniGPTError] = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file. Raises `error` if it cannot be read, or is something else."""
    return as_json(path, read_bytes(path, error), error)
