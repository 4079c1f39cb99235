"""The options of `generate` by name: their types, their values, and the names that other libraries have for them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypedDict

from minigpt.checks import integer, number, short_repr, without_surrogates


class OneSample(TypedDict, total=False):
    """The options of one sample by name, as wide as they are accepted; None means "not given"."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    sequence_bias: Iterable[tuple[Iterable[int], float]] | Mapping[tuple[int, ...], float] | None
    suppress_tokens: Iterable[int] | None
    bad_words: str | Iterable[str] | None
    bad_words_ids: Iterable[Iterable[int]] | None
    stop: str | Iterable[str] | None
    stop_ids: Iterable[int] | Literal["model"] | None
    seed: int | None
    logprobs: int | None
    overflow: str | None
    max_seconds: float | None


class Options(OneSample, total=False):
    """Every option by name."""

    samples: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None


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
    "num_beams": "beam_size beam_width beams",
    "logit_bias": "token_bias",
    "logprobs": "top_logprobs n_probs",
    "max_seconds": "max_time timeout",
}


def did_you_mean(name: str) -> str:
    """ ": did you mean max_new_tokens?" for an option of another library or a slip, else ""."""
    known = {ours: ours for ours in Options.__annotations__}
    known |= {theirs: ours for ours, names in _ELSEWHERE.items() for theirs in names.split()}
    close = [name] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": did you mean {known[close[0]]}?" if close else ""


def _above_zero(name: str, value: Any, high: float = math.inf) -> float:
    if number(name, value, 0, high) <= 0:
        raise ValueError(f"{name} must be above 0, not {short_repr(value)}")
    return float(value)


def _one_of(name: str, value: Any, choices: tuple[object, ...]) -> Any:
    for choice in choices:
        if isinstance(value, type(choice)) and value == choice:  # 1 is not True
            return choice
    raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {short_repr(value)}")


def _items(name: str, value: Any, what: str) -> Iterable[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of {what}, not {short_repr(value)}")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(f"each id in {name}", item, 0) for item in _items(name, value, "token ids"))


def _end_ids(name: str, value: Any) -> tuple[int, ...] | None:
    return None if isinstance(value, str) and value == "model" else _ids(name, value)


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    found = tuple(_ids(f"each item of {name}", item) for item in _items(name, value, "lists of token ids"))
    if () in found:
        raise ValueError(f"{name} must not hold an empty list of token ids")
    return found


def _sequence_bias(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    try:
        pairs = [(ids, bias) for ids, bias in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a list of (token ids, number) pairs, not {short_repr(value)}") from None
    numbers = [number(f"the bias in {name}", one) for _, one in pairs]
    return tuple(dict(zip(_sequences(name, [ids for ids, _ in pairs]), numbers, strict=True)).items())


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name} must be a non-empty string or a list of them, not {short_repr(value)}")
    return tuple(map(without_surrogates, texts))


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map token ids to numbers, not {short_repr(value)}")
    ids = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in value]  # in JSON, keys are text
    numbers = [number(f"{name} of id {key}", item) for key, item in value.items()]
    return dict(zip((integer(f"each id in {name}", id, 0) for id in ids), numbers, strict=True))


_COUNTS = ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "logprobs")
# By name, what gives a value as SamplingParams holds it, or raises a ValueError that names both.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_COUNTS, partial(integer, low=0)),
    **dict.fromkeys(("temperature", "max_seconds"), partial(number, low=0)),
    **dict.fromkeys(("top_p", "min_p", "epsilon_cutoff", "eta_cutoff"), partial(number, low=0, high=1)),
    "typical_p": partial(_above_zero, high=1),
    "repetition_penalty": _above_zero,
    "logit_bias": _logit_bias,
    "sequence_bias": _sequence_bias,
    "suppress_tokens": _ids,
    "stop_ids": _end_ids,
    **dict.fromkeys(("stop", "bad_words"), _texts),
    "bad_words_ids": _sequences,
    "seed": partial(integer, low=0, high=2**64 - 1),
    "samples": partial(integer, low=1),
    "num_beams": partial(integer, low=1, high=64),
    "length_penalty": partial(number, low=-10, high=10),  # so that tokens ** length_penalty is a float32
    "early_stopping": partial(_one_of, choices=(True, False, "never")),
    "overflow": partial(_one_of, choices=("stop", "slide")),
}
