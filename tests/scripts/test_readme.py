"""The README's walk through multi-head attention runs, and prints what it says that it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Multi-head attention, step by step")[1].split("\n## ")[0]
# Each block of Python, with the text block that follows it, if one does.
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", SECTION, re.DOTALL)


def execute(code: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return printed.getvalue()


def test_the_walk_prints_what_it_says() -> None:
    assert len(BLOCKS) == 5
    names: dict[str, Any] = {}
    for code, expected in BLOCKS[:-1]:
        assert execute(code, names) == expected


def test_the_walk_looks_into_a_trained_head() -> None:
    if not (ROOT / "weights" / "demo" / "model.safetensors").is_file():
        pytest.skip("no demo model in weights/demo")
    printed = execute(BLOCKS[-1][0], {}).splitlines()
    assert printed and all(re.match(r"layer 0 head \d+: ' mat' attends most to '.+' \[", line) for line in printed)


def test_the_block_on_the_written_out_attention() -> None:
    [code] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "2359296" in code]
    assert execute(code, {}) == "True\n2359296\n"


def test_the_library_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a model
    [code] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "minigpt.save" in code]
    assert "Once" not in execute(code, {}) and (tmp_path / "weights" / "copy" / "model.safetensors").is_file()


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(pictures) == 2
    for picture in pictures:
        assert 1_000 < (ROOT / picture).stat().st_size < 150_000, picture
