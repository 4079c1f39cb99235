"""From what a caller gives, prompts and params in any form, to the sequences that are to be continued."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from typing import Any

from torch import Tensor

from minigpt.decoding.beams import Search
from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sequence import Completion, Failure, Limits, Prompt, Sequence
from minigpt.errors import MiniGPTError, PromptError, TokenizerError

Ids = SequenceOf[int] | Tensor  # or a 1-D array
Text = str | Ids
Task = tuple[Text, SamplingParams] | Failure  # what generate_each takes
Encode = Callable[[Text], list[int]]


def listed(prompt: Any) -> Any:
    """A tensor or array as a list; anything else as it is."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def is_one_prompt(prompt: Any) -> bool:
    """A str or a list of ints is one prompt; a list of anything else, or of nothing, is many. Raises PromptError."""
    if isinstance(prompt, str):
        return True
    _check_is_list(prompt)
    return len(prompt) > 0 and isinstance(prompt[0], Integral) and not isinstance(prompt[0], bool)


def as_ids(prompt: Any) -> list[int]:
    """A list, 1-D tensor or array of token ids as a list of ints. Raises PromptError."""
    prompt = listed(prompt)
    _check_is_list(prompt)
    if any(isinstance(item, bool) or not isinstance(item, Integral) for item in prompt):
        raise PromptError(f"a prompt is text or a list of token ids, not {list(prompt)[:5]!r}")
    return [int(item) for item in prompt]


def _check_is_list(prompt: Any) -> None:
    if not isinstance(prompt, SequenceOf) or isinstance(prompt, (bytes, bytearray)):
        raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")


def final(params: SamplingParams | None, overrides: Mapping[str, object]) -> SamplingParams:
    """The params with the overrides in place. Warns of options that have no effect."""
    params = (params or SamplingParams()).over(overrides)
    if unused := params.without_effect():
        names = f"{', '.join(unused)} {'have' if len(unused) > 1 else 'has'}"
        warnings.warn(f"{names} no effect at temperature 0, which is greedy decoding", stacklevel=4)
    return params


def checked(
    prompts: Any, params: Any, overrides: Mapping[str, object], encode: Encode, limits: Limits
) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Each prompt with its params. Raises now for bad params, and in its turn, with its index, for a bad prompt."""
    if isinstance(prompts, str):
        raise PromptError("generate_many takes a list of prompts: use generate for one")
    count = len(prompts) if isinstance(prompts, SequenceOf) else None
    if params is None or isinstance(params, SamplingParams):
        each: Iterable[SamplingParams] = itertools.repeat(final(params, overrides))
    elif isinstance(params, SequenceOf) and all(isinstance(one, SamplingParams) for one in params):
        if len(params) != count:
            raise ValueError(f"{len(params)} params for {count} prompts: give one for all, or a list with one for each")
        each = [final(one, overrides) for one in params]
    else:
        raise ValueError("params must be SamplingParams, or a list with one for each prompt")

    def pairs() -> Iterator[tuple[Prompt, SamplingParams]]:
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=False)):
            try:
                yield Prompt(encode(prompt), one, limits), one
            except (PromptError, TokenizerError) as error:
                raise error if count == 1 else type(error)(f"prompt {index}: {error}") from None

    return pairs()


def sequences(
    tasks: Iterable[Any], encode: Encode, limits: Limits, base: SamplingParams | None = None
) -> Iterator[Sequence | Failure | None]:
    """A Sequence for each sample of each task, or of each prompt with the params `base`, read as needed.

    A Failure for a prompt that cannot be used. None and a Failure come out as they are.
    """
    for task in tasks:
        if task is None or isinstance(task, Failure):
            yield task
            continue
        own = isinstance(task, tuple) and len(task) == 2 and isinstance(task[1], SamplingParams)
        text, params = task if own else (task, base or SamplingParams())
        try:
            prompt = Prompt(encode(text), params, limits)
        except (MiniGPTError, ValueError) as error:
            yield Failure(error)
            continue
        yield from samples(prompt, params, limits)


def samples(prompt: Prompt, params: SamplingParams, limits: Limits) -> Iterator[Sequence]:
    """The prompt's samples, each as it is asked for."""
    if params.num_beams > 1:
        return iter(Search(prompt, params, limits).beams[: params.samples])
    return (Sequence(prompt, params, sample, limits) for sample in range(params.samples))


def completed(result: Completion | Failure) -> Completion:
    """The Completion. Raises the error of a Failure."""
    if isinstance(result, Failure):
        raise result.error
    return result
