"""One comparison of `parity`, its line and its JSON, and how far numbers may be apart."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from minigpt.language_model import LanguageModel

# float32: fractions of the logits' spread, of a vector's length, and of 1. Measured on random weights in GPT-2's 124M
# layout, with a standard deviation (0.1) that makes rounding grow from block to block: 1.6e-5, 2.5e-5, 6.4e-5; a third
# of that with products.Plain, whose rounding is that of transformers.
TOLERANCES = {"logits": 4e-5, "layers": 1e-4, "attention": 1e-4}
# All three in other formats. Measured likewise, on the CPU, with 0.05: float16 4.3e-3, bfloat16 2.7e-2, int8 7.6e-2.
LOOSE = {"float16": 6e-3, "bfloat16": 6e-2, "int8": 0.12}
_HEADINGS = {"file": "the file", "tokenizer": "the tokenizer", "published": "published numbers"}
_HEADINGS |= {"recorded": "recorded numbers", "transformers": "compared with transformers in float32"}
# The groups that compare the model's numbers with others.
PROOFS = {"transformers": "transformers", "published": "published numbers", "recorded": "recorded numbers"}


@dataclass(frozen=True)
class Check:
    """One comparison.

    group: "file", "published", "tokenizer", "recorded" or "transformers".      name: which of them.
    dtype: the format that the model ran in; None where no model ran.
    passed: None where nothing was compared; `detail` then has the reason.
    applies: False where nothing is to be compared with this model; with True, passed None says that it failed to be.
    difference, tolerance: how far off it is, and may be; None where that is no number.
    layers: the difference in each block, where it was measured per block.
    source: who published the number.
    """

    group: str
    name: str
    passed: bool | None
    detail: str = ""
    difference: float | None = None
    tolerance: float | None = None
    dtype: str | None = None
    layers: list[float] | None = None
    source: str | None = None
    applies: bool = True


def shortfall(checks: Sequence[Check], strict: bool = False, require: Collection[str] = ()) -> str:
    """What keeps the checks from being a proof, in words: those that failed, and what was not compared; else "".

    strict: whatever applies must have been compared.       require: groups of PROOFS that must have been.
    Without either, one of PROOFS must have been.
    """
    failed = [check.name for check in checks if check.passed is False]
    compared = {check.group for check in checks if check.passed is not None}
    wanted = set(require) if compared & PROOFS.keys() else PROOFS.keys()
    reasons = {check.group: check.detail for check in checks if check.passed is None}
    missing = [group for group in PROOFS if group in wanted - compared]
    lost = [f"with {PROOFS[group]} ({reasons.get(group, 'none given')})" for group in missing]
    for check in checks if strict else ():
        if check.passed is None and check.applies and check.group not in missing:
            lost.append(f"{check.group}: {check.name} ({check.detail})")
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    parts = [f"fails: {'; '.join(failed[:3])}{more}"] if failed else []
    return "; ".join(parts + ([f"not compared: {', '.join(lost)}"] if lost else []))


def row(check: Check, previous: Check | None = None) -> str:
    """The check as a line of a table, after a heading where its group or format is another than the previous one's."""
    status = {True: "pass", False: "FAIL", None: "skip" if check.applies else "n/a "}[check.passed]
    figures = [f"{value:.1e}" if value is not None else "" for value in (check.difference, check.tolerance)]
    width = 62 if check.group in ("transformers", "recorded") else 28
    allowed = f"{'>' if check.passed is False else '<='} {figures[1]}" if figures[1] else ""
    line = f"  {status}  {check.name:<{width}} {figures[0]:>8} {allowed:>10}  {check.detail}".rstrip()
    if previous and (check.group, check.dtype) == (previous.group, previous.dtype):
        return line
    return f"\n{_HEADINGS[check.group]}{f', {check.dtype}' if check.dtype else ''}\n{line}"


def to_json(check: Check) -> dict[str, Any]:
    """The check as JSON values; figures that are not finite are null."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(check)), parse_constant=lambda name: None)
    return found


def format_of(lm: LanguageModel) -> str:
    """The format that the model runs in: "float32", ..."""
    return str(lm.dtype).removeprefix("torch.")


def tolerance(lm: LanguageModel, kind: str, recorded: float = 0.0) -> float:
    """Of a kind of TOLERANCES in the model's format; never less than that of the numbers it is compared with."""
    return max(recorded, LOOSE.get(format_of(lm), 0.0 if recorded else TOLERANCES[kind]))


def shown(name: str) -> str:
    """A prompt's name, short enough for a line."""
    return repr(name if len(name) <= 32 else name[:29] + "...")


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two lists of ids part; None where they are equal."""
    return next((at for at, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)


def one_line(error: Exception) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split())[:200]


def measured(lm: LanguageModel, group: str, name: str, figures: tuple[float, float, str], **more: Any) -> Check:
    """The check of (difference, tolerance, detail) for the model; a difference that is NaN fails."""
    difference, tolerance, detail = figures[0], float(f"{figures[1]:.3g}"), figures[2]
    return Check(group, name, difference <= tolerance, detail, difference, tolerance, format_of(lm), **more)


def spread(logits: Tensor) -> float:
    """The largest distance of a logit from their mean, over the last axis: what softmax sees of their size, for GPT-2's
    share an offset of about -100. Logits of -inf do not count."""
    finite = logits.isfinite()
    mean = logits.where(finite, 0.0).sum(-1, keepdim=True) / finite.sum(-1, keepdim=True)
    return float((logits - mean).abs().where(finite, 0.0).max())


def allowed_error(lm: LanguageModel, logits: Tensor, fraction: float) -> float:
    """How far off a logit may be: by a fraction of their spread, and by the rounding of the largest one in the
    activations' format (in bfloat16, numbers near -100 are 0.5 apart)."""
    size = float(logits.abs().where(logits.isfinite(), 0.0).max())
    computed = lm.model.wpe.weight.dtype  # not lm.dtype: on a CPU, only the weights are rounded to that
    return fraction * spread(logits) + (torch.finfo(computed).eps / 2 * size if fraction else 0.0)
