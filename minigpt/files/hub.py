"""A model from the Hugging Face hub, by huggingface_hub into its own cache: only files that are read here. No torch.

locate.py imports this where it needs it: huggingface_hub takes half a second.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, errors, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import get_session, hf_raise_for_status, tqdm  # type: ignore[attr-defined]
from huggingface_hub.utils.logging import get_logger

from minigpt.errors import CheckpointError, ModelNotFoundError
from minigpt.files.reading import ALIASES, INDEX, SMALL_FILES, WEIGHTS, has_weights, sha256, shards

_TIMEOUT = 5  # seconds without an answer after which the hub counts as unreachable
downloading = False  # Whoever stops the process now should let it unwind: what has come of a file is then removed.


class _NoBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]


def known_names(name: str) -> str:
    """The names that need no hub id, and the one that may be meant."""
    names = {"gpt2-small": "gpt2", "gpt2-base": "gpt2", "demo": "demo", **{alias: alias for alias in ALIASES}}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=1, cutoff=0.8)
    guess = f"Did you mean {names[close[0]]!r}? " if close else ""
    return f"{guess}Known names: demo, {', '.join(ALIASES)}"


def from_hub(name: str, repo: str, revision: str | None, offline: bool, progress: bool, weights: bool) -> Path:
    """The snapshot folder of `repo`: brought up to date if the hub answers and agrees, else as it is in the cache."""
    offline = offline or constants.HF_HUB_OFFLINE
    failure: Exception | None = None
    try:
        if not offline:
            with _quiet():
                return _download(repo, revision, progress, weights)
    except CheckpointError:  # the hub answered: the repository holds no model that can be loaded
        raise
    except Exception as error:  # no network, no such name, no access, no room, ...
        failure = error
    # Older tools cached gpt2 under its short name.
    folder = _cached(repo, revision, weights) or _cached(name, revision, weights)
    if folder is None:
        # Not chained to `failure`, whose text may quote the request with its token.
        raise ModelNotFoundError(_why_not(name, repo, revision, offline, failure))
    return folder


def _ask(repo: str, revision: str | None) -> tuple[str, dict[str, str | None]]:
    """The commit that `revision` stands for on the hub now, and its files' names with the sha256 of the large ones."""
    # Not HfApi.model_info: newer ones first ask another address for a list of agents, 3 s more where nobody answers.
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    headers = {"user-agent": "minigpt", **({"authorization": f"Bearer {token}"} if token else {})}
    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision or 'main', safe='')}"
    response = get_session().get(url, params={"blobs": "true"}, headers=headers, timeout=_TIMEOUT)
    hf_raise_for_status(response)
    info = response.json()
    return info["sha"], {item["rfilename"]: (item.get("lfs") or {}).get("sha256") for item in info["siblings"]}


def _download(repo: str, revision: str | None, progress: bool, weights: bool) -> Path:
    """Fetch what is missing of `repo`, all from one commit, and give the folder. Cached already: a single request."""

    def fetch(name: str) -> Path:
        global downloading
        found = try_to_load_from_cache(repo, name, revision=commit)
        if isinstance(found, str):
            return Path(found)
        downloading = True
        try:
            path = Path(hf_hub_download(repo, name, revision=commit, tqdm_class=None if progress else _NoBar))
        finally:
            downloading = False
        if names[name] not in (None, sha256(path)):  # the client compares the length only
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            damage = f"{name} of {repo} arrived damaged (its sha256 is not what the hub says)"
            raise CheckpointError(f"{damage} and was deleted: try again")
        return path

    commit, names = _ask(repo, revision)
    if "config.json" not in names:
        raise CheckpointError(f"{repo} on the hub has no config.json: it is not a model")
    if weights and WEIGHTS not in names and INDEX not in names:
        raise CheckpointError(f"{repo} on the hub has no safetensors weights, the only format that is read")
    # The weights come last, and the branch's name after them, so that what is cut short never looks like a model.
    for name in (name for pattern in SMALL_FILES for name in fnmatch.filter(names, pattern) if "/" not in name):
        fetch(name)
    if weights:
        for name in [WEIGHTS] if WEIGHTS in names else shards(fetch(INDEX)):
            fetch(name)
    known = try_to_load_from_cache(repo, "config.json", revision=revision)
    # Without the weights, the branch's name stays with an older commit, whose weights may be here.
    if not isinstance(known, str) or (weights and Path(known).parent.name != commit):
        hf_hub_download(repo, "config.json", revision=revision)  # the cache learns which commit the branch is at
    return fetch("config.json").parent


def _cached(repo: str, revision: str | None, weights: bool) -> Path | None:
    """The snapshot of `repo` in the cache; if the weights are wanted, only a complete one."""
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(found, str) or (weights and not has_weights(Path(found).parent)):
        return None
    return Path(found).parent


def _why_not(name: str, repo: str, revision: str | None, offline: bool, failure: Exception | None) -> str:
    """Why the hub did not give a model, and what to do. Never quotes `failure`, which may hold a token."""
    if isinstance(failure, errors.LocalEntryNotFoundError) and isinstance(failure.__cause__, Exception):
        failure = failure.__cause__  # what went wrong before the cache was tried
    files = f"config.json generation_config.json {WEIGHTS} vocab.json merges.txt"
    download = f"hf download {repo} {files} --local-dir weights/{name.rpartition('/')[2]}"
    remedy = f"use the model demo (-m demo), or run `{download}` where there is a network and give that folder"
    status = getattr(getattr(failure, "response", None), "status_code", None)
    cache = constants.HF_HUB_CACHE
    if offline:
        return f"{name} is not in the cache {cache}, and offline mode is on: go online once, or {remedy}"
    if isinstance(failure, errors.GatedRepoError):
        return f"{repo} is gated: ask for access at https://huggingface.co/{repo}, then set HF_TOKEN to your token"
    if isinstance(failure, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r} on the hub"
    if isinstance(failure, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        token = ", or your token (HF_TOKEN) is expired or lacks the permission" if get_token() else ""
        return f"there is no model {name!r} on the hub, or it is private{token} (HTTP {status}). {known_names(name)}"
    if isinstance(failure, OSError) and failure.errno:  # the disk, not the network
        problem = f"{name} could not be saved to the cache: {failure.strerror} ({failure.filename or cache})"
        return f"{problem}. Set HF_HOME to a folder with room that can be written"
    damaged = isinstance(failure, OSError) and "Consistency check" in str(failure)
    reason = f"HTTP {status}" if status else "a file of the wrong length" if damaged else type(failure).__name__
    return f"{name} is not in the cache and could not be fetched from the hub ({reason}): {remedy}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the log lines that huggingface_hub writes in this thread off stderr: our errors say it all."""
    here, handlers = threading.get_ident(), [*get_logger("huggingface_hub").handlers]

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    for handler in handlers:
        handler.addFilter(of_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(of_others)
