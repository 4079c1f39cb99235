"""How to decode: SamplingParams, and a seed for whoever gives none. No torch here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from minigpt.checks import integer, number, short_repr, without_surrogates
from minigpt.options import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minigpt.options import Options


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to choose each next token. The defaults are greedy decoding of 50 tokens.

    max_new_tokens: the most tokens to draw, the prompt not counted; 0 draws none.
    min_new_tokens: end ids are barred until this many are drawn.
    temperature: 0 is greedy; above 0 samples from softmax(logits / temperature).
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probabilities reach p, in [0, 1]; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1].
    repetition_penalty: above 1 makes tokens of the prompt and the output less likely; 1 is off.
    no_repeat_ngram_size: no n-gram of this size occurs twice, the prompt included; 0 is off.
    logit_bias: {token id: value added to its logit}.
    suppress_tokens: ids that are never drawn.
    stop: text(s) at which to stop; the text before it is kept. One str is accepted.
    stop_ids: ids at which to stop; () is none; None (or "model") is the model's own end ids.
    seed: makes sampling repeatable, in [0, 2^64); None is a fresh one, which the result reports.
    samples: completions per prompt; sample j uses seed + j.
    logprobs: None is off; 0 gives each drawn token's log-probability, k also the k best tokens'.
    overflow: at the context limit "stop", or "slide": keep the last half of the context and go on.
    max_seconds: no further token once this time has passed; at least one is drawn. None: no limit.

    None for any option means "not given". Raises ValueError that names the option and the value,
    TypeError for an unknown option.
    """

    max_new_tokens: int = 50
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    suppress_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    seed: int | None = None
    samples: int = 1
    logprobs: int | None = None
    overflow: str = "stop"
    max_seconds: float | None = None

    def __init__(self, **options: Unpack[Options]) -> None:
        self._fill({each.name: {} if each.default is MISSING else each.default for each in fields(self)}, options)

    def over(self, options: Mapping[str, object]) -> SamplingParams:
        """These params with the given options in their place. Raises as the constructor does."""
        new = object.__new__(SamplingParams)
        new._fill(vars(self), options)
        return new

    def _fill(self, base: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        unknown = next((name for name in options if name not in base), None)
        if unknown is not None:
            raise TypeError(f"{short_repr(unknown)} is not an option of generate{did_you_mean(unknown)}")
        for name, value in base.items():
            given = options.get(name)
            value = value if given is None else _CHECKS[name](name, given)
            object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

    def without_effect(self) -> list[str]:
        """The options that change nothing here, as greedy decoding draws nothing at random."""
        names = ("top_k", "top_p", "min_p", "seed", "samples") if self.temperature == 0 else ()
        return [each.name for each in fields(self) if each.name in names and getattr(self, each.name) != each.default]


def fresh_seed() -> int:
    """A seed for sampling that nobody has chosen."""
    return secrets.randbits(32)


def _above_zero(name: str, value: Any) -> float:
    if number(name, value) <= 0:
        raise ValueError(f"{name} must be above 0, not {short_repr(value)}")
    return float(value)


def _overflow(name: str, value: Any) -> str:
    if value not in ("stop", "slide"):
        raise ValueError(f"{name} must be 'stop' or 'slide', not {short_repr(value)}")
    return str(value)


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    if name == "stop_ids" and isinstance(value, str) and value == "model":
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, not {short_repr(value)}")
    return tuple(integer(f"each id in {name}", item, 0) for item in value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be a non-empty string or a list of them, not {short_repr(value)}")
    return tuple(map(without_surrogates, texts))


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map token ids to numbers, not {short_repr(value)}")
    bias = {}
    for key, item in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON has no other keys than text
        bias[integer(f"each id in {name}", token, 0)] = number(f"{name} of id {key}", item)
    return bias


_COUNT = partial(integer, low=0)
_SHARE = partial(number, low=0, high=1)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "logprobs"), _COUNT),
    **dict.fromkeys(("top_p", "min_p"), _SHARE),
    "temperature": partial(number, low=0),
    "max_seconds": partial(number, low=0),
    "repetition_penalty": _above_zero,
    "logit_bias": _bias,
    "suppress_tokens": _ids,
    "stop": _texts,
    "stop_ids": _ids,
    "seed": partial(integer, low=0, high=2**64 - 1),
    "samples": partial(integer, low=1),
    "overflow": _overflow,
}
