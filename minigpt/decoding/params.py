"""TODO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minigpt.checks import integer, number, without_surrogates


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each next token. The defaults are greedy decoding of 50 tokens.

    max_new_tokens: the most tokens to draw, the prompt not counted; 0 draws none.
    min_new_tokens: end ids are barred until this many are drawn.
    temperature: 0 is greedy; above 0 samples from softmax(logits / temperature).
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probabilities reach p, in [0, 1]; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1].
    repetition_penalty: above 1 makes tokens already in the prompt or the output less likely; 1 is off.
    no_repeat_ngram_size: no n-gram of this size occurs twice, the prompt included; 0 is off.
    logit_bias: {token id: value added to its logit}.
    suppress_tokens: ids that are never drawn.
    stop: text(s) at which to stop; the text before it is kept. One str is accepted.
    stop_ids: ids at which to stop; None is the model's own end id(s), () is none.
    seed: makes sampling repeatable, in [0, 2^64); None is a fresh one, which the result reports.
    samples: completions per prompt; sample j uses seed + j.
    logprobs: None is off; 0 gives each drawn token's log-probability, k also those of the k best tokens.
    overflow: at the context limit "stop", or "slide": keep the last half of the context and go on.

    Raises ValueError, naming the parameter and the value.
    """

    max_new_tokens: int = 50
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    seed: int | None = None
    samples: int = 1
    logprobs: int | None = None
    overflow: str = "stop"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

        for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram_size"):
            put(name, integer(name, getattr(self, name), 0))
        put("top_k", 0 if self.top_k is None else integer("top_k", self.top_k, 0))
        put("samples", integer("samples", self.samples, 1))
        if self.logprobs is not None:
            put("logprobs", integer("logprobs", self.logprobs, 0))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, 2**64 - 1))
        put("temperature", number("temperature", self.temperature, 0))
        put("top_p", number("top_p", self.top_p, 0, 1))
        put("min_p", number("min_p", self.min_p, 0, 1))
        put("repetition_penalty", number("repetition_penalty", self.repetition_penalty))
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, not {self.repetition_penalty!r}")
        put("logit_bias", _bias(self.logit_bias))
        put("suppress_tokens", _ids("suppress_tokens", self.suppress_tokens))
        put("stop", _texts(self.stop))
        if self.stop_ids is not None:
            put("stop_ids", _ids("stop_ids", self.stop_ids))
        if self.overflow not in ("stop", "slide"):
            raise ValueError(f"overflow must be 'stop' or 'slide', not {self.overflow!r}")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(integer(f"each id in {name}", item, 0) for item in value)


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must be a non-empty string or a list of them, not {value!r}")
    return tuple(map(without_surrogates, texts))


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias = {}
    for key, item in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON has no other keys than text
        bias[integer("each id in logit_bias", token, 0)] = number(f"logit_bias of id {key}", item)
    return bias
