"""A model's numbers in a file, to compare with on another day, machine or device, in another format or engine.

data/record.txt, which every file begins with, documents the format.
scripts/record_transformers.py writes such a file without minigpt's code.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from minigpt import __version__
from minigpt.errors import MiniGPTError
from minigpt.files import checkpoint
from minigpt.interpret.page import shipped
from minigpt.language_model import LanguageModel
from minigpt.network.model import undisturbed
from minigpt.parity.check import LOGITS, LOOSE, VECTORS, Check, allowed_error, format_of, measured, shown, tolerance_of
from minigpt.parity.figures import Figures, drawn, layer_figures, logit_figures, loss
from minigpt.parity.reference import PROMPTS, SETTINGS, check_layers, choose_prompts, largest
from minigpt.parity.tokenizer import misfits
from minigpt.prompts import Text

FORMAT, SIZE = "minigpt parity record 1", 200_000  # bytes, at most
MODULES, PLACES = 520, 320  # at most, of all prompts together
SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


def record(lm: LanguageModel, prompts: Sequence[Text] = (), folder: Path | None = None) -> Figures:
    """What the model gives on the built-in prompts and these, as JSON values; `write` puts them into a file.

    folder: the model's, for the hashes of its files.
    Raises PromptError for a prompt that cannot be used, CheckpointError for a model that gives NaN.
    """
    chosen, texts = choose_prompts(lm, prompts), {*PROMPTS, *(one for one in prompts if isinstance(one, str))}
    made = {"engine": f"minigpt {__version__}", "torch": torch.__version__, "machine": platform.machine()}
    with undisturbed(lm.model), torch.inference_mode():
        numbers = [
            {"prompt": at, **line}
            for at, ids in enumerate(chosen.values())
            for line in _numbers(lm, ids, max(1, PLACES // len(chosen)), at)
        ]
    return {
        "format": FORMAT,
        "about": shipped("record.txt").splitlines(),
        "made": {**made, "device": lm.device.type, "dtype": format_of(lm)},
        "files": {file["name"]: file["sha256"] for file in checkpoint.describe(folder)["files"]} if folder else {},
        "model": {name: getattr(lm.config, name) for name in SHAPE},
        "tolerances": {"layers": tolerance_of(lm, VECTORS), "logits": tolerance_of(lm, LOGITS)},
        "tokens": misfits(lm.limits.tokenizer) if lm.limits.tokenizer else None,
        "prompts": [{"text": name if name in texts else None, "ids": ids} for name, ids in chosen.items()],
        "numbers": numbers,
    }


def _numbers(lm: LanguageModel, ids: list[int], places: int, before: int) -> Iterator[Figures]:
    """Those of one prompt, of its modules only while there is room after the prompts before it."""
    if not before or (8 * lm.config.n_layer + 3) * (before + 1) <= MODULES:
        yield from layer_figures(lm, ids)
    count = min(places, len(ids))
    yield from logit_figures(lm, ids, [len(ids) * n // count - 1 for n in range(1, count + 1)])
    if len(ids) > 1:
        yield {"loss": loss(lm, ids)}
    for options in SETTINGS if len(ids) < lm.limits.n_positions else ():
        yield drawn(lm, ids, {**options, "seed": 0} if "temperature" in options else options)


def write(path: str | os.PathLike[str], record: Mapping[str, Any]) -> int:
    """Write a record, a number's line each, whole or not at all; gives its bytes. Raises MiniGPTError if too large."""
    parts = []
    for key, value in record.items():
        whole = not isinstance(value, list) or key == "tokens"
        items = [] if whole else [json.dumps(item, allow_nan=False) for item in value]
        parts.append(f'"{key}": ' + ("[\n" + ",\n".join(items) + "\n]" if items else json.dumps(value)))
    data = "{\n" + ",\n".join(parts) + "\n}\n"
    if len(data) > SIZE:
        raise MiniGPTError(
            f"the record would have {len(data):,} bytes, of {SIZE:,} at most: give fewer or shorter prompts"
        )
    Path(f"{path}.new").write_text(data, encoding="utf-8", newline="\n")
    os.replace(f"{path}.new", path)
    return len(data)


def read(path: str | os.PathLike[str]) -> Figures:
    """The record in a file. Raises MiniGPTError if there is none."""
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MiniGPTError(f"{os.fspath(path)} is no record: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise MiniGPTError(f"{os.fspath(path)} is no record, which says {FORMAT!r}: make one with parity --record")
    return found


def compare(lm: LanguageModel, record: Mapping[str, Any]) -> list[Check]:
    """The model against each number of a record. Raises MiniGPTError for one that is damaged."""
    try:
        with undisturbed(lm.model), torch.inference_mode():
            return list(_compare(lm, record))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise MiniGPTError(f"the record is damaged ({type(error).__name__}: {error}): make it again") from error


def check(lm: LanguageModel, record: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """For a test: raises AssertionError that says which prompt, layer and difference, where a number was not kept.

    record: what `record` gave, or the name of its file.
    """
    __tracebackhide__ = True  # for pytest: the message says it all
    checks = compare(lm, record if isinstance(record, Mapping) else read(record))
    failed = [one for one in checks if one.passed is False]
    lines = [f"{one.name}: {one.difference} apart, {one.tolerance} allowed, {one.detail}" for one in failed]
    if failed or not any(one.passed for one in checks):
        raise AssertionError("\n  ".join([f"{len(failed)} of {len(checks)} recorded results are not kept:", *lines]))


def _compare(lm: LanguageModel, record: Mapping[str, Any]) -> Iterator[Check]:
    made, sizes = record["made"], {name: getattr(lm.config, name) for name in SHAPE}
    dtype = format_of(lm)
    yield Check("recorded", "made by", None, ", ".join(map(str, made.values())), dtype=dtype, applies=False)
    if sizes != record["model"]:
        yield Check(
            "recorded",
            "sizes",
            False,
            f"recorded of a model with {record['model']}, but this one has {sizes}",
            dtype=dtype,
        )
        return
    if record["tokens"] is not None:
        yield _compare_texts(lm, record)
    for at, prompt in enumerate(record["prompts"]):
        lines = [line for line in record["numbers"] if line["prompt"] == at]
        yield from _compare_numbers(lm, prompt, lines, record)


def _compare_texts(lm: LanguageModel, record: Mapping[str, Any]) -> Check:
    """The tokenizer: the prompts' ids, and the vocabulary's own texts."""
    wrong = []
    try:
        for prompt in record["prompts"]:
            ids, expected = lm.encode(prompt["text"] or "")[: lm.limits.n_positions], prompt["ids"]
            if prompt["text"] is not None and ids != expected:
                at = next(n for n, (a, b) in enumerate(zip_longest(ids, expected)) if a != b)
                wrong.append(
                    f"token {at + 1} of {shown(prompt['text'])} is {ids[at : at + 1]}, not {expected[at : at + 1]}"
                )
        changed = sorted({*misfits(lm.tokenizer)} ^ {*record["tokens"]})
        wrong += [f"the text of id {id} encodes to other ids" for id in changed]
    except MiniGPTError as error:
        wrong.append(str(error))
    detail = f"{len(wrong)} differ: {wrong[0]}" if wrong else ""
    return Check("recorded", "ids of the texts", not wrong, detail, dtype=format_of(lm))


def _compare_numbers(
    lm: LanguageModel, prompt: Figures, lines: list[Figures], record: Mapping[str, Any]
) -> Iterator[Check]:
    """Modules, logits, loss and ids of one prompt."""
    ids, name, wide = prompt["ids"], prompt["text"] or f"{len(prompt['ids'])} ids", LOOSE.get(format_of(lm), 0.0)
    cause, allowed = "", 0.0
    if modules := {line["layer"]: line for line in lines if "layer" in line}:
        own = {line["layer"]: line for line in layer_figures(lm, ids)}
        apart = {layer: _apart_in_module(own[layer], line) for layer, line in modules.items()}
        layers = check_layers(lm, "recorded", name, apart, max(wide, record["tolerances"]["layers"]))
        cause = "" if layers.passed else f"; a layer {layers.detail}"
        yield layers
    worst = (0.0, 0.0, "")
    places = [line for line in lines if "at" in line]
    for line, found in zip(places, logit_figures(lm, ids, [line["at"] for line in places]), strict=True):
        ends = torch.tensor([line["mean"] - line["spread"], line["mean"] + line["spread"]])
        allowed = max(allowed, allowed_error(lm, ends, max(wide, record["tolerances"]["logits"])))
        apart = _apart_in_logits(found, line)
        at = max(apart, key=lambda figure: math.inf if math.isnan(apart[figure]) else apart[figure])
        if not apart[at] <= worst[0]:
            worst = (apart[at], 0.0, f"largest after token {line['at'] + 1}, in {at}")
    if places:
        yield measured(lm, "recorded", f"logits of {shown(name)}", (worst[0], allowed, worst[2] + cause))
    for line in (line for line in lines if "loss" in line):
        ours = loss(lm, ids)
        figures = (abs(ours - line["loss"]), allowed, f"{ours:.6g}, recorded {line['loss']:.6g}")
        yield measured(lm, "recorded", f"loss of {shown(name)}", figures)
    for kind in ("greedy", "sampled"):
        if new := [line for line in lines if "new" in line and _kind(line) == kind]:
            yield _compare_new(lm, f"{kind} after {shown(name)}", ids, new, 2 * allowed, record["made"])


def _apart_in_module(ours: Figures, theirs: Figures) -> float:
    return largest([_rms(ours, theirs), abs(math.log(ours["length"] / theirs["length"]))])


def _apart_in_logits(ours: Figures, theirs: Figures) -> dict[str, float]:
    known = dict(ours["best"])
    least = min(known.values())  # an id that is not among our best has a logit below these
    best = [abs(known[id] - value) if id in known else max(0.0, value - least) for id, value in theirs["best"]]
    apart = {"the best": largest(best), "the projections": _rms(ours, theirs)}
    return apart | {
        name: abs(ours[key] - theirs[key]) for key, name in (("lse", "the log-sum-exp"), ("mean", "the mean"))
    }


def _rms(ours: Figures, theirs: Figures) -> float:
    return math.dist(ours["projections"], theirs["projections"]) / math.sqrt(len(theirs["projections"]))


def _kind(line: Figures) -> str:
    return "sampled" if line["options"].get("temperature") else "greedy"


def _compare_new(
    lm: LanguageModel, name: str, ids: list[int], lines: list[Figures], tolerance: float, made: Mapping[str, Any]
) -> Check:
    """New ids, up to the first near tie of each line."""
    if _kind(lines[0]) == "sampled" and (made["device"], made["dtype"]) != (lm.device.type, format_of(lm)):
        why = f"drawn on {made['device']} in {made['dtype']}: other kinds of device and formats draw other ids"
        return Check("recorded", name, None, why, dtype=format_of(lm), applies=False)
    worst = (0.0, tolerance, f"{sum(len(line['new']) for line in lines)} tokens")
    for line in lines:
        options, theirs = line["options"], line["new"]
        new = drawn(lm, ids, options, len(theirs))["new"]
        at = next((n for n, (a, b) in enumerate(zip_longest(new, theirs)) if a != b), None)
        if at is not None:
            margin = line["margins"][at] if at < len(theirs) else math.inf
            allowed = tolerance / options.get("temperature", 1.0)
            if worst[0] - worst[1] <= margin - allowed:
                what = f"token {at + 1} is {new[at : at + 1]}, not {theirs[at : at + 1]}, which was ahead by this much"
                worst = (margin, allowed, f"{what}, with {options}" if options else what)
    return measured(lm, "recorded", name, worst)
