"""The figures of a record, which a change of any number behind them moves: defined in data/record.txt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from minigpt import scoring
from minigpt.decoding.params import SamplingParams
from minigpt.language_model import LanguageModel
from minigpt.network.model import Record
from minigpt.parity.check import parting
from minigpt.parity.reference import NEW_TOKENS, SETTINGS, SHORT, hidden_states, largest, outputs, race

Figures = dict[str, Any]
BEST = 5


@lru_cache(4)
def _signs(size: int) -> Tensor:
    """s(j,i), [8,size] int8: a hash, so that any engine can make them."""
    x = torch.arange(1, size + 1, device="cpu")
    for _ in range(2):
        x = ((x >> 16) ^ x) * 73244475 & 0xFFFFFFFF
    return (1 - 2 * (((x >> 16) ^ x) >> torch.arange(8, device="cpu")[:, None] & 1)).to(torch.int8)


def _projections(x: Tensor) -> Tensor:
    """[...,n] float64 -> [...,8]. The root mean square of their differences is about that of the numbers'."""
    size = x.shape[-1]
    return x @ _signs(1 << (size - 1).bit_length())[:, :size].double().t() / math.sqrt(size)


def figures(lm: LanguageModel, ids: list[int], places: int, layers: bool) -> Iterator[Figures]:
    """All of one prompt: with or without its layers, of the logits at up to `places` positions, the last among them."""
    if layers:
        yield from layer_figures(lm, ids)
    count = min(places, len(ids))
    yield from logit_figures(lm, ids, [len(ids) * n // count - 1 for n in range(1, count + 1)])
    if len(ids) > 1:
        yield {"loss": loss(lm, ids)}
    for options in SETTINGS if len(ids) < lm.limits.n_positions else ():
        yield drawn(lm, ids, {**options, "seed": 0} if "temperature" in options else options)


def layer_figures(lm: LanguageModel, ids: list[int]) -> Iterator[Figures]:
    """Each module's, in the order of the run, and each block's attention weights."""
    batch, collected = torch.tensor([ids[:SHORT]], device=lm.device), Record()
    for name, out in outputs(lm.model, lambda: lm.model.hidden(batch, record=collected)).items():
        yield _rows(name, out)
        if name.endswith("c_attn"):
            weights = collected.attentions[int(name.split(".")[1])]  # (1, H, T, T)
            yield _rows(name.replace("c_attn", "weights"), weights.flatten(0, 2))


def _rows(name: str, rows: Tensor) -> Figures:
    """Rows [T,W] count alike, however long they are: GPT-2's first one is fifty times as long as others."""
    lengths = (rows := rows.double().cpu()).norm(dim=-1, keepdim=True).clamp_min(1e-6)
    projections = _projections((rows / lengths * math.sqrt(rows.shape[-1])).flatten())
    length = float(f"{lengths.log().mean().exp():.7g}")
    return {"layer": name, "length": length, "projections": [round(x, 6) for x in projections.tolist()]}


def logit_figures(lm: LanguageModel, ids: list[int], places: Sequence[int]) -> Iterator[Figures]:
    """Those of the logits at these positions."""
    hidden = hidden_states(lm, ids)
    for at in places:
        logits = lm.model.head(hidden[at]).double().cpu()
        mean, best = logits.mean(), logits.topk(min(BEST, len(logits)))
        numbers = {"lse": logits.logsumexp(0), "mean": mean, "spread": (logits - mean).abs().max()}
        line: Figures = {"at": at, **{name: _digits(value) for name, value in numbers.items()}}
        line["projections"] = [_digits(value) for value in _projections(logits - mean).tolist()]
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        yield {**line, "best": [[id, _digits(value)] for id, value in pairs]}


def loss(lm: LanguageModel, ids: list[int]) -> float:
    """The mean negative log-probability of the ids after the first."""
    return _digits(-math.fsum(scoring.log_probabilities(lm.model, ids)) / (len(ids) - 1))


def drawn(lm: LanguageModel, ids: list[int], options: Mapping[str, Any], count: int = NEW_TOKENS) -> Figures:
    """Up to `count` new ids, and by how much each was ahead."""
    room = min(count, lm.limits.n_positions - len(ids))
    params = SamplingParams(**{**options, "max_new_tokens": room, "stop_ids": ()})
    history = [*ids, *(new := lm.generate(ids, params).ids)]
    logits = lm.model(torch.tensor([history[:-1]], device=lm.device))[0, len(ids) - 1 :].float().cpu()
    pairs = (race(lm, row, history[: len(ids) + at], at, params).topk(2).values for at, row in enumerate(logits))
    margins = [min(99.0, float(f"{best - second:.3g}")) for best, second in pairs]
    random = {"random": random_numbers(lm, options["seed"])} if "seed" in options else {}
    return {"options": dict(options), **random, "new": new, "margins": margins}


def random_numbers(lm: LanguageModel, seed: int) -> list[float]:
    """The first four that torch draws after the seed, Exp(1): another build of it may draw others."""
    q = torch.empty(lm.config.vocab_size, device=lm.device)
    q.exponential_(generator=torch.Generator(lm.device).manual_seed(seed))
    return [float(f"{x:.4g}") for x in q[:4].tolist()]


def apart_in_module(ours: Figures | None, theirs: Figures) -> float:
    """By how much the rows differ, of their length. ours: None where this module does not run."""
    return largest([_rms(ours, theirs), abs(math.log(ours["length"] / theirs["length"]))]) if ours else math.inf


def apart_in_logits(ours: Figures, theirs: Figures) -> tuple[float, str]:
    """By how much the logits differ at least, and in which figure."""
    known = dict(ours["best"])
    lowest = min(known.values())  # an id that is not among our best has a logit below these
    best = [abs(known[id] - value) if id in known else max(0.0, value - lowest) for id, value in theirs["best"]]
    apart = {"the best": largest(best), "the projections": _rms(ours, theirs)}
    apart |= {"the log-sum-exp": abs(ours["lse"] - theirs["lse"]), "the mean": abs(ours["mean"] - theirs["mean"])}
    worst = largest(apart.values())
    return worst, next((name for name, value in apart.items() if value == worst), "NaN")


def apart_in_new(lm: LanguageModel, ids: list[int], lines: list[Figures], most: float) -> tuple[float, float, str]:
    """New ids, up to the first near tie of each line: its margin, what is allowed, and the detail."""
    worst = (0.0, most, f"{sum(len(line['new']) for line in lines)} tokens")
    for line in lines:
        options, theirs = line["options"], line["new"]
        ours = drawn(lm, ids, options, len(theirs))["new"]
        if (at := parting(ours, theirs)) is not None:
            margin = line["margins"][at] if at < len(theirs) else math.inf
            allowed = most / options.get("temperature", 1.0)
            if worst[0] - worst[1] <= margin - allowed:
                tokens = f"{ours[at : at + 1]}, not {theirs[at : at + 1]}"
                detail = f"token {at + 1} is {tokens}, which was ahead by this much"
                worst = (margin, allowed, f"{detail}, with {options}" if options else detail)
    return worst


def _rms(ours: Figures, theirs: Figures) -> float:
    return math.dist(ours["projections"], theirs["projections"]) / math.sqrt(8)


def _digits(value: Any) -> float:
    return float(f"{value:.8g}")
