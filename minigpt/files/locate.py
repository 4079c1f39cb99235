"""Find a model's files: "demo", an alias, a folder or a hub id becomes a folder on this machine. No torch."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from minigpt.errors import CheckpointError, ModelNotFoundError
from minigpt.files.reading import ALIASES, almost, is_model

Name = str | os.PathLike[str]  # of a model
_HUB_ID = re.compile(r"(?=.{1,96}$)(?!.*(--|\.\.|\.git$))(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)  # the hub's rule
_WEIGHTS = Path(__file__).resolve().parents[2] / "weights"  # in a checkout


def locate(
    model: Name, *, revision: str | None = None, offline: bool = False, progress: bool = False, weights: bool = True
) -> Path:
    """The folder that holds a model's files, downloaded into Hugging Face's cache where needed; arguments as for load.

    "demo" and the aliases never mean a folder of that name in the current directory: write "./gpt2" for that. An alias
    looks in the checkout's weights/ALIAS first, unless a revision is given. Where a name could be both, a folder that
    holds a model comes before the hub.
    offline: HF_HUB_OFFLINE=1 does the same.   weights: False neither downloads nor needs the weights.

    Raises ModelNotFoundError, or CheckpointError if the folder or the hub's repository has nothing to load.
    """
    folder = own_folder(model)
    name, known = os.fspath(model), model == "demo" or model in ALIASES
    hub_id = ALIASES.get(name, name) if isinstance(model, str) and _HUB_ID.fullmatch(name) and name != "demo" else None
    if folder is not None and (known or hub_id is None or is_model(folder)):
        if revision is None:
            if not (folder / "config.json").exists() and (why := almost(folder)):
                raise CheckpointError(f"{folder} has no config.json{why}")
            return folder
        if name not in ALIASES:
            raise ModelNotFoundError(f"{name} is a folder here, without revisions: leave out the revision {revision!r}")
    if model == "demo":
        raise ModelNotFoundError("the demo model is not part of this installation: use gpt2, or give a folder")
    if os.path.lexists(name) and folder is None and not known:
        raise ModelNotFoundError(f"{name} is a file, or a link to nothing: give the folder of a model")
    from minigpt.files import hub

    if hub_id is None:
        raise ModelNotFoundError(f"{name!r} is neither an existing folder nor a hub name. {hub.known_names(name)}")
    try:
        return hub.from_hub(name, hub_id, revision, offline, progress, weights)
    except ModelNotFoundError as error:
        if known or not os.path.isdir(name.partition("/")[0]):
            raise
        here = f"{name} is a folder here, but holds no model" if folder else f"there is no folder {name}"
        raise ModelNotFoundError(f"{here}; and {error}") from None


def own_folder(model: Name) -> Path | None:
    """The folder on this machine, outside the cache, that `model` stands for, if there is one. TypeError: no name."""
    if not isinstance(model, (str, os.PathLike)):
        advice = "minigpt.LanguageModel(model, tokenizer) takes a GPT2; of transformers' models, write one with "
        advice += "save_pretrained(folder), its tokenizer too, and load that folder"
        raise TypeError(f"model must be a name or a folder, not a {type(model).__name__}: {advice}")
    if model == "demo" or model in ALIASES:
        place = _WEIGHTS / os.fspath(model)
        return place if place.is_dir() else _packaged_demo() if model == "demo" else None
    return Path(model) if os.fspath(model) and os.path.isdir(model) else None


def _packaged_demo() -> Path | None:
    """The folder of the demo model in an installed package."""
    inside = resources.files("minigpt").joinpath("data", "demo")
    return inside if isinstance(inside, Path) and inside.is_dir() else None  # no Path: the package is in a zip
