"""TODO."""

from __future__ import annotations

import os
import re
from pathlib import Path

from minigpt.errors import ModelNotFoundError
from minigpt.files.hub import ALIASES, _from_hub, _known_names

_HUB_ID = re.compile(r"(?=.{1,96}$)(?!.*(--|\.\.|\.git$))(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)  # the hub's rule


_PACKAGE = Path(__file__).resolve().parents[1]


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
