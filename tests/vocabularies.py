"""Tokenizer files, written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

END = "<|endoftext|>"


def write(folder: Path, **files: Any) -> Path:
    """A folder of the files given: vocab_json={...} is vocab.json. Text is written as it is, other values as JSON."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / re.sub("_(json|txt)$", r".\1", name)).write_text(text, encoding="utf-8", newline="")
    return folder


def small(merges: list[str], extra: dict[str, int] | None = None, bytes_: str = "abcd<>|Ġ") -> dict[str, int]:
    """A vocabulary of a few bytes, what the merges make, and other tokens."""
    tokens = dict.fromkeys([*bytes_, *(merge.replace(" ", "") for merge in merges)])
    return {token: id for id, token in enumerate(tokens)} | (extra or {})


def pipeline(vocab: dict[str, int], merges: list[str], added: list[dict[str, Any]] | None = None, **parts: Any) -> Any:
    """A tokenizer.json."""
    model = {"type": "BPE", "vocab": vocab, "merges": merges} | parts.pop("model", {})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added or [], "normalizer": None}
    data |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    return data | parts


def added(id: int, content: str, special: bool = False, **flags: Any) -> dict[str, Any]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip"], False) | {"normalized": not special} | flags
    return {"id": id, "content": content, "special": special, **flags}


AB = small(["a b", "ab c"])
PAIR: dict[str, Any] = {"vocab_json": AB, "merges_txt": "#version: 0.2\na b\nab c\n"}
