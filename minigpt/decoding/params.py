"""How to decode: SamplingParams, and a seed for whoever gives none. No torch here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from minigpt.checks import short_repr
from minigpt.options import CHECKS, did_you_mean

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
    typical_p: keep the tokens least surprising for the entropy, until their probabilities reach p; 1 keeps all.
    epsilon_cutoff: drop tokens of a lower probability than this, in [0, 1]; 0 is off.
    eta_cutoff: the same, with a bound that is lower where the entropy is high; 0 is off.
    repetition_penalty: above 1 makes tokens of the prompt and the output less likely; 1 is off.
    no_repeat_ngram_size: no n-gram of this size occurs twice, the prompt included; 0 is off.
    logit_bias: {token id: value added to its logit}.
    sequence_bias: (ids, value) pairs: the value is added to the last id's logit where the ids before it came last.
    suppress_tokens: ids that are never drawn.
    bad_words: a text, or several, not to be written, with a space before it or without.
    bad_words_ids: lists of ids: the last is not drawn after the others. End ids alone are left out.
    stop: a text, or several, at which to stop; the text before it is kept.
    stop_ids: ids at which to stop; () is none; None (or "model") is the model's own end ids.
    seed: makes sampling repeatable, in [0, 2^64); without one it is a fresh one, which the result reports.
    samples: completions per prompt; sample j uses seed + j. Of a beam search: the best so many, at most num_beams.
    num_beams: above 1, beam search: so many continuations are kept, the most probable ones; at most 64.
    length_penalty: they are compared by log-probability / tokens ** length_penalty; above 0 favours long ones.
    early_stopping: True ends the search when num_beams are complete; False if those that run are worse at their
        length now; "never" if they are at any length.
    logprobs: 0 gives each drawn token's log-probability, k also the k best tokens'; None is off.
    overflow: at the context limit "stop", or "slide": keep the last half of the context and go on.
    max_seconds: no further token once this time has passed; at least one is drawn.

    None for any option means "not given". Raises ValueError that names the option and the value,
    TypeError for an unknown option.
    """

    max_new_tokens: int = 50
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    seed: int | None = None
    samples: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
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
            value = value if given is None else CHECKS[name](name, given)
            object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else
        if 1 < self.num_beams < self.samples:
            raise ValueError(f"samples {self.samples} is more than a search with num_beams {self.num_beams} gives")
        if self.num_beams > 1 and self.overflow == "slide":
            raise ValueError("overflow slide is not for num_beams above 1: a search ends at the context limit")

    def without_effect(self) -> list[str]:
        """The options that change nothing here, as greedy decoding draws nothing at random."""
        names = {"top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "seed", "samples"}
        names -= {"samples"} if self.num_beams > 1 else set()
        idle = [each.name for each in fields(self) if each.name in names and getattr(self, each.name) != each.default]
        return idle if self.temperature == 0 else []


def fresh_seed() -> int:
    """A seed for sampling that nobody has chosen."""
    return secrets.randbits(32)
