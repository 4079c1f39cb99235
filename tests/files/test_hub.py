"""Finding and downloading a model, with the real huggingface_hub client against a hub on this machine.

The client reads its settings when it is imported, so each case runs `locate` in a process of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, environment

from minigpt.errors import CheckpointError, ModelNotFoundError
from minigpt.files import hub as hub_module
from minigpt.files import locate as locate_module
from minigpt.files.locate import locate
from minigpt.files.reading import ALIASES

ROOT = Path(__file__).resolve().parents[2]
REPO = "openai-community/gpt2"
TOKEN = "hf_secretsecretsecret"
WEIGHTS = bytes(range(256)) * 4000  # 1 MB; `locate` does not look inside
NEEDED = {
    "config.json": b'{"model_type": "gpt2"}',
    "generation_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "vocab.json": b'{"a": 0}',
    "merges.txt": b"#version: 0.2\n",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
}
# What the official repository holds besides.
OTHERS = [
    *("README.md", ".gitattributes", "64.tflite", "flax_model.msgpack", "onnx/decoder_model.onnx"),
    *("pytorch_model.bin", "rust_model.ot", "tf_model.h5", "generation_config_for_text_generation.json"),
]
FILES = {**NEEDED, **dict.fromkeys(OTHERS, b"needless")}
SCRIPT = """
import json, sys
from minigpt.files import hub
from minigpt.files.locate import locate
from minigpt.errors import MiniGPTError
options = json.loads(sys.argv[2])
hub._TIMEOUT = options.pop("timeout", hub._TIMEOUT)
exec(options.pop("first", ""))
try:
    print(locate(sys.argv[1], **options))
except MiniGPTError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(REPO, FILES)
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def command(name: str, **options: object) -> list[str]:
    return [sys.executable, "-c", SCRIPT, name, json.dumps(options)]


def find(
    url: str, home: Path, name: str = REPO, env: dict[str, str] | None = None, warned: str = "", **options: object
) -> str:
    """What `locate` gives, or the error's type and text. Nothing else may be printed, and never the token.

    warned: part of a warning, if the client may give one.
    """
    run = subprocess.run(command(name, **options), env=environment(url, home, **(env or {})), cwd=home.parent,
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (warned in run.stderr) if warned else run.stderr == ""
    assert TOKEN not in run.stdout + run.stderr
    assert run.stdout.count("\n") == 1
    return run.stdout.strip()


def test_first_download_takes_the_needed_files_only_and_the_second_run_asks_once(hub: HubServer, home: Path) -> None:
    folder = Path(find(hub.url, home, "gpt2"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED
    assert hub.asked() == set(NEEDED)
    assert not list(home.rglob("*.incomplete"))
    hub.requests.clear()
    assert find(hub.url, home, "gpt2") == str(folder)
    assert [(method, path) for method, path, _ in hub.requests] == [("GET", f"/api/models/{REPO}/revision/main")]


def test_offline_makes_no_request(hub: HubServer, home: Path) -> None:
    cold = find(hub.url, home, "gpt2", offline=True)
    assert cold.startswith("ModelNotFoundError: gpt2 is not in the cache") and "offline" in cold
    assert "hf download openai-community/gpt2 config.json" in cold and "--local-dir weights/gpt2" in cold
    assert hub.requests == []
    folder = find(hub.url, home, "gpt2")
    hub.requests.clear()
    assert find(hub.url, home, "gpt2", offline=True) == folder
    assert find(hub.url, home, "gpt2", env={"HF_HUB_OFFLINE": "1"}) == folder
    assert hub.requests == []


@pytest.mark.slow
def test_a_silent_network_costs_one_request_and_then_the_cache(hub: HubServer, home: Path) -> None:
    folder = find(hub.url, home)
    assert 1 <= hub_module._TIMEOUT <= 5
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url, connections = f"http://127.0.0.1:{silent.getsockname()[1]}", []
        threading.Thread(target=lambda: [connections.append(silent.accept()) for _ in range(9)], daemon=True).start()
        assert find(url, home, timeout=1) == folder
        assert len(connections) == 1
        cold = find(url, home.with_name("empty"), timeout=1)
        assert len(connections) == 2
    assert "could not be fetched from the hub (ReadTimeout)" in cold and "demo" in cold and "hf download" in cold


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, 500, 503, 429])
def test_a_hub_that_is_down(hub: HubServer, home: Path, status: int | None) -> None:
    folder = find(hub.url, home)
    hub.status, url = status, hub.url if status else "http://127.0.0.1:9"
    assert find(url, home) == folder
    cold = find(url, home.with_name("empty"))
    assert f"hub ({f'HTTP {status}' if status else 'ConnectError'})" in cold and "hf download" in cold


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "guess"),
    [("gpt2-smal", "'gpt2'"), ("gpt2-lrge", "'gpt2-large'"), ("me/distilgpt-2", "'distilgpt2'"), ("nobody/no", None)],
)
def test_an_unknown_name_is_repeated_and_known_ones_are_listed(
    hub: HubServer, home: Path, name: str, guess: str | None
) -> None:
    text = find(hub.url, home, name)
    assert f"no model {name!r} on the hub, or it is private" in text
    assert all(alias in text for alias in ALIASES) and "token" not in text
    assert (f"Did you mean {guess}" in text) if guess else ("Did you mean" not in text)
    assert "(HF_TOKEN) is expired" in find(hub.url, home, name, env={"HF_TOKEN": TOKEN})


@pytest.mark.slow
def test_a_stale_token_is_named_and_does_not_matter_once_cached(hub: HubServer, home: Path) -> None:
    hub.good_token = "hf_another"
    assert "(HF_TOKEN) is expired" in find(hub.url, home, env={"HF_TOKEN": TOKEN})
    folder = find(hub.url, home)
    assert find(hub.url, home, env={"HF_TOKEN": TOKEN}) == folder


@pytest.mark.slow
def test_odd_tokens(hub: HubServer, home: Path) -> None:
    folder = find(hub.url, home, env={"HF_TOKEN": ""})
    assert all("Authorization" not in {key.title() for key in headers} for _, _, headers in hub.requests)
    hub.good_token = TOKEN
    assert find(hub.url, home, env={"HF_TOKEN": f"{TOKEN}\n"}) == folder
    # Not a legal header: the HTTP library's own message would quote it.
    assert find(hub.url, home, env={"HF_TOKEN": f"{TOKEN}\x0bx"}) == folder
    assert "could not be fetched" in find(hub.url, home.with_name("empty"), env={"HF_TOKEN": f"{TOKEN}\x0bx"})


def test_gated(hub: HubServer, home: Path) -> None:
    hub.gated.add(REPO)
    assert f"{REPO} is gated: ask for access at https://huggingface.co/{REPO}" in find(hub.url, home)


@pytest.mark.slow
def test_revisions(hub: HubServer, home: Path) -> None:
    first = hub.branches[REPO]["main"]
    old = find(hub.url, home)
    second = hub.add(REPO, {**FILES, "config.json": b'{"model_type": "gpt2", "n_layer": 2}'})
    hub.add(REPO, {**FILES, "config.json": b'{"n_layer": 3}'}, branch="v3")
    new = find(hub.url, home)
    assert (Path(old).name, Path(new).name) == (first, second)
    assert find(hub.url, home, revision=first) == old
    assert json.loads(Path(find(hub.url, home, revision="v3"), "config.json").read_text()) == {"n_layer": 3}
    assert Path(new, "model.safetensors").read_bytes() == WEIGHTS  # the same blob: not fetched again
    assert sum(method == "GET" and path.startswith("/lfs") for method, path, _ in hub.requests) == 1
    assert "has no revision 'v9'" in find(hub.url, home, revision="v9")
    for revision, folder in ((None, new), (first, old)):
        assert find(hub.url, home, revision=revision, offline=True) == folder


def test_a_branch_that_moves_meanwhile_does_not_mix_commits(hub: HubServer, home: Path) -> None:
    first = hub.branches[REPO]["main"]

    def move(path: str) -> None:
        if "/resolve/" in path and hub.branches[REPO]["main"] == first:
            hub.add(REPO, dict.fromkeys(FILES, b"newer"))

    hub.hook = move
    folder = Path(find(hub.url, home))
    assert folder.name == first and hub.branches[REPO]["main"] != first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED


@pytest.mark.slow
def test_a_broken_connection_is_resumed(hub: HubServer, home: Path) -> None:
    weights = WEIGHTS * 12  # the client writes, and resumes at, 10 MiB at a time
    hub.add(REPO, {**FILES, "model.safetensors": weights})
    hub.cut = 11 << 20
    assert Path(find(hub.url, home), "model.safetensors").read_bytes() == weights
    ranges = [headers.get("Range") for method, path, headers in hub.requests if path.startswith("/lfs")]
    assert ranges == [None, f"bytes={10 << 20}-"]


@pytest.mark.slow
@pytest.mark.parametrize("update", [False, True])
def test_a_killed_download_does_not_count_as_a_model_and_is_repaired(hub: HubServer, home: Path, update: bool) -> None:
    old = find(hub.url, home) if update else None
    hub.add(REPO, {**FILES, "model.safetensors": WEIGHTS[::-1]})
    hub.cut = len(WEIGHTS) // 2
    hub.stall.set()
    process = subprocess.Popen(command(REPO), env=environment(hub.url, home))
    assert hub.stalled.wait(30)
    process.kill()
    process.wait()
    hub.stall.clear()
    hub.cut = None
    assert list(home.rglob("blobs/*"))  # it had begun
    found = find(hub.url, home, offline=True)
    assert found == old if update else "is not in the cache" in found
    assert Path(find(hub.url, home), "model.safetensors").read_bytes() == WEIGHTS[::-1]


IMPATIENT = {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}
LEFT_OVER = "*.*.incomplete"  # a name that no other process goes on with; older clients go on with HASH.incomplete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"closes": "/api/"}, "RemoteProtocolError"),
        ({"closes": "/resolve/"}, "RemoteProtocolError"),
        ({"cut": 1000, "cuts": 99}, "RemoteProtocolError"),
        ({"pause": 1.5}, "ReadTimeout"),
        ({"instead": {WEIGHTS: WEIGHTS[:-5]}}, "a file of the wrong length"),
        ({"instead": {WEIGHTS: WEIGHTS + b"more"}}, "a file of the wrong length"),
        ({"moved": {REPO: REPO}}, "TooManyRedirects"),
    ],
)
def test_a_hub_that_fails_is_one_sentence_and_leaves_nothing(
    hub: HubServer, home: Path, fault: dict[str, object], said: str
) -> None:
    vars(hub).update(fault)
    text = find(hub.url, home, env=IMPATIENT)
    assert f"could not be fetched from the hub ({said}): use the model demo" in text
    assert not list(home.rglob(LEFT_OVER)) and not list(home.rglob("model.safetensors"))
    vars(hub).update({"closes": None, "cut": None, "pause": 0, "instead": {}, "moved": {}})
    assert Path(find(hub.url, home), "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_a_slow_hub_and_one_that_breaks_off_again_and_again(hub: HubServer, home: Path) -> None:
    hub.cut, hub.cuts, hub.pause = 1000, 2, 0.2
    assert Path(find(hub.url, home, env=IMPATIENT), "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_weights_that_are_not_what_the_hub_says_are_deleted(hub: HubServer, home: Path, links: bool) -> None:
    """The client looks at the length only."""
    first = "" if links else "import os\ndef refuse(*_): raise OSError(1314, 'no')\nos.symlink = refuse"
    hub.instead = {WEIGHTS: WEIGHTS[::-1]}
    text = find(hub.url, home, first=first, warned="" if links else "symlinks")
    assert text.startswith(f"CheckpointError: model.safetensors of {REPO} arrived damaged") and "try again" in text
    assert all(path.read_bytes() != WEIGHTS[::-1] for path in home.rglob("*") if path.is_file())
    assert "is not in the cache" in find(hub.url, home, offline=True)
    hub.instead = {}
    assert (
        Path(find(hub.url, home, first=first, warned="" if links else "symlinks"), "model.safetensors").read_bytes()
        == WEIGHTS
    )


def test_a_renamed_repository_and_the_token_stays_with_the_hub(hub: HubServer, home: Path) -> None:
    hub.moved = {"old/name": REPO}
    assert Path(find(hub.url, home, "old/name", env={"HF_TOKEN": TOKEN}), "config.json").exists()
    tokens: dict[bool, set[str | None]] = {True: set(), False: set()}
    for _, path, headers in hub.requests:
        tokens[path.startswith("/lfs/")].add(
            {key.title(): value for key, value in headers.items()}.get("Authorization")
        )
    assert f"Bearer {TOKEN}" in tokens[False] and tokens[True] == {None}  # large files lie on another host


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["full", "limited"])
def test_a_disk_that_fills_up(hub: HubServer, home: Path, disk: str) -> None:
    first = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    if disk == "full":
        home.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", home], capture_output=True)
        if mounted.returncode:
            pytest.skip("a disk of this size cannot be mounted")
        first = ""
    try:
        text = find(hub.url, home, first=first, warned="free disk space" if disk == "full" else "")
        reason = "No space left on device" if disk == "full" else "File too large"
        assert f"could not be saved to the cache: {reason}" in text and "Set HF_HOME to a folder with room" in text
        assert not list(home.rglob(LEFT_OVER))
    finally:
        if disk == "full":
            subprocess.run(["umount", home], check=True)
    assert Path(find(hub.url, home), "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_two_processes_fetch_a_model_at_once(hub: HubServer, home: Path) -> None:
    hub.pause = 0.1
    both = [subprocess.Popen(command(REPO), env=environment(hub.url, home), cwd=home.parent, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for _ in range(2)]  # fmt: skip
    said = [process.communicate(timeout=60) for process in both]
    assert said[0] == said[1] and said[0][1] == ""
    folder = Path(said[0][0].strip())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED
    assert sum(method == "GET" and path.startswith("/lfs") for method, path, _ in hub.requests) == 1
    assert not list(home.rglob(LEFT_OVER))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_downloading_leaves_nothing(hub: HubServer, home: Path, number: int, code: int) -> None:
    hub.cut = len(WEIGHTS) // 2
    hub.stall.set()
    line = [sys.executable, "-m", "minigpt", "generate", "Once", "-m", REPO]
    process = subprocess.Popen(line, env=environment(hub.url, home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert hub.stalled.wait(30)
    process.send_signal(number)
    assert (process.communicate(timeout=30)[0], process.returncode) == (b"", code)
    assert list(home.rglob("blobs/*")) and not list(home.rglob(LEFT_OVER))


@pytest.mark.slow
def test_shards(hub: HubServer, home: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {name: WEIGHTS for name in index["weight_map"].values()}
    sharded = {
        **FILES,
        **shards,
        "stray.safetensors": WEIGHTS,
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    hub.add("me/both", sharded)
    assert not list(Path(find(hub.url, home, "me/both")).glob("model-0*"))
    del sharded["model.safetensors"]
    hub.add("me/sharded", sharded)
    folder = Path(find(hub.url, home, "me/sharded"))
    assert {path.name for path in folder.glob("*.safetensors")} == set(shards)
    (folder / "model-00002-of-00002.safetensors").unlink()  # as an interrupted download leaves it
    assert "is not in the cache" in find(hub.url, home, "me/sharded", offline=True)


@pytest.mark.parametrize(
    ("missing", "text"), [("model.safetensors", "no safetensors"), ("config.json", "no config.json")]
)
def test_a_repository_without_a_model(hub: HubServer, home: Path, missing: str, text: str) -> None:
    hub.add("me/bare", {name: content for name, content in FILES.items() if name != missing})
    assert find(hub.url, home, "me/bare").startswith(f"CheckpointError: me/bare on the hub has {text}")
    assert hub.asked() == set()


@pytest.mark.slow
def test_a_read_only_cache(hub: HubServer) -> None:
    # Root may write anywhere, so the process becomes somebody else, once a call of `locate` has imported what it needs.
    first = "import os; locate(sys.argv[1]); os.geteuid() or os.setuid(65534)"
    outer = Path(tempfile.mkdtemp())
    outer.chmod(0o755)
    home = outer / "home"
    try:
        folder = find(hub.url, home)
        for path in [home, *home.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o555)
        assert find(hub.url, home, first=first) == folder
        assert find(hub.url, home, first=first, offline=True) == folder
        refused = find(hub.url, home, first=first, revision=hub.add(REPO, {**FILES, "config.json": b"{}"}, "new"))
        assert "could not be saved to the cache: Permission denied" in refused and "HF_HOME" in refused
        assert find(hub.url, home, first=first, revision="main") == folder
    finally:
        for path in [home, *home.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(outer)


def test_a_disk_without_symlinks(hub: HubServer, home: Path) -> None:
    first = (
        "import os\ndef refuse(*_, **__): raise OSError(1314, 'a required privilege is not held')\nos.symlink = refuse"
    )
    folder = Path(find(hub.url, home, first=first, warned="symlinks"))  # the client says what it costs, and the cure
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED


def test_a_cache_filled_under_the_short_name(hub: HubServer, home: Path) -> None:
    hub.add("gpt2", FILES)
    hub.add("other/gpt2", FILES)
    folder = Path(find(hub.url, home, "other/gpt2"))
    folder.parent.parent.rename(folder.parent.parent.with_name("models--gpt2"))
    assert "models--gpt2/" in find(hub.url, home, "gpt2", offline=True)


@pytest.mark.slow
@pytest.mark.parametrize("progress", [False, True])
def test_progress_bars_on_a_terminal(hub: HubServer, home: Path, progress: bool) -> None:
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    run = subprocess.run(command(REPO, progress=progress), env=environment(hub.url, home), stderr=end,
                         stdout=subprocess.PIPE, timeout=60)  # fmt: skip
    os.write(end, b"END")
    shown = b""
    while not shown.endswith(b"END"):
        shown += os.read(terminal, 65536)
    os.close(terminal)
    os.close(end)
    assert b"snapshots" in run.stdout
    assert (b"config.json" in shown and b"1.02M/1.02M" in shown) if progress else shown == b"END"
    assert b"unauthenticated" not in shown


def test_the_host_program_is_left_as_it_was(hub: HubServer, home: Path) -> None:
    first = """
import atexit, huggingface_hub.file_download, logging, os, warnings
def state():
    handlers = logging.getLogger("huggingface_hub").handlers
    return (dict(os.environ), warnings.filters[:], [list(handler.filters) for handler in handlers], len(handlers),
            huggingface_hub.utils.are_progress_bars_disabled(), logging.getLogger("huggingface_hub").level)
before = state()
atexit.register(lambda: before == state() or os._exit(9))
"""
    assert "snapshots" in find(hub.url, home, first=first)


# Without the weights


@pytest.mark.slow
def test_without_the_weights(hub: HubServer, home: Path) -> None:
    folder = Path(find(hub.url, home, weights=False))
    small = NEEDED.keys() - {"model.safetensors"}
    assert {path.name for path in folder.iterdir()} == hub.asked() == small
    assert find(hub.url, home, weights=False, offline=True) == str(folder)
    assert "is not in the cache" in find(hub.url, home, offline=True)
    assert find(hub.url, home) == find(hub.url, home, offline=True) == str(folder)
    assert {path.name for path in folder.iterdir()} == NEEDED.keys()


def test_small_files_of_a_newer_commit_do_not_hide_older_weights(hub: HubServer, home: Path) -> None:
    old = find(hub.url, home)
    hub.add(REPO, {**FILES, "config.json": b'{"n_layer": 2}', "model.safetensors": WEIGHTS[::-1]})
    assert find(hub.url, home, weights=False) != old
    assert find(hub.url, home, offline=True) == old
    assert find(hub.url, home) != old


def test_files_of_another_tokenizer_are_fetched_too(hub: HubServer, home: Path) -> None:
    """Without them nobody would see that GPT-2's vocabulary is the wrong one."""
    hub.add("me/spiece", {**FILES, "spiece.model": b"x", "onnx/vocab.txt": b"x"})
    assert {path.name for path in Path(find(hub.url, home, "me/spiece")).iterdir()} == {*NEEDED, "spiece.model"}


def test_pickles_alone_have_a_tokenizer(hub: HubServer, home: Path) -> None:
    hub.add("me/bare", {name: content for name, content in FILES.items() if name != "model.safetensors"})
    assert Path(find(hub.url, home, "me/bare", weights=False), "vocab.json").is_file()


def test_no_filter_of_warnings_is_touched(hub: HubServer, home: Path) -> None:
    """catch_warnings sets the filters of the whole process, and two threads leave it with each other's."""
    first = """
import warnings
def refuse(*args, **kwargs): raise AssertionError("the filters belong to the program")
warnings.catch_warnings = warnings.filterwarnings = warnings.simplefilter = refuse
"""
    assert "snapshots" in find(hub.url, home, first="import huggingface_hub.file_download\n" + first)


# The rules of names, without a hub.


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout at tmp_path/checkout, and tmp_path/here to be in; the hub answers with what it was asked."""
    (tmp_path / "checkout" / "weights").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(locate_module, "_WEIGHTS", tmp_path / "checkout" / "weights")
    monkeypatch.setattr(locate_module, "_packaged_demo", lambda: None)
    monkeypatch.setattr(hub_module, "from_hub", lambda name, repo, *_: Path("hub", repo))
    return tmp_path


def test_demo_and_aliases_never_mean_a_folder_here(places: Path) -> None:
    for name in ("demo", "gpt2"):
        (places / "here" / name).mkdir()
    assert locate("gpt2") == Path("hub/openai-community/gpt2")
    assert locate("distilgpt2") == Path("hub/distilbert/distilgpt2")
    assert locate("./gpt2") == Path("gpt2") and locate(Path("gpt2")) == Path("gpt2")
    with pytest.raises(ModelNotFoundError, match="demo model is not part"):
        locate("demo")
    for name in ("demo", "gpt2"):
        (places / "checkout" / "weights" / name).mkdir()
        assert locate(name) == places / "checkout" / "weights" / name
    assert locate("gpt2", revision="main") == Path("hub/openai-community/gpt2")  # a folder has no revisions
    for name in ("demo", "./gpt2"):
        with pytest.raises(ModelNotFoundError, match="without revisions: leave out the revision 'main'"):
            locate(name, revision="main")


def test_a_folder_with_a_model_before_the_hub(places: Path) -> None:
    """A mere folder microsoft/ hid the hub's microsoft/DialoGPT-small."""
    assert locate("me/model") == Path("hub/me/model")
    (places / "here" / "me" / "model").mkdir(parents=True)
    assert locate("me/model") == Path("hub/me/model")
    (places / "here" / "me" / "model" / "config.json").touch()
    assert locate("me/model") == Path("me/model")
    (places / "here" / "empty").mkdir()
    assert locate("empty") == Path("hub/empty")
    assert locate("./empty") == locate(Path("empty")) == Path("empty")  # these are paths and nothing else
    for name in ("model.safetensors", "pytorch_model.bin", "ckpt.pt", "adapter_config.json", "checkpoint-7"):
        folder = places / "here" / f"with-{name}"
        (folder / name).mkdir(parents=True)
        try:
            assert locate(folder.name) == Path(folder.name)
        except CheckpointError as error:
            assert str(error).startswith(f"{folder.name} has no config.json")


def test_a_folder_without_a_model_is_named_where_the_hub_has_none(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise ModelNotFoundError("there is no such model on the hub")

    monkeypatch.setattr(hub_module, "from_hub", refuse)
    (places / "here" / "me" / "empty").mkdir(parents=True)
    for name, text in (
        ("me/empty", "me/empty is a folder here, but holds no model"),
        ("me/x", "there is no folder me/x"),
    ):
        with pytest.raises(ModelNotFoundError, match=f"^{text}; and there is no such model on the hub$"):
            locate(name)
    with pytest.raises(ModelNotFoundError, match=r"^there is no such model on the hub$"):
        locate("you/x")


@pytest.mark.parametrize("name", ["", "a/b/c", "./none", "/none/at/all", "..", "a--b", "x.git", "-x", "a\0b", "a" * 97])
def test_what_is_neither_a_folder_nor_a_hub_name(places: Path, name: str) -> None:
    if name == "..":
        assert locate(name) == Path("..")
        return
    with pytest.raises(ModelNotFoundError, match="neither an existing folder nor a hub name"):
        locate(name)


def test_a_path_is_never_a_hub_name_and_a_file_is_no_folder(places: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="neither an existing folder"):
        locate(Path("me/model"))
    (places / "here" / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match="is a file, or a link to nothing: give the folder"):
        locate("model.safetensors")
