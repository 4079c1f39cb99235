"""What the README's section on security says, as Python's audit events see it in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer, environment
from tiny import gpt2_folder

REPO = "me/model"
COMMANDS = [
    ["generate", "Hello", "-n", "3"],
    ["generate", "Hello", "-n", "3", "--temperature", "1", "--samples", "2", "--json"],
    ["score", "Hello there"],
    ["attention", "Hello there"],
    ["tokenize", "Hello"],
    ["info"],
]
# Runs the commands and then prints what was opened for reading, what was written or made, and everything else of note.
AUDIT = """
import json, os, sys
reads, writes, others = set(), set(), set()
def hook(event, args):
    if event == "open":
        writing = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        (writes if writing else reads).add(str(args[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.chmod"):
        writes.add(str(args[event in ("os.rename", "os.symlink", "os.link")]))
    elif event.partition(".")[0] in ("socket", "subprocess", "pickle") or event.startswith(("os.exec", "os.spawn",
            "os.posix_spawn", "os.system", "os.fork", "urllib", "ftplib", "smtplib", "webbrowser")):
        others.add(event)
sys.addaudithook(hook)
from minigpt.cli.main import main
codes = [main(command) for command in json.loads(sys.argv[1])]
print(json.dumps([codes, *map(sorted, (reads, writes, others))]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A model with everything beside it that could be run: code, pickles, templates."""
    folder = gpt2_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoModelForCausalLM": "modeling_trap.Trap",
        "AutoTokenizer": ["tokenization_trap.Trap", None],
    }
    trap = b"raise SystemExit('ran')"
    (folder / "config.json").write_text(json.dumps(config))
    traps = ["modeling_trap.py", "tokenization_trap.py", "pytorch_model.bin", "sitecustomize.py", "chat_template.jinja"]
    return {**{path.name: path.read_bytes() for path in folder.iterdir()}, **dict.fromkeys(traps, trap)}


def audit(url: str, home: Path, folder: str, *options: str) -> tuple[list[str], list[str], list[str]]:
    """What all commands do: the files read, outside Python's own; what is written; everything else of note."""
    commands = [[*command, "-m", folder, *options] for command in COMMANDS]
    run = subprocess.run([sys.executable, "-B", "-c", AUDIT, json.dumps(commands)], env=environment(url, home),
                         cwd=home.parent, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert run.returncode == 0 and run.stderr == "", run.stderr
    codes, reads, writes, others = json.loads(run.stdout.splitlines()[-1])
    assert codes == [0] * len(COMMANDS)
    return [path for path in reads if path.startswith(str(home.parent))], writes, others


def test_a_folder_is_only_read_and_nothing_in_it_is_run(files: dict[str, bytes], home: Path) -> None:
    folder = home.parent / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with HubServer() as hub:
        reads, writes, others = audit(hub.url, home, str(folder))  # online: a folder needs no network
        assert hub.requests == []
    assert {Path(path).name for path in reads} == {"config.json", "generation_config.json", "model.safetensors"}
    assert (writes, others) == ([], [])


def test_offline_makes_no_connection_and_writes_nothing(files: dict[str, bytes], home: Path) -> None:
    with HubServer() as hub:
        hub.add(REPO, files)
        _, writes, others = audit(hub.url, home, REPO)
        assert "socket.connect" in others and not any("pickle" in event or "subprocess" in event for event in others)
        # The client also works relative to handles of its own folders; nothing is left in the current directory.
        assert {path for path in writes if path.startswith("/") and not path.startswith(str(home))} == set()
        assert {path.name for path in home.parent.iterdir()} == {"home", "model"}
        assert not any("trap" in name or name.endswith((".bin", ".py", ".jinja")) for name in hub.asked())
        hub.requests.clear()
        reads, writes, others = audit(hub.url, home, REPO, "--offline")
        assert hub.requests == []
    assert (writes, others) == ([], [])
    read = {Path(path).name for path in reads if "snapshots" in path}
    assert read == {"config.json", "generation_config.json", "model.safetensors"}
