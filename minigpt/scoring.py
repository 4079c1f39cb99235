"""How likely a model finds given text: per-token log-probabilities, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from minigpt.errors import CheckpointError
from minigpt.model import GPT2


@dataclass(frozen=True)
class Score:
    """How likely a text is.

    ids: the tokens, the beginning-of-text token included if it was asked for.
    logprobs: of each token but the first, given those before it; natural logarithms, len(ids) - 1 of them (fewer with
        stride = n_positions, where no token that begins a window is scored).
    total, mean: their sum and mean.        perplexity: exp(-mean).
    bits_per_byte: -total / ln 2 by the UTF-8 bytes of the scored tokens; None where the model has no tokenizer.
    mean and perplexity are NaN, and bits_per_byte None, where no token is scored.
    """

    ids: list[int]
    logprobs: list[float]
    total: float
    mean: float
    perplexity: float
    bits_per_byte: float | None


def windows(n_tokens: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows (begin, end, first): each scores its tokens from `first` on, with those before as their context.

    The sliding-window procedure of https://huggingface.co/docs/transformers/perplexity: windows move on by `stride`.
    A window's own first token has no context, so it is scored only if the window before reached it (stride < size).
    """
    first = 0
    for begin in range(0, n_tokens, stride):
        end = min(begin + size, n_tokens)
        yield begin, end, max(first, begin + 1)
        first = end
        if end == n_tokens:
            return


def log_probabilities(
    model: GPT2, ids: list[int], stride: int | None = None, ablate: Collection[tuple[int, int]] = ()
) -> tuple[list[int], list[float]]:
    """The tokens that are scored, and the log-probability of each given those before it in its window.

    Without a stride there is one window, and all tokens but the first are scored.
    Raises CheckpointError if the model's logits are not finite.
    """
    size = model.config.n_positions
    scored: list[int] = []
    logprobs: list[float] = []
    for begin, end, first in windows(len(ids), size, stride or size):
        if first >= end:
            continue
        window = torch.tensor(ids[begin:end], device=model.wte.weight.device)
        hidden = model.hidden(window[None, :-1], ablate=ablate)[0, first - begin - 1 :]
        targets = window[first - begin :]
        # 64 x V floats at a time, not T x V.
        for rows, wanted in zip(torch.split(hidden, 64), torch.split(targets, 64), strict=True):
            scores = model.head(rows).float().log_softmax(-1)
            logprobs += scores.gather(1, wanted[:, None])[:, 0].tolist()
        scored += ids[first:end]
    if not all(map(math.isfinite, logprobs)):
        raise CheckpointError("the model's logits hold NaN or infinity: its weights are damaged")
    return scored, logprobs


def summarise(ids: list[int], logprobs: list[float], n_bytes: int | None) -> Score:
    """The figures of a Score. n_bytes: of the scored tokens, None where unknown."""
    total = math.fsum(logprobs)
    mean = total / len(logprobs) if logprobs else math.nan
    bits = -total / math.log(2) / n_bytes if n_bytes else None
    perplexity = math.inf if mean < -700 else math.exp(-mean)
    return Score(ids, logprobs, total, mean, perplexity, bits)
