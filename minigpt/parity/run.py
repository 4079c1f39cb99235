"""`parity` for a model by name: its file, the published numbers, the tokenizer, and transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minigpt.files import checkpoint, locate
from minigpt.files.reading import ALIASES
from minigpt.loading import load
from minigpt.network.device import find_device, find_dtype
from minigpt.parity import recorded
from minigpt.parity.check import Check
from minigpt.parity.published import check_published, identify, read
from minigpt.parity.reference import choose_prompts, compare, load_reference
from minigpt.parity.tokenizer import check_tokenizer
from minigpt.prompts import Text


def run(
    model: str | os.PathLike[str] = "gpt2",
    *,
    prompts: Sequence[Text] = (),
    dtypes: Sequence[str] = ("float32",),
    device: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    progress: bool = False,
    against: Mapping[str, Any] | None = None,
) -> Iterator[Check]:
    """Check a model against the published numbers, if its file is an official one, a record and transformers.

    prompts: texts, or lists of ids, to compare on besides the built-in ones.
    against: a record, see recorded.py.         The other arguments are those of minigpt.load.
    Gives each Check as it is done. Raises as load does, and PromptError for a prompt that is too long. A device or a
    format that is not there is refused before any work.
    """
    place = find_device(device)
    for dtype in dtypes:
        if dtype != "float32":  # which is never refused, and of which load may warn
            find_dtype(dtype, place)
    folder = locate.locate(model, revision=revision, offline=offline, progress=progress)
    data = read()
    alias = str(model) if model in ALIASES and revision is None else None
    official, check = identify(checkpoint.describe(folder), data["files"], alias)
    yield check
    reference: Any = None
    for number, dtype in enumerate(dict.fromkeys(dtypes)):
        lm = load(folder, device=device, dtype=dtype)
        chosen = choose_prompts(lm, prompts)
        if not number:
            yield from check_tokenizer(folder, lm, data["tokenizer"], official is not None)
            reference = load_reference(folder, lm)
        entries = [entry for entry in data["checks"] if entry["model"] == official]
        if entries:
            yield from check_published(lm, entries)
        else:
            why = f"of {official} none are shipped" if official else "they hold for the official files only"
            yield Check("published", "numbers", None, why, dtype=dtype, applies=False)
        if against is not None:
            yield from recorded.compare(lm, against)
        if isinstance(reference, Check):
            yield reference
        else:
            yield from compare(lm, reference, chosen)


def make_record(
    model: str | os.PathLike[str], *, prompts: Sequence[Text] = (), dtype: str = "float32", device: str, **where: Any
) -> dict[str, Any]:
    """A record of a model by name; the arguments are those of `run`."""
    folder = locate.locate(model, **where)
    return recorded.record(load(folder, device=device, dtype=dtype), prompts, folder)
