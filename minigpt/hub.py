"""Find a model's files: "demo", an alias, a folder or a hub id becomes a folder on this machine.

Downloads go through huggingface_hub into Hugging Face's own cache: only the files that are read here, all from one
commit. Where the hub does not answer, or refuses, what is in the cache will do.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minigpt.errors import CheckpointError, MiniGPTError, ModelNotFoundError

ALIASES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 2**25  # bytes of a JSON or text file, or of a weight file's header: in memory it can grow thirtyfold
_MAX_DEPTH = 50  # of JSON: deeper is a trap for whoever compares or prints it
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# What is downloaded beside the weights, where the repository has it. The official ones hold gigabytes of other formats.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_HUB_ID = re.compile(r"(?=.{1,96}$)(?!.*(--|\.\.|\.git$))(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)  # the hub's rule
_PACKAGE = Path(__file__).resolve().parent
_TIMEOUT = 5  # seconds without an answer after which the hub counts as unreachable

downloading = False  # Whoever stops the process now should let it unwind: what has come of a file is then removed.


def locate(
    model: str | os.PathLike[str], *, revision: str | None = None, offline: bool = False, progress: bool = False
) -> Path:
    """The folder that holds a model's files, downloaded into Hugging Face's cache where needed.

    model: "demo", an alias (see ALIASES), an existing folder, or a hub id. "demo" and the aliases never mean a folder
    of that name in the current directory: write "./gpt2" for that. An alias looks in the checkout's weights/ALIAS
    first, unless a revision is given.
    revision: a branch, tag or commit on the hub.
    offline: no request, only the cache; HF_HUB_OFFLINE=1 does the same.
    progress: download bars on stderr, if that is a terminal.

    Raises ModelNotFoundError, which says what to do, or CheckpointError if the hub's repository has nothing to load.
    """
    name = os.fspath(model)
    if model == "demo" or model in ALIASES:
        places = [_PACKAGE.parent / "weights" / name, _PACKAGE / "data" / name]  # in a checkout; in a wheel
    else:
        places = [Path(name)]
    folder = next((place for place in places if name and os.path.isdir(place)), None)
    if folder is not None and revision is None:
        return folder
    if model in ALIASES:
        return _from_hub(name, ALIASES[name], revision, offline, progress)
    if folder is not None:
        raise ModelNotFoundError(f"{name} is a folder here, without revisions: leave out the revision {revision!r}")
    if model == "demo":
        raise ModelNotFoundError("the demo model is not part of this installation: use gpt2, or give a folder")
    if os.path.isfile(name):
        raise ModelNotFoundError(f"{name} is a file: give the folder that holds it")
    if os.path.islink(name):
        raise ModelNotFoundError(f"{name} is a link to nothing: delete it, or make it point to the folder of a model")
    first = name.partition("/")[0]
    if first not in (name, "", ".", "..") and os.path.isdir(first):
        raise ModelNotFoundError(f"there is no folder {name}. {_known_names(name)}")
    if not isinstance(model, str) or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{name!r} is neither an existing folder nor a hub name. {_known_names(name)}")
    return _from_hub(name, name, revision, offline, progress)


def _known_names(name: str) -> str:
    names = {"gpt2-small": "gpt2", "gpt2-base": "gpt2", "demo": "demo", **{alias: alias for alias in ALIASES}}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=1, cutoff=0.8)
    guess = f"Did you mean {names[close[0]]!r}? " if close else ""
    return f"{guess}Known names: demo, {', '.join(ALIASES)}"


def _from_hub(name: str, repo: str, revision: str | None, offline: bool, progress: bool) -> Path:
    """The snapshot folder of `repo`: brought up to date if the hub answers, else as it is in the cache."""
    from huggingface_hub import constants

    offline = offline or constants.HF_HUB_OFFLINE
    failure: Exception | None = None
    with _quiet():
        try:
            if not offline:
                return _download(repo, revision, progress)
        except CheckpointError:  # the hub answered: the repository holds no model that can be loaded
            raise
        except Exception as error:  # no network, no such name, no access, no room, ...
            failure = error
        folder = _cached(repo, revision) or _cached(name, revision)  # older tools cached gpt2 under its short name
    if folder is None:
        # Not chained to `failure`, whose text may quote the request with its token.
        raise ModelNotFoundError(_why_not(name, repo, revision, offline, failure))
    return folder


def _ask(repo: str, revision: str | None) -> tuple[str, dict[str, str | None]]:
    """The commit that `revision` stands for on the hub now, and its files' names with the sha256 of the large ones."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    # Not HfApi.model_info: newer ones first ask another address for a list of agents, 3 s more where nobody answers.
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    headers = {"user-agent": "minigpt", **({"authorization": f"Bearer {token}"} if token else {})}
    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision or 'main', safe='')}"
    response = get_session().get(url, params={"blobs": "true"}, headers=headers, timeout=_TIMEOUT)
    hf_raise_for_status(response)
    info = response.json()
    return info["sha"], {item["rfilename"]: (item.get("lfs") or {}).get("sha256") for item in info["siblings"]}


def _download(repo: str, revision: str | None, progress: bool) -> Path:
    """Fetch what is missing of `repo`, all from one commit, and give the folder. Cached already: a single request."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class NoBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    def fetch(name: str) -> Path:
        global downloading
        found = try_to_load_from_cache(repo, name, revision=commit)
        if isinstance(found, str):
            return Path(found)
        downloading = True
        try:
            path = Path(hf_hub_download(repo, name, revision=commit, tqdm_class=None if progress else NoBar))
        finally:
            downloading = False
        if names[name] not in (None, sha256(path)):  # the client compares the length only
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise CheckpointError(
                f"{name} of {repo} arrived damaged (its sha256 is not what the hub says) and was deleted: try again"
            )
        return path

    commit, names = _ask(repo, revision)
    if "config.json" not in names:
        raise CheckpointError(f"{repo} on the hub has no config.json: it is not a model")
    if WEIGHTS not in names and INDEX not in names:
        raise CheckpointError(f"{repo} on the hub has no safetensors weights, the only format that is read")
    # The weights come last, and the branch's name after them, so that what is cut short never looks like a model.
    for name in _SIDE_FILES:
        if name in names:
            fetch(name)
    for name in [WEIGHTS] if WEIGHTS in names else _shards(fetch(INDEX)):
        fetch(name)
    known = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(known, str) or Path(known).parent.name != commit:
        hf_hub_download(repo, "config.json", revision=revision)  # the cache learns which commit the branch is at
    return fetch("config.json").parent


def _cached(repo: str, revision: str | None) -> Path | None:
    """The snapshot of `repo` in the cache, if its weights are complete."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    try:
        weight_files(Path(found).parent)
    except CheckpointError:
        return None
    return Path(found).parent


def _why_not(name: str, repo: str, revision: str | None, offline: bool, failure: Exception | None) -> str:
    """Why the hub did not give a model, and what to do. Never quotes `failure`, which may hold a token."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(failure, LocalEntryNotFoundError) and isinstance(failure.__cause__, Exception):
        failure = failure.__cause__  # what went wrong before the cache was tried
    files = f"config.json generation_config.json {WEIGHTS} vocab.json merges.txt"
    folder = f"weights/{name.rpartition('/')[2]}"
    download = f"hf download {repo} {files} --local-dir {folder}"
    remedy = f"use the model demo (-m demo), or run `{download}` where there is a network and give that folder"
    status = getattr(getattr(failure, "response", None), "status_code", None)
    if offline:
        return (
            f"{name} is not in the cache {constants.HF_HUB_CACHE}, and offline mode is on: go online once, or {remedy}"
        )
    if isinstance(failure, GatedRepoError):
        return f"{repo} is gated: ask for access at https://huggingface.co/{repo}, then set HF_TOKEN to your token"
    if isinstance(failure, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r} on the hub"
    if isinstance(failure, RepositoryNotFoundError) or status in (401, 403, 404):
        token = ", or your token (HF_TOKEN) is expired or lacks the permission" if get_token() else ""
        return f"there is no model {name!r} on the hub, or it is private{token} (HTTP {status}). {_known_names(name)}"
    if isinstance(failure, OSError) and failure.errno:  # the disk, not the network
        problem = f"{failure.strerror} ({failure.filename or constants.HF_HUB_CACHE})"
        return (
            f"{name} could not be saved to the cache: {problem}. Set HF_HOME to a folder with room that can be written"
        )
    damaged = isinstance(failure, OSError) and "Consistency check" in str(failure)
    reason = f"HTTP {status}" if status else "a file of the wrong length" if damaged else type(failure).__name__
    return f"{name} is not in the cache and could not be fetched from the hub ({reason}): {remedy}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps huggingface_hub's log lines (this thread's only) and its warnings off stderr: our errors say it all."""
    from huggingface_hub.utils.logging import get_logger

    thread = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    handlers = list(get_logger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(of_others)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="huggingface_hub")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(of_others)


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
