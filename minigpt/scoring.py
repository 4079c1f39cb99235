"""How likely a model finds given text: per-token log-probabilities, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minigpt.errors import CheckpointError
from minigpt.network.model import GPT2

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer


_TOKENS = 4096  # about how many go through the model at once


@dataclass(frozen=True)
class Score:
    """How likely a text is.

    ids: the tokens, the beginning-of-text token included if it was asked for.
    logprobs: of each token but the first, given those before it; natural logarithms, len(ids) - 1 of them (fewer with
        stride = n_positions, where no token that begins a window is scored).
    total, mean: their sum and mean.
    perplexity: exp(-mean) or, with a stride, by the loop of https://huggingface.co/docs/transformers/perplexity:
        it weights each window's mean loss by one token fewer than it has (but for the first window), so that with a
        stride of very few tokens it all but counts the first window alone. exp(-mean) weights every token the same.
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


def evaluate(
    model: GPT2,
    tokenizer: Tokenizer | None,
    ids: Sequence[int],
    stride: int | None = None,
    ablate: Collection[tuple[int, int]] = (),
    *,
    keep: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Score `ids`, in one window or, with a stride, in several.

    keep: False leaves the Score's ids and logprobs empty, so that memory does not grow with the text.
    progress: called with the number of tokens that are done.
    Raises CheckpointError if the model's logits are not finite.
    """
    logprobs: list[float] = []
    total = weighted = 0.0
    count = weights = n_bytes = 0
    for first, end, part in scored_windows(model, ids, stride, ablate):
        subtotal = math.fsum(part)
        # The page counts one loss too few where the window's first new token had a context, as all but the first have.
        weight = len(part) - (1 if count and stride != model.config.n_positions else 0)
        weighted += subtotal / len(part) * weight
        weights += weight
        total += subtotal
        count += len(part)
        if tokenizer is not None:
            n_bytes += sum(len(tokenizer.token_bytes(id)) for id in ids[first:end])
        if keep:
            logprobs += part
        if progress:
            progress(end)
    return Score(
        list(ids) if keep else [],
        logprobs,
        total,
        mean=total / count if count else math.nan,
        perplexity=_exp(-weighted / weights) if weights else math.nan,
        bits_per_byte=-total / math.log(2) / n_bytes if n_bytes else None,
    )


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def log_probabilities(
    model: GPT2, ids: Sequence[int], stride: int | None = None, ablate: Collection[tuple[int, int]] = ()
) -> tuple[list[int], list[float]]:
    """The tokens that are scored, and the log-probability of each given those before it in its window.

    Without a stride there is one window, and all tokens but the first are scored.
    Raises CheckpointError if the model's logits are not finite.
    """
    scored: list[int] = []
    logprobs: list[float] = []
    for first, end, part in scored_windows(model, ids, stride, ablate):
        scored += ids[first:end]
        logprobs += part
    return scored, logprobs


def scored_windows(
    model: GPT2, ids: Sequence[int], stride: int | None = None, ablate: Collection[tuple[int, int]] = ()
) -> Iterator[tuple[int, int, list[float]]]:
    """The same window by window, as (first, end, log-probabilities of ids[first:end]).

    Several full windows go through the model at a time. Raises as log_probabilities does.
    """
    size = model.config.n_positions
    rows: list[tuple[int, int, int]] = []
    for window in windows(len(ids), size, stride or size):
        begin, end, first = window
        if first == end:
            continue
        if rows and (end - begin < size or len(rows) * size >= _TOKENS):
            yield from _score(model, ids, rows, ablate)
            rows = []
        rows.append(window)
    if rows:
        yield from _score(model, ids, rows, ablate)


@torch.inference_mode()
def _score(
    model: GPT2, ids: Sequence[int], rows: list[tuple[int, int, int]], ablate: Collection[tuple[int, int]]
) -> list[tuple[int, int, list[float]]]:
    """scored_windows of some windows of the same length T."""
    tokens = torch.tensor([list(ids[begin:end]) for begin, end, _ in rows], device=model.wte.weight.device)  # (B, T)
    hidden = model.hidden(tokens[:, :-1], ablate=ablate)  # (B, T - 1, E): the last token predicts nothing here
    results = []
    for row, (begin, end, first) in enumerate(rows):
        logprobs: list[float] = []
        skipped = first - begin - 1
        chunks = (torch.split(part, 64) for part in (hidden[row, skipped:], tokens[row, skipped + 1 :]))
        for states, wanted in zip(*chunks, strict=True):  # 64 x V floats at a time, not T x V
            scores = model.head(states).float().log_softmax(-1)
            logprobs += scores.gather(1, wanted[:, None])[:, 0].tolist()
        if not all(map(math.isfinite, logprobs)):
            raise CheckpointError("the model's logits hold NaN or infinity: its weights are damaged")
        results.append((first, end, logprobs))
    return results
