"""A record as a file: JSON, a line for each result, so that two files can be compared line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError

FORMAT, SIZE = "minigpt parity record 1", 200_000  # bytes, at most


def write(path: str | os.PathLike[str], record: Mapping[str, Any]) -> int:
    """Write a record, a number's line each, whole or not at all; gives its bytes. Raises MiniGPTError if too large."""
    parts = []
    for key, value in record.items():
        whole = not isinstance(value, list) or key == "tokens"
        items = [] if whole else [json.dumps(item, allow_nan=False) for item in value]
        parts.append(f'"{key}": ' + ("[\n" + ",\n".join(items) + "\n]" if items else json.dumps(value)))
    data = "{\n" + ",\n".join(parts) + "\n}\n"
    if len(data) > SIZE:
        found = f"the record would have {len(data):,} bytes, of {SIZE:,} at most"
        raise MiniGPTError(f"{found}: give fewer or shorter prompts")
    Path(f"{path}.new").write_text(data, encoding="utf-8", newline="\n")
    os.replace(f"{path}.new", path)
    return len(data)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record in a file. Raises MiniGPTError if there is none."""
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MiniGPTError(f"{os.fspath(path)} is no record: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise MiniGPTError(f"{os.fspath(path)} is no record, which says {FORMAT!r}: make one with parity --record")
    return found
