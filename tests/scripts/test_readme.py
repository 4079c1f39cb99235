"""Every block of every README runs, and prints what the page says; every command in them is one that is there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from pages import READMES, blocks, write

from minigpt.cli.main import main

README = READMES["README.md"]
USE = """
import asyncio, threading
from collections.abc import Iterator

import minigpt

lm = minigpt.load("demo", device="auto", offline=True)
text: str = lm.generate("Once", max_new_tokens=3, top_k=None, stop="x", stop_ids=[198]).text
texts: list[str] = [one.text for one in lm.generate(["a", [464, 3290]], minigpt.SamplingParams(stop=["\\n"]))]
samples: list[minigpt.Completion] = lm.generate("a", samples=2, temperature=0.5)
ids: list[int] = lm.tokenizer.encode("a") + lm.encode("b", special=True)
total: float = lm.score("a b").total + sum(score.total for score in lm.score(["a b", "c d"]))
lm.stream("a", max_new_tokens=1).close()


class Service:
    def __init__(self, lm: minigpt.LanguageModel) -> None:
        self.lm, self.slots = lm, threading.Semaphore(2)

    def pieces(self, prompt: str, n: int | None = None, seed: int | None = None) -> Iterator[str]:
        with self.slots, self.lm.stream(prompt, max_new_tokens=n, seed=seed, max_seconds=5) as stream:
            for step in stream:
                yield step.text
        print(stream.completion.finish_reason, len(stream.completion.ids))

    async def answer(self, prompt: str) -> str:
        return await asyncio.to_thread(lambda: "".join(self.pieces(prompt, 20)))
"""


@pytest.mark.parametrize(
    "readme",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "tests/README.md" else [])  # it runs `parity`
        for name in READMES
        if blocks(name, "python")
    ],
)
def test_the_python_of_a_page_prints_what_it_says(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves a model
    for words in (words for words in commands(readme) if "--record" in words):  # the record that the page's test reads
        assert main([*words[3:], "--offline"]) == 0
    names: dict[str, Any] = {"__name__": "readme"}
    for block in blocks(readme, "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, readme, "exec"), names)
            for test in [name for name in names if name.startswith("test_")]:
                names.pop(test)()
        assert block.shown in (None, printed.getvalue()), printed.getvalue()
        assert block.shown is not None or not block.code.startswith("print")
    if readme == "README.md":
        assert (tmp_path / "weights" / "copy" / "vocab.json").is_file()


@pytest.mark.slow
def test_python_written_as_on_the_pages_passes_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason='needs pip install -e ".[dev]"')
    (tmp_path / "use.py").write_text(USE)
    files = [str(path) for path in [tmp_path / "use.py", *write(tmp_path)]]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--scripts-are-modules"]
    done = subprocess.run([*command, *files], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def commands(readme: str) -> Iterator[list[str]]:
    """The commands of its sh blocks, without comments, pipes and `&&`."""
    for block in blocks(readme, "sh"):
        for line in block.code.splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                at = words.index("&&")
                yield words[:at]
                words = words[at + 1 :]
            if words:
                yield words


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the commands name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "Once", "max_new_tokens": 3}) + "\n")
    Path("book.txt").write_text("The cat sat on the mat.\n" * 20)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("readme", [name for name in READMES if blocks(name, "sh")])
def test_the_commands_of_a_page_work(readme: str, capfd: pytest.CaptureFixture[str]) -> None:
    """minigpt's own run, with the demo model in place of those that are not here; the others are looked at."""
    project = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]\n")[2]
    extras = set(re.findall(r"^([\w-]+) = \[", project.partition("\n\n")[0], re.MULTILINE))
    for words in commands(readme):
        program = Path(words[0]).name
        if program == "python" and words[1:3] == ["-m", "minigpt"]:
            arguments = ["demo" if word in ("gpt2", "gpt2-xl") else word for word in words[3:]]
            arguments = ["256" if word == "512" else word for word in arguments]  # the demo model's context
            model = ["--offline"] if "-m" in arguments else ["-m", "demo", "--offline"]
            assert main([*arguments, *model]) == 0, (words, capfd.readouterr().err)
            assert (ROOT / "minigpt").is_dir() and "error" not in capfd.readouterr().err
        elif program == "python" and words[1].startswith("scripts/"):
            source = (ROOT / words[1]).read_text("utf-8")
            own = [word for word in words if word.startswith("--") and "lm_eval" not in words[1]]
            assert all(f'"{option}"' in source for option in own), words
        elif program == "python" and words[1:3] == ["-m", "pytest"]:
            source = (ROOT / "tests" / "conftest.py").read_text("utf-8")
            assert all(f'"{word}"' in source for word in words if word.startswith("--")), words
        elif program == "pip":
            asked = re.findall(r"\[(.+)\]", " ".join(words))
            assert set(asked) <= extras, words
        else:
            assert program in ("hf", "python3", "nginx"), words  # fetches a model; makes an environment; a proxy


def test_powershell_says_what_sh_does() -> None:
    translated = [
        block.code.replace("\\", "/").replace("py -m", "python3 -m").replace(".venv/Scripts", ".venv/bin")
        for block in blocks("README.md", "powershell")
    ]
    shell = [block.code.replace(" &&\n", "\n").replace(" && ", "; ") for block in blocks("README.md", "sh")]
    assert len(translated) == 2 and translated == shell[:2]


def test_the_page_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 140
    for name, text in READMES.items():
        folder = (ROOT / name).parent
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in link and link != "convert_nanogpt.py":
                assert (folder / link).exists(), (name, link)
                assert not link.endswith(".png") or 1_000 < (folder / link).stat().st_size < 150_000


def test_prose_has_100_columns() -> None:
    for name, text in READMES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
        if name != "weights/demo/README.md":
            assert not [line for line in prose if len(line) > 100 and line[0] not in "|!"], name
