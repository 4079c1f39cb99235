"""How likely a model finds given text: per-token log-probabilities, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch

from minigpt.checks import integer
from minigpt.decoding.sampling import best_log_probabilities
from minigpt.decoding.sequence import Limits
from minigpt.errors import CheckpointError, PromptError
from minigpt.network.model import GPT2
from minigpt.prompts import Encode, Text

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

    context: Text | Iterable[Text | None] | None
    bos: bool
    stride: int | None
    logprobs: int | None
    special: bool
    ablate: Iterable[str]


class Window(NamedTuple):
    """Tokens that go through the model together: those from index `first` (at least 1) on are scored."""

    ids: Sequence[int]
    first: int
    text: int = 0  # the index of its text


class Scored(NamedTuple):
    """A window's scored tokens, the log-probability of each and, if wanted, the k best tokens in its place."""

    text: int
    ids: Sequence[int]
    logprobs: list[float]
    top: list[Top]


def score_texts(
    model: GPT2,
    limits: Limits,
    encode: Encode,
    texts: Sequence[Text],
    contexts: Sequence[Text | None],
    bos: bool,
    stride: int | None,
    k: int | None,
) -> list[Score]:
    """A Score for each text; they share batches, the longest ones first. See LanguageModel.score."""
    k = None if k is None else integer("logprobs", k, 0)
    stride = None if stride is None else integer("stride", stride, 1, limits.n_positions)
    if isinstance(contexts, str) or len(contexts) != len(texts):
        raise ValueError(f"context must be a list with one for each of the {len(texts)} texts")
    split = [_split(*pair, bos, stride, encode, limits) for pair in zip(texts, contexts, strict=True)]
    windows = (
        Window(window.ids, window.first, at)
        for at in sorted(range(len(split)), key=lambda at: -len(split[at].ids))
        for window in ([split[at]] if stride is None else sliding(split[at].ids, limits.n_positions, stride))
    )
    found: list[list[Scored]] = [[] for _ in split]
    for scored in score_windows(model, windows, k or 0, limits.undecodable_ids):
        found[scored.text].append(scored)
    overlap = stride is not None and stride < limits.n_positions
    return [_summed(list(one.ids), parts, overlap, k, limits) for one, parts in zip(split, found, strict=True)]


def _split(text: Text, context: Text | None, bos: bool, stride: int | None, encode: Encode, limits: Limits) -> Window:
    """A text after its context, which is cut on the left, or after the beginning-of-text token, or alone.

    Raises PromptError for a text that is too long, or a missing beginning-of-text token.
    """
    if context is not None and (bos or stride is not None):
        raise ValueError("context goes with neither bos nor stride")
    if isinstance(context, str) and isinstance(text, str):
        # As the lm-evaluation-harness does (TemplateLM._encode_pair): white space between them belongs to the text.
        before = encode(context.rstrip())
        ids = encode(context + text)[len(before) :]
    else:
        before, ids = [] if context is None else encode(context), encode(text)
    if bos or context is not None:
        before = limits.begun(before)
    n, size = len(ids) + len(before) * bos, limits.n_positions
    if n > size and stride is None:
        cure = f": give a stride, such as {max(size // 2, 1)}" if context is None else ""
        raise PromptError(f"the text has {n} tokens, but the model's context is {size}{cure}")
    if context is not None:
        before = before[-(size + 1 - len(ids)) :]  # the last token is never fed
    return Window([*before, *ids], max(len(before), 1))


def sliding(ids: Sequence[int], size: int, stride: int) -> Iterator[Window]:
    """The sliding-window procedure of https://huggingface.co/docs/transformers/perplexity over a text of any length.

    Windows of `size` tokens move on by `stride`, and each scores the tokens that the one before did not reach. A
    window's own first token has no context, so it is scored only if the window before reached it (stride < size).
    """
    reached = 0
    for begin in range(0, len(ids), stride):
        yield Window(ids[begin : begin + size], max(reached - begin, 1))
        reached = begin + size
        if reached >= len(ids):
            return


def score_windows(model: GPT2, windows: Iterable[Window], k: int = 0, unlisted: Sequence[int] = ()) -> Iterator[Scored]:
    """Each window's log-probabilities, in order; several windows go through the model at a time.

    k: how many of the best tokens to give for each; `unlisted` ids are not among them.
    Raises CheckpointError if the model's logits are not finite.
    """
    rows: list[Window] = []
    for window in windows:
        if rows and max(len(row.ids) for row in (*rows, window)) * (len(rows) + 1) > _TOKENS:
            yield from _score(model, rows, k, unlisted)
            rows = []
        rows.append(window)
    yield from _score(model, rows, k, unlisted)


@torch.inference_mode()
def _score(model: GPT2, rows: list[Window], k: int, unlisted: Sequence[int]) -> list[Scored]:
    """score_windows of windows that share a batch. It is padded on the right, where the causal mask hides it."""
    T = max((len(row.ids) for row in rows), default=0)
    padded = [[*row.ids, *[0] * (T - len(row.ids))] for row in rows]
    tokens = torch.tensor(padded, device=model.wte.weight.device)  # (B, T)
    hidden = model.hidden(tokens[:, :-1]) if T > 1 else tokens  # (B, T - 1, E): the last token predicts nothing here
    results = []
    for states, wanted, row in zip(hidden, tokens, rows, strict=True):
        found, end = Scored(row.text, row.ids[row.first :], [], []), len(row.ids)
        for at in range(row.first, end, 64):  # 64 x V floats at a time, not T x V
            logits = model.head(states[at - 1 : min(at + 63, end - 1)]).float()
            ids = wanted[at : at + len(logits)]
            found.logprobs.extend(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist())
            pairs = zip(logits, ids.tolist(), strict=True) if k else ()
            found.top.extend(best_log_probabilities(one, id, k, unlisted)[1] for one, id in pairs)
        if not all(map(math.isfinite, found.logprobs)):
            raise CheckpointError("the model's logits hold NaN or infinity: its weights are damaged")
        results.append(found)
    return results


def _summed(ids: list[int], parts: list[Scored], overlap: bool, k: int | None, limits: Limits) -> Score:
    logprobs = [value for part in parts for value in part.logprobs]
    total, weighted, weights = math.fsum(logprobs), 0.0, 0
    for number, part in enumerate(part for part in parts if part.logprobs):
        # The page counts one loss too few where a window's first new token has a context, as in all but the first.
        weight = len(part.logprobs) - (1 if number and overlap else 0)
        weighted += math.fsum(part.logprobs) / len(part.logprobs) * weight
        weights += weight
    tokenizer = limits.tokenizer
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


def log_probabilities(model: GPT2, ids: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first given those before it. Raises as score_windows does."""
    return next(score_windows(model, [Window(ids, 1)])).logprobs
