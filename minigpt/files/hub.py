"""A model from the Hugging Face hub. No torch.

Downloads go through huggingface_hub into Hugging Face's own cache: only the files that are read here, all from one
commit. Where the hub does not answer, or refuses, what is in the cache will do.
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minigpt.errors import CheckpointError, ModelNotFoundError
from minigpt.files.aliases import why_not
from minigpt.files.folder import shards, weight_files
from minigpt.files.reading import INDEX, OTHER_TOKENIZERS, TOKENIZER_FILES, WEIGHTS, sha256

# What is downloaded beside the weights, where the repository has it. The official ones hold gigabytes of other formats.
_SIDE_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, *OTHER_TOKENIZERS)
_TIMEOUT = 5  # seconds without an answer after which the hub counts as unreachable

downloading = False  # Whoever stops the process now should let it unwind: what has come of a file is then removed.


def from_hub(name: str, repo: str, revision: str | None, offline: bool, progress: bool, weights: bool) -> Path:
    """The snapshot folder of `repo`: brought up to date if the hub answers, else as it is in the cache.

    weights: False neither downloads nor needs the weights.
    """
    from huggingface_hub import constants

    offline = offline or constants.HF_HUB_OFFLINE
    failure: Exception | None = None
    with _quiet():
        try:
            if not offline:
                return _download(repo, revision, progress, weights)
        except CheckpointError:  # the hub answered: the repository holds no model that can be loaded
            raise
        except Exception as error:  # no network, no such name, no access, no room, ...
            failure = error
        # Older tools cached gpt2 under its short name.
        folder = _cached(repo, revision, weights) or _cached(name, revision, weights)
    if folder is None:
        # Not chained to `failure`, whose text may quote the request with its token.
        raise ModelNotFoundError(why_not(name, repo, revision, offline, failure))
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


def _download(repo: str, revision: str | None, progress: bool, weights: bool) -> Path:
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
    if weights and WEIGHTS not in names and INDEX not in names:
        raise CheckpointError(f"{repo} on the hub has no safetensors weights, the only format that is read")
    # The weights come last, and the branch's name after them, so that what is cut short never looks like a model.
    for name in (name for pattern in _SIDE_FILES for name in fnmatch.filter(names, pattern) if "/" not in name):
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
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    try:
        if weights:
            weight_files(Path(found).parent)
    except CheckpointError:
        return None
    return Path(found).parent


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the log lines that huggingface_hub writes in this thread off stderr: our errors say it all.

    Its warnings (a disk without symbolic links, or nearly full) pass: Python's filters belong to the whole process.
    """
    from huggingface_hub.utils.logging import get_logger

    thread = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    handlers = list(get_logger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(of_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(of_others)
