"""How likely a model finds given text: per-token log-probabilities, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        it weights each window's mean loss by one token fewer than it has, but for the first window. With a stride of
        very few tokens the first window then counts for nearly all. exp(-mean) weights every token the same.
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
    """Tokens [T] that go through the model together: those from index `first` (at least 1) on are scored."""

    text: int  # the number of its text
    ids: Tensor
    first: int


Scored = tuple[Window, list[float], list[Top]]  # each scored token's log-probability and, if wanted, the k best there


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
    pairs = enumerate(zip(texts, contexts, strict=True))
    split = [_split(at, text, context, bos, stride, encode, limits) for at, (text, context) in pairs]
    size = limits.n_positions + (stride is None)  # with a context, all tokens but the last are fed
    longest_first = sorted(split, key=lambda one: -len(one.ids))
    windows = (window for one in longest_first for window in sliding(one, size, stride or size))
    found: list[list[Scored]] = [[] for _ in split]
    for rows in _batches(windows):
        for scored in _score(model, rows, k or 0, limits.undecodable_ids):
            found[scored[0].text].append(scored)
    overlap = stride is not None and stride < limits.n_positions
    return [_summed(one.ids.tolist(), found[one.text], overlap, k, limits) for one in split]


def _split(
    number: int, text: Text, context: Text | None, bos: bool, stride: int | None, encode: Encode, limits: Limits
) -> Window:
    """A text after its context, which is cut on the left, or after the beginning-of-text token if `bos`.

    Raises PromptError for a text that is too long.
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
    size, n = limits.n_positions, len(ids) + (len(before) if context is None else 0)
    if n > size and stride is None:
        cure = f": give a stride, such as {max(size // 2, 1)}" if context is None else ""
        raise PromptError(f"the text has {n} tokens, but the model's context is {size}{cure}")
    if context is not None:
        before = before[-(size + 1 - n) :]  # the last token is never fed
    return Window(number, torch.tensor([*before, *ids], dtype=torch.long, device="cpu"), max(len(before), 1))


def sliding(whole: Window, size: int, stride: int) -> Iterator[Window]:
    """The sliding-window procedure of https://huggingface.co/docs/transformers/perplexity over a text of any length.

    Windows of `size` tokens move on by `stride`, and each scores the tokens that the one before did not reach. A
    window's own first token has no context, so it is scored only if the window before reached it (stride < size).
    """
    reached = whole.first
    for begin in range(0, len(whole.ids), stride):
        yield Window(whole.text, whole.ids[begin : begin + size], max(reached - begin, 1))
        reached = begin + size
        if reached >= len(whole.ids):
            return


def _batches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    rows: list[Window] = []
    for window in windows:
        if rows and max(len(row.ids) for row in (*rows, window)) * (len(rows) + 1) > _TOKENS:
            yield rows
            rows = []
        rows.append(window)
    if rows:
        yield rows


@torch.inference_mode()
def _score(model: GPT2, rows: list[Window], k: int = 0, unlisted: Sequence[int] = ()) -> list[Scored]:
    """Score windows together. They are padded on the right, where the causal mask hides it.

    k: how many of the best tokens to list in each place; `unlisted` ids are not among them.
    Raises CheckpointError if a log-probability is not finite.
    """
    results: list[Scored] = []
    tokens = pad_sequence([row.ids for row in rows], batch_first=True).to(model.wte.weight.device)  # (B, T)
    hidden = model.hidden(tokens[:, :-1]) if tokens.shape[1] > 1 else tokens  # (B, T - 1, E): the last predicts nothing
    for states, wanted, row in zip(hidden, tokens, rows, strict=True):
        logprobs: list[float] = []
        top: list[Top] = []
        for at in range(row.first, len(row.ids), 64):  # 64 x V floats at a time, not T x V
            ids = wanted[at : min(at + 64, len(row.ids))]
            logits = model.head(states[at - 1 : at - 1 + len(ids)]).float()
            logprobs += logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
            top += [best_log_probabilities(one, 0, k, unlisted)[1] for one in logits] if k else []
        if not all(map(math.isfinite, logprobs)):
            raise CheckpointError("the model's logits hold NaN or infinity: its weights are damaged")
        results.append((row, logprobs, top))
    return results


def _summed(ids: list[int], parts: list[Scored], overlap: bool, k: int | None, limits: Limits) -> Score:
    logprobs = [value for _, values, _ in parts for value in values]
    total, weighted, weights = math.fsum(logprobs), 0.0, 0
    for number, values in enumerate(values for _, values, _ in parts if values):
        # The page counts one loss too few where a window's first new token has a context, as in all but the first.
        weight = len(values) - (1 if number and overlap else 0)
        weighted += math.fsum(values) / len(values) * weight
        weights += weight
    scored = [id for window, _, _ in parts for id in window.ids[window.first :].tolist()]
    n_bytes = sum(map(len, map(limits.tokenizer.token_bytes, scored))) if limits.tokenizer else 0
    loss = -weighted / weights if weights else math.nan
    return Score(
        ids,
        logprobs,
        total,
        mean=total / len(logprobs) if logprobs else math.nan,
        perplexity=math.inf if loss > 700 else math.exp(loss),
        bits_per_byte=-total / math.log(2) / n_bytes if n_bytes else None,
        top=None if k is None else [best for _, _, top in parts for best in top],
    )


def log_probabilities(model: GPT2, ids: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first given those before it; CheckpointError if one is not finite."""
    return _score(model, [Window(0, torch.tensor(ids, device="cpu"), 1)])[0][1]
