"""A model's numbers in a file, to compare with on another day, machine or device, in another format or engine.

data/record.txt, which every file begins with, documents the format.
scripts/record_transformers.py writes such a file without minigpt's code.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minigpt import __version__
from minigpt.errors import MiniGPTError
from minigpt.files import checkpoint
from minigpt.files.reading import shipped
from minigpt.language_model import LanguageModel
from minigpt.network.model import undisturbed
from minigpt.parity.check import Check, allowed_error, format_of, measured, shown, tolerance
from minigpt.parity.figures import (
    Figures,
    apart_in_logits,
    apart_in_module,
    apart_in_new,
    figures,
    layer_figures,
    logit_figures,
    loss,
    random_numbers,
)
from minigpt.parity.record_file import FORMAT, read
from minigpt.parity.reference import PROMPTS, check_layers, choose_prompts
from minigpt.parity.tokenizer import changed_texts, misfits
from minigpt.prompts import Text

MODULES, PLACES = 520, 320  # in all prompts together, at most
SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


def record(lm: LanguageModel, prompts: Sequence[Text] = (), folder: Path | None = None) -> Figures:
    """What the model gives on the built-in prompts and these, as JSON values; `write` puts them into a file.

    folder: the model's, for the hashes of its files.
    Raises PromptError for a prompt that cannot be used, CheckpointError for a model that gives NaN.
    """
    chosen, texts = choose_prompts(lm, prompts), {*PROMPTS, *(one for one in prompts if isinstance(one, str))}
    made = {"engine": f"minigpt {__version__}", "torch": torch.__version__, "machine": platform.machine()}
    numbers, room, places = [], MODULES // (8 * lm.config.n_layer + 3), max(1, PLACES // len(chosen))
    with undisturbed(lm.model), torch.inference_mode():
        for at, ids in enumerate(chosen.values()):
            numbers += [{"prompt": at, **line} for line in figures(lm, ids, places, at < max(1, room))]
    return {
        "format": FORMAT,
        "about": shipped("record.txt").decode().splitlines(),
        "made": {**made, "device": lm.device.type, "dtype": format_of(lm)},
        "files": {file["name"]: file["sha256"] for file in checkpoint.describe(folder)["files"]} if folder else {},
        "model": {name: getattr(lm.config, name) for name in SHAPE},
        "tolerances": {kind: tolerance(lm, kind) for kind in ("layers", "logits")},
        "tokens": misfits(lm.limits.tokenizer) if lm.limits.tokenizer else None,
        "prompts": [{"text": name if name in texts else None, "ids": ids} for name, ids in chosen.items()],
        "numbers": numbers,
    }


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
    lines = [f"{sum(one.passed is False for one in checks)} of {len(checks)} recorded results are not kept:"]
    for one in (one for one in checks if one.passed is False):
        far = f"{one.difference:.1e} apart, {one.tolerance:.1e} allowed, " if one.tolerance else ""
        lines.append(f"  {one.name}: {far}{one.detail}")
    if len(lines) > 1 or not any(one.passed for one in checks):
        raise AssertionError("\n".join(lines))


def _compare(lm: LanguageModel, record: Mapping[str, Any]) -> Iterator[Check]:
    made, sizes = record["made"], {name: getattr(lm.config, name) for name in SHAPE}
    note = partial(Check, "recorded", dtype=format_of(lm))
    yield note("made by", None, ", ".join(map(str, made.values())), applies=False)
    if sizes != record["model"]:
        yield note("sizes", False, f"recorded of a model with {record['model']}, but this one has {sizes}")
        return
    if record["tokens"] is not None:
        wrong = changed_texts(lm, record["prompts"], record["tokens"])
        yield note("ids of the texts", not wrong, f"{len(wrong)} differ: {wrong[0]}" if wrong else "")
    for at, prompt in enumerate(record["prompts"]):
        lines = [line for line in record["numbers"] if line["prompt"] == at]
        yield from _compare_prompt(lm, prompt, lines, record["tolerances"], made)


def _compare_prompt(
    lm: LanguageModel, prompt: Figures, lines: list[Figures], least: Mapping[str, float], made: Mapping[str, str]
) -> Iterator[Check]:
    """Modules, logits, loss and new ids."""
    ids, name, cause = prompt["ids"], prompt["text"] or f"{len(prompt['ids'])} ids", ""
    if modules := [line for line in lines if "layer" in line]:
        ours = {line["layer"]: line for line in layer_figures(lm, ids)}
        apart = {line["layer"]: apart_in_module(ours.get(line["layer"]), line) for line in modules}
        layers = check_layers(lm, "recorded", name, apart, tolerance(lm, "layers", least["layers"]))
        cause = "" if layers.passed else f"; a layer {layers.detail}"
        yield layers
    places, worst, allowed, detail = [line for line in lines if "at" in line], 0.0, 0.0, ""
    for line, own in zip(places, logit_figures(lm, ids, [line["at"] for line in places]), strict=True):
        difference, figure = apart_in_logits(own, line)
        if not difference <= worst:
            worst, detail = difference, f"largest after token {line['at'] + 1}, in {figure}"
        ends = torch.tensor([line["mean"] - line["spread"], line["mean"] + line["spread"]], device="cpu")
        allowed = max(allowed, allowed_error(lm, ends, tolerance(lm, "logits", least["logits"])))
    yield measured(lm, "recorded", f"logits of {shown(name)}", (worst, allowed, detail + cause))
    for recorded in (line["loss"] for line in lines if "loss" in line):
        own_loss = loss(lm, ids)
        outcome = (abs(own_loss - recorded), allowed, f"{own_loss:.6g}, recorded {recorded:.6g}")
        yield measured(lm, "recorded", f"loss of {shown(name)}", outcome)
    for kind in ("greedy", "sampled"):
        new = [line for line in lines if "new" in line and ("seed" in line["options"]) == (kind == "sampled")]
        title = f"{kind} after {shown(name)}"
        why = ""
        if kind == "sampled" and (made["device"], made["dtype"]) != (lm.device.type, format_of(lm)):
            why = f"drawn on {made['device']} in {made['dtype']}: other kinds of device and formats draw other ids"
        elif any(line["random"] != random_numbers(lm, line["options"]["seed"]) for line in new if kind == "sampled"):
            why = f"torch {made['torch']} drew other random numbers from the seed than {torch.__version__} does here"
        if new and why:
            yield Check("recorded", title, None, why, dtype=format_of(lm), applies=False)
        elif new:
            yield measured(lm, "recorded", title, apart_in_new(lm, ids, new, 2 * allowed))
