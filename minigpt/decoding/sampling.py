"""From logits to the next token: pure filters, the order they run in, and the draw.

Formulas and order are those of Hugging Face transformers 5 (generation/logits_process.py, GenerationMixin._sample), bit
for bit on the CPU: the tests compare the two. V is the vocabulary size. A filter takes logits [V] in float32 and gives
logits [V], the removed ones at -inf. It never modifies its argument, and returns it as it is if there is nothing to do.
Numbers such as 1904.09751 are arXiv papers.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.checks import short_repr
from minigpt.decoding.params import SamplingParams
from minigpt.errors import CheckpointError, MiniGPTError, NoTokenError


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a token id that this vocabulary does not have. Call it once, before anything runs."""
    lists = {"bad_words_ids": params.bad_words_ids, "sequence_bias": [ids for ids, _ in params.sequence_bias]}
    lists |= {"logit_bias": [tuple(params.logit_bias)], "suppress_tokens": [params.suppress_tokens]}
    for name, token in ((name, token) for name, each in lists.items() for ids in each for token in ids):
        if token >= vocab_size:
            raise ValueError(f"{name} has token id {short_repr(token)}, but the vocabulary has only {vocab_size} ids")


def process(
    logits: Tensor,
    history: Sequence[int],
    n_new: int,
    params: SamplingParams,
    end_ids: Collection[int] = (),
    missing_ids: Collection[int] = (),
    keep: int = 1,
) -> Tensor:
    """A model's raw logits [V], any float dtype, as the float32 logits [V] to draw from.

    history: the prompt's ids, then the n_new ids drawn since; when it is very long, array("q") is faster than a list.
    end_ids: ids that min_new_tokens bars. missing_ids: ids that the tokenizer cannot decode, never drawn.
    keep: the tokens that top_k and what follows leave at least.
    At least one logit of the result is finite, and none is NaN or +inf.
    Raises CheckpointError if the raw logits are not finite, NoTokenError if the parameters leave no token to draw, and
    MiniGPTError if they make a logit infinite.
    """
    logits = logits.float()
    # A finite sum proves every term finite, in a sixth of the time; it can also overflow, hence the second look.
    if not math.isfinite(logits.sum()) and not logits.isfinite().all():
        raise CheckpointError(
            "the model's logits hold NaN or infinity: its weights are damaged or too large for this dtype (try float32)"
        )
    single = [((id,), bias) for id, bias in params.logit_bias.items()]
    logits = add_bias(logits, history, [*single, *params.sequence_bias])
    logits = penalise_repetition(logits, history, params.repetition_penalty)
    logits = ban_repeated_ngrams(logits, history, params.no_repeat_ngram_size)
    ends = {(id,) for id in end_ids}
    logits = add_bias(logits, history, [(ids, -math.inf) for ids in params.bad_words_ids if ids not in ends])
    if n_new < params.min_new_tokens:
        logits = suppress(logits, end_ids)
    logits = suppress(logits, params.suppress_tokens)
    logits = suppress(logits, missing_ids)
    best = float(logits.max())
    if best == -math.inf:
        raise NoTokenError(
            "no token is left to draw: suppress_tokens, bad_words, no_repeat_ngram_size and min_new_tokens bar all"
        )
    if not math.isfinite(best):
        raise MiniGPTError("a bias or repetition_penalty is so extreme that a logit overflows float32")
    return warp(logits, params, keep) if params.temperature > 0 else logits


def warp(logits: Tensor, params: SamplingParams, keep: int) -> Tensor:
    """The part of `process` that is for sampling alone."""
    logits = scale_temperature(logits, params.temperature)
    logits = keep_top_k(logits, max(params.top_k, keep) if params.top_k else 0)
    logits = keep_top_p(logits, params.top_p, keep)
    logits = keep_min_p(logits, params.min_p, keep)
    logits = keep_typical(logits, params.typical_p, keep)
    if params.epsilon_cutoff:
        logits = drop_below(logits, params.epsilon_cutoff, keep)
    return drop_below(logits, eta_bound(logits, params.eta_cutoff), keep) if params.eta_cutoff else logits


def add_bias(logits: Tensor, history: Sequence[int], biases: Sequence[tuple[tuple[int, ...], float]]) -> Tensor:
    """Adds a bias to the last of its ids where the others came last (SequenceBias-, NoBadWordsLogitsProcessor)."""
    sizes = [1, *(len(ids) for ids, _ in biases)]  # in this order they are added there, and sums are rounded
    found = [
        (ids[-1], bias)
        for ids, bias in sorted(biases, key=lambda pair: sizes.index(len(pair[0])))
        if len(ids) == 1 or tuple(history[1 - len(ids) :]) == ids[:-1]
    ]
    if not found:
        return logits
    values = torch.tensor([bias for _, bias in found], dtype=torch.float32, device=logits.device)
    return logits + torch.zeros_like(logits).index_add(0, _index([id for id, _ in found], logits), values)


def penalise_repetition(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """l * penalty if l < 0 else l / penalty, once per distinct id (RepetitionPenaltyLogitsProcessor; 1909.05858)."""
    if penalty == 1.0 or not len(ids):
        return logits
    index = _index(ids, logits)
    seen = logits[index]
    # An id that occurs twice is computed twice from the same logit, and the same value is written twice.
    return logits.scatter(0, index, torch.where(seen < 0, seen * penalty, seen / penalty))


def ban_repeated_ngrams(logits: Tensor, ids: Sequence[int], n: int) -> Tensor:
    """Bars each id that would complete an n-gram already in `ids` (NoRepeatNGramLogitsProcessor); n = 0 is off."""
    if n == 0 or len(ids) < n:
        return logits
    tokens = _index(ids)
    windows = tokens.unfold(0, n, 1)  # [len(ids) - n + 1, n]
    repeats = (windows[:, :-1] == tokens[len(ids) - n + 1 :]).all(-1)  # the window begins with the last n - 1 ids
    return logits.index_fill(0, windows[repeats, -1].to(logits.device), -math.inf)


def suppress(logits: Tensor, ids: Collection[int]) -> Tensor:
    """Bars `ids`; those outside the vocabulary are ignored (SuppressTokensLogitsProcessor)."""
    ids = [token for token in ids if 0 <= token < len(logits)]
    return logits.index_fill(0, _index(ids, logits), -math.inf) if ids else logits


def scale_temperature(logits: Tensor, t: float) -> Tensor:
    """logits / t, for t > 0 (TemperatureLogitsWarper)."""
    if t == 1.0:
        return logits
    scaled = logits / t
    if math.isfinite(scaled.max()):
        return scaled
    # The best logit left float32's range. Softmax sees differences only, so the best may be 0, which no t can move. In
    # float64, because a t below 1e-45 is 0 in float32, and one above 3e38 is infinite.
    return ((logits - logits.max()).double() / t).float()


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the k largest logits and all ties with the k-th (TopKLogitsWarper); k = 0 and k >= V keep all."""
    if k == 0 or k >= len(logits):
        return logits
    kth = torch.topk(logits, k, sorted=False).values.min()
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float, keep: int = 1) -> Tensor:
    """Keeps the fewest of the likeliest tokens whose probabilities sum to p (TopPLogitsWarper; nucleus, 1904.09751).

    To the bit: in ascending order, removes tokens while their cumulative probability is <= 1 - p, never the last ones.
    """
    if p >= 1.0:
        return logits
    if logits.is_cpu:
        ascending = _sort_values(logits)
        n_removed = int((ascending.softmax(-1).cumsum(-1) <= 1 - p).sum())
        n_removed = max(min(n_removed, len(logits) - keep), 0)
        kept = ascending[n_removed]
        if n_removed == 0 or ascending[n_removed - 1] < kept:
            return logits.masked_fill(logits < kept, -math.inf)
        # Equal logits on both sides of the cut: which of them stay is decided by where torch.sort puts each.
    if torch.are_deterministic_algorithms_enabled() and logits.is_cuda:  # CUDA's cumsum raises then
        return keep_top_p(logits.cpu(), p, keep).to(logits.device)
    ascending, order = torch.sort(logits, descending=False)
    remove = ascending.softmax(-1).cumsum(-1) <= 1 - p
    remove[-keep:] = False
    return logits.masked_fill(remove.scatter(0, order, remove), -math.inf)


def keep_min_p(logits: Tensor, m: float, keep: int = 1) -> Tensor:
    """Keeps the tokens at least m times as likely as the likeliest (MinPLogitsWarper; 2407.01082); m = 0 keeps all."""
    if m == 0:
        return logits
    probabilities = logits.softmax(-1)
    best = torch.topk(probabilities, min(keep, len(logits))).indices
    return logits.masked_fill((probabilities < m * probabilities.max()).index_fill(0, best, False), -math.inf)


def keep_typical(logits: Tensor, mass: float, keep: int = 1) -> Tensor:
    """Keeps the tokens whose -log p is nearest to the entropy, up to `mass` (TypicalLogitsWarper; 2202.00666)."""
    if mass >= 1.0:
        return logits
    log_p = logits.log_softmax(-1)
    distance, order = torch.sort((-log_p + (log_p * log_p.exp()).nansum()).abs())
    count = int((logits[order].softmax(-1).cumsum(-1) < mass).sum())
    remove = distance > distance[min(count, len(logits) - 1)]
    remove[:keep] = False
    return logits.masked_fill(remove.scatter(0, order, remove), -math.inf)


def drop_below(logits: Tensor, least: float | Tensor, keep: int = 1) -> Tensor:
    """Drops tokens of a probability below `least`, never the best (EpsilonLogitsWarper; truncation, 2210.15191)."""
    best = torch.topk(logits, min(keep, len(logits))).values[-1]
    return logits.masked_fill((logits.softmax(-1) < least) & (logits < best), -math.inf)


def eta_bound(logits: Tensor, eta: float) -> Tensor:
    """min(eta, sqrt(eta) * exp(-entropy)), what `drop_below` takes for eta sampling (EtaLogitsWarper; 2210.15191)."""
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    entropy = -(log_p.clamp(min=torch.finfo(torch.float32).min) * log_p.softmax(-1)).sum()
    bound = torch.tensor(eta, dtype=torch.float32, device=logits.device)
    return torch.minimum(bound, bound.sqrt() * (-entropy).exp())


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None) -> int:
    """The next token's id from `process`'s logits [V]: the best (lowest id on a tie), or a sample if temperature > 0.

    A sample takes its randomness from `generator` alone, which must be on the logits' device. On the CPU it is what
    `torch.multinomial(softmax, 1, generator=generator)` gives, and so what transformers gives after torch.manual_seed.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    if generator is None:
        raise ValueError("sampling needs a generator: the global random state belongs to the host program")
    probabilities = logits.softmax(-1)
    if not logits.is_cpu or not _exponential_is_log1p():
        return int(torch.multinomial(probabilities, 1, generator=generator))
    # multinomial is a race, arg max P/q with q ~ Exp(1). Its q, computed one by one, is 95% of its time; the same
    # numbers from vector instructions take a quarter of that.
    return int((probabilities / _exponential(len(logits), generator)).argmax())


def best_log_probabilities(
    logits: Tensor, id: int, k: int, without: Collection[int] = ()
) -> tuple[float, list[tuple[int, float]]]:
    """The natural-log probability of `id` under raw logits [V], and the k best (id, log-probability), best first.

    Log-softmax in float32, before any processor; the ids in `without` count for it but are not listed. Of equal ones
    the lower id comes first.
    """
    scores = logits.float().log_softmax(-1)
    k = min(k, len(scores) - len(without))
    if k == 0:
        return float(scores[id]), []
    listed = suppress(scores, without)
    # topk alone breaks ties arbitrarily: take everything down to the k-th value, in the order of ids, and sort it.
    ids = (listed >= torch.topk(listed, k).values[-1]).nonzero()[:, 0]
    best, order = torch.sort(listed[ids], descending=True, stable=True)
    return float(scores[id]), list(zip(ids[order[:k]].tolist(), best[:k].tolist(), strict=True))


def _index(ids: Collection[int], like: Tensor | None = None) -> Tensor:
    """Token ids as int64 on `like`'s device. Ten times faster than torch.tensor(ids) for a long list."""
    tokens = torch.frombuffer(array("q", ids), dtype=torch.int64)
    return tokens if like is None else tokens.to(like.device)


def _sort_values(logits: Tensor) -> Tensor:
    """torch.sort(logits).values for finite or -inf float32 logits on the CPU, 5 times faster.

    torch sorts int32 by radix. A float's bits, read as an integer, order as the float does, except that negative floats
    are in reverse; flipping all their bits but the sign puts that right, and flipping again undoes it.
    """
    finite = logits[logits > -math.inf]  # after top-k, a handful
    bits = finite.view(torch.int32)
    bits = torch.sort(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).values
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
    return F.pad(ascending, (len(logits) - len(ascending), 0), value=-math.inf)


def _exponential(n: int, generator: torch.Generator) -> Tensor:
    """n numbers ~ Exp(1), float32 on the CPU, as exponential_ draws them: -log(1 - u), u uniform in float64."""
    uniform = torch.empty(n, dtype=torch.float64, device="cpu").uniform_(generator=generator)
    return uniform.neg_().log1p_().neg_().float()


@functools.cache
def _exponential_is_log1p() -> bool:
    """Whether this build of torch draws exponentials that way, from the same stream: not promised, so tried once."""
    theirs, ours = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    q = torch.empty(1000, dtype=torch.float32, device="cpu").exponential_(generator=theirs)
    return torch.equal(q, _exponential(1000, ours)) and torch.equal(theirs.get_state(), ours.get_state())
