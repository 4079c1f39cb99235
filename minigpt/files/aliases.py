"""The short names of models, and why a name gave none. No torch."""

from __future__ import annotations

import difflib

from minigpt.files.reading import WEIGHTS

ALIASES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}


def known_names(name: str) -> str:
    """The names that need no hub id, and the one that may be meant."""
    names = {"gpt2-small": "gpt2", "gpt2-base": "gpt2", "demo": "demo", **{alias: alias for alias in ALIASES}}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=1, cutoff=0.8)
    guess = f"Did you mean {names[close[0]]!r}? " if close else ""
    return f"{guess}Known names: demo, {', '.join(ALIASES)}"


def why_not(name: str, repo: str, revision: str | None, offline: bool, failure: Exception | None) -> str:
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
        return f"there is no model {name!r} on the hub, or it is private{token} (HTTP {status}). {known_names(name)}"
    if isinstance(failure, OSError) and failure.errno:  # the disk, not the network
        problem = f"{failure.strerror} ({failure.filename or constants.HF_HUB_CACHE})"
        return (
            f"{name} could not be saved to the cache: {problem}. Set HF_HOME to a folder with room that can be written"
        )
    damaged = isinstance(failure, OSError) and "Consistency check" in str(failure)
    reason = f"HTTP {status}" if status else "a file of the wrong length" if damaged else type(failure).__name__
    return f"{name} is not in the cache and could not be fetched from the hub ({reason}): {remedy}"
