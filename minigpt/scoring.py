"""How likely a model finds given text: per-token log-probabilities, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from minigpt.decoding.prompts import Encode, Text
from minigpt.decoding.sampling import best_log_probabilities
from minigpt.decoding.sequence import Limits
from minigpt.errors import CheckpointError, PromptError
from minigpt.network.model import GPT2
from minigpt.text.tokenizer import Tokenizer

_TOKENS = 4096  # about how many go through the model at once
Top = list[tuple[int, float]]  # (id, log-probability), best first


@dataclass(frozen=True)
class Score:
    """How likely a text is.

    ids: the tokens, with the beginning-of-text token or the context before them if there is one.
    logprobs: natural logarithms, of each token given those before it: of all but the first; of the text's alone where
        a context was given; of fewer with stride = n_positions, where no token that begins a window is scored.
    total, mean: their sum and mean.
    perplexity: exp(-mean) or, with a stride, by the loop of https://huggingface.co/docs/transformers/perplexity:
        it weights each window's mean loss by one token fewer than it has (but for the first window), so that with a
        stride of very few tokens it all but counts the first window alone. exp(-mean) weights every token the same.
    bits_per_byte: -total / ln 2 by the UTF-8 bytes of the scored tokens; None where the model has no tokenizer.
    top: for each log-probability the k best tokens as (id, log-probability), where they were asked for; else None.
    mean and perplexity are NaN, and bits_per_byte None, where no token is scored.
    """

    ids: list[int]
    logprobs: list[float]
    total: float
    mean: float
    perplexity: float
    bits_per_byte: float | None
    top: list[Top] | None = None


class ScoreCall(TypedDict, total=False):
    """What LanguageModel.score takes by name; its docstring says what each means."""

    context: Text | Iterable[Text] | None
    bos: bool
    stride: int | None
    logprobs: int | None
    special: bool
    ablate: Iterable[str]


@dataclass(frozen=True)
class Window:
    """Tokens that go through the model together: those from index `first` (at least 1) on are scored."""

    ids: Sequence[int]
    first: int


@dataclass(frozen=True)
class Scored:
    """A window's scored tokens, the log-probability of each and, if wanted, the k best tokens in its place."""

    ids: Sequence[int]
    logprobs: list[float]
    top: list[Top]


def sliding(ids: Sequence[int], size: int, stride: int) -> Iterator[Window]:
    """The sliding-window procedure of https://huggingface.co/docs/transformers/perplexity over a text of any length.

    Windows of `size` tokens move on by `stride`, and each scores the tokens that the one before did not reach. A
    window's own first token has no context, so it is scored only if the window before reached it (stride < size).
    """
    reached = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + size, len(ids))
        yield Window(ids[begin:end], max(reached - begin, 1))
        reached = end
        if end == len(ids):
            return


def score_windows(model: GPT2, windows: Iterable[Window], k: int = 0, unlisted: Sequence[int] = ()) -> Iterator[Scored]:
    """Each window's log-probabilities, in order; several windows go through the model at a time.

    k: how many of the best tokens to give for each; `unlisted` ids are not among them.
    Raises CheckpointError if the model's logits are not finite.
    """
    rows: list[Window] = []
    longest = 0
    for window in windows:
        longest = max(longest, len(window.ids))
        if rows and longest * (len(rows) + 1) > _TOKENS:
            yield from _score(model, rows, k, unlisted)
            rows, longest = [], len(window.ids)
        rows.append(window)
    if rows:
        yield from _score(model, rows, k, unlisted)


@torch.inference_mode()
def _score(model: GPT2, rows: list[Window], k: int, unlisted: Sequence[int]) -> list[Scored]:
    """score_windows of windows that share a batch. It is padded on the right, where the causal mask hides it."""
    T = max(len(row.ids) for row in rows)
    padded = [[*row.ids, *[0] * (T - len(row.ids))] for row in rows]
    tokens = torch.tensor(padded, device=model.wte.weight.device)  # (B, T)
    hidden = model.hidden(tokens[:, :-1]) if T > 1 else None  # (B, T - 1, E): the last token predicts nothing here
    results = []
    for at, row in enumerate(rows):
        found = Scored(row.ids[row.first :], [], [])
        chunk = range(row.first - 1, len(row.ids) - 1)  # the positions whose next token is scored
        for begin in chunk[::64] if hidden is not None else ():  # 64 x V floats at a time, not T x V
            places = slice(begin, min(begin + 64, chunk.stop))
            logits = model.head(hidden[at, places]).float()  # type: ignore[index]
            wanted = tokens[at, places.start + 1 : places.stop + 1]
            found.logprobs.extend(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].tolist())
            if k:
                ids = wanted.tolist()
                found.top.extend(
                    best_log_probabilities(one, id, k, unlisted)[1] for one, id in zip(logits, ids, strict=True)
                )
        if not all(map(math.isfinite, found.logprobs)):
            raise CheckpointError("the model's logits hold NaN or infinity: its weights are damaged")
        results.append(found)
    return results


def score_texts(
    model: GPT2,
    texts: Sequence[tuple[Sequence[int], int]],
    stride: int | None = None,
    k: int | None = None,
    unlisted: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
) -> list[Score]:
    """A Score for each text, (ids, index of the first one to score). Texts share batches, the longest ones first.

    stride: windows of n_positions tokens that move on by this many; None: one window a text.
    k, unlisted: as in score_windows.       tokenizer: for the bits per byte.
    """
    size, owners = model.config.n_positions, deque[int]()

    def windows() -> Iterator[Window]:
        for at in sorted(range(len(texts)), key=lambda at: -len(texts[at][0])):
            ids, first = texts[at]
            for window in [Window(ids, first)] if stride is None else sliding(ids, size, stride):
                owners.append(at)
                yield window

    found: list[list[Scored]] = [[] for _ in texts]
    for scored in score_windows(model, windows(), k or 0, unlisted):
        found[owners.popleft()].append(scored)
    overlap = stride is not None and stride < size
    return [_summed(list(ids), parts, overlap, k, tokenizer) for (ids, _), parts in zip(texts, found, strict=True)]


def _summed(ids: list[int], parts: list[Scored], overlap: bool, k: int | None, tokenizer: Tokenizer | None) -> Score:
    logprobs = [value for part in parts for value in part.logprobs]
    total, weighted, weights = math.fsum(logprobs), 0.0, 0
    for number, part in enumerate(part for part in parts if part.logprobs):
        # The page counts one loss too few where a window's first new token has a context, as in all but the first.
        weight = len(part.logprobs) - (1 if number and overlap else 0)
        weighted += math.fsum(part.logprobs) / len(part.logprobs) * weight
        weights += weight
    n_bytes = sum(len(tokenizer.token_bytes(id)) for part in parts for id in part.ids) if tokenizer else 0
    loss = -weighted / weights if weights else math.nan
    return Score(
        ids,
        logprobs,
        total,
        mean=total / len(logprobs) if logprobs else math.nan,
        perplexity=math.inf if loss > 700 else math.exp(loss),
        bits_per_byte=-total / math.log(2) / n_bytes if n_bytes else None,
        top=None if k is None else [best for part in parts for best in part.top],
    )


def scorable(
    text: Text, context: Text | None, bos: bool, stride: int | None, encode: Encode, limits: Limits
) -> tuple[list[int], int]:
    """The ids to feed, and the index of the first one to score. Raises PromptError for a text that is too long."""
    size = limits.n_positions
    if context is None:
        ids = [*(_beginning(limits) if bos else []), *encode(text)]
        if len(ids) > size and stride is None:
            raise PromptError(f"the text has {len(ids)} tokens, but the model's context is {size}: give a stride")
        return ids, 1
    if isinstance(context, str) and isinstance(text, str):
        # As the lm-evaluation-harness does (TemplateLM._encode_pair): white space between them belongs to the text.
        before = encode(context.rstrip())
        after = encode(context + text)[len(before) :]
    else:
        before, after = encode(context), encode(text)
    if len(after) > size:
        raise PromptError(f"the text has {len(after)} tokens, but the model's context is {size}")
    before = (before or _beginning(limits))[-(size + 1 - len(after)) :]  # the last token is never fed
    return [*before, *after], len(before)


def _beginning(limits: Limits) -> list[int]:
    if limits.bos_id is None:
        raise PromptError("the model has no beginning-of-text token, so the text must not be empty")
    return [limits.bos_id]


def log_probabilities(model: GPT2, ids: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first given those before it. Raises as score_windows does."""
    return next(score_windows(model, [Window(ids, 1)])).logprobs
