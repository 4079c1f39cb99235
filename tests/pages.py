"""The fenced blocks of the READMEs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from conftest import ROOT

READMES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (ROOT / name for name in ("README.md", "minigpt/network/README.md", "scripts/README.md"))
} | {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(ROOT.glob("[tw]*s/**/README.md"))}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    shown: str | None  # by the ```text block that follows


def blocks(readme: str, *languages: str) -> list[Block]:
    """Those of one README, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", READMES[readme], re.DOTALL | re.MULTILINE)
    return [
        Block(language, code, following[1] if following[0] == "text" else None)
        for (language, code), following in pairwise([*found, ("", "")])
        if language in languages
    ]


def python(readme: str) -> str:
    """All its blocks of Python, as one program."""
    return "\n\n".join(block.code for block in blocks(readme, "python"))


def write(folder: Path) -> list[Path]:
    """That program of each README as a file: scripts/README.md becomes scripts_README.py."""
    paths = []
    for readme in READMES:
        if code := python(readme):
            paths.append(folder / readme.replace("/", "_").replace(".md", ".py"))
            paths[-1].write_text(code, encoding="utf-8")
    return paths
