"""The options of `generate` by name: their types, and the names that other libraries have for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict


class OneSample(TypedDict, total=False):
    """The options of one sample by name, as wide as they are accepted; None means "not given"."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    suppress_tokens: Iterable[int] | None
    stop: str | Iterable[str] | None
    stop_ids: Iterable[int] | Literal["model"] | None
    seed: int | None
    logprobs: int | None
    overflow: str | None
    max_seconds: float | None


class Options(OneSample, total=False):
    """Every option by name."""

    samples: int | None


class Call(OneSample, total=False):
    """What `generate` takes by name for one sample."""

    special: bool
    ablate: Iterable[str]


# Names that other libraries have for these options; difflib finds slips.
_ELSEWHERE = {
    "max_new_tokens": "max_tokens max_length max_completion_tokens num_predict",
    "min_new_tokens": "min_tokens min_length",
    "temperature": "do_sample temp",
    "repetition_penalty": "repeat_penalty frequency_penalty presence_penalty",
    "stop": "stop_strings stop_sequences",
    "stop_ids": "eos_token_id stop_token_ids",
    "seed": "random_seed manual_seed",
    "samples": "n num_return_sequences best_of num_samples",
    "logprobs": "top_logprobs n_probs",
    "max_seconds": "max_time timeout",
}


def did_you_mean(name: str) -> str:
    """ ": did you mean max_new_tokens?" for an option of another library or a slip, else ""."""
    known = {ours: ours for ours in Options.__annotations__}
    known |= {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}
    close = [name] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": did you mean {known[close[0]]}?" if close else ""
