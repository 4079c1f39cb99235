"""One prompt being continued: the checked request, the row that draws its tokens, and what comes out."""

from __future__ import annotations

import numbers
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minigpt.checks import short_repr
from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sampling import check_params, draw, log_probabilities, process
from minigpt.errors import CheckpointError, MiniGPTError, PromptError, TokenizerError
from minigpt.text.stream import TextStream

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel
from minigpt.text.stream import StopText

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class TokenLogprob:
    """A drawn token's log-probability, before any processor, and the k best tokens' as (id, logprob), best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One drawn token. `text` is what can be shown now: whole characters, and nothing that may begin a stop string.

    finish_reason is None until the last step, which flushes what was held back: "stop", "length" or "context".
    """

    text: str
    id: int
    logprob: TokenLogprob | None
    finish_reason: str | None


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    text: of the drawn tokens alone, without the end token or stop string. It begins with U+FFFD if they complete a
        character that the prompt's ids began.
    ids: every drawn token, those of the end or stop included.
    finish_reason: "stop" (an end id or stop string), "length" (max_new_tokens) or "context" (no position left).
    logprobs: one TokenLogprob per id, or None.      seed: what the sampling used; None for greedy without one.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    seed: int | None


@dataclass(frozen=True)
class Failure:
    """Why a prompt could not be used or, if `started`, why one of its samples could not go on."""

    error: MiniGPTError | ValueError
    started: bool = False
    finish_reason = "error"  # as in Row: there is nothing left to do


Task = tuple[Prompt, SamplingParams] | Failure  # what generate_each takes


def is_one_prompt(prompt: Any) -> bool:
    """A str or a list of ints is one prompt; a list of anything else, or of nothing, is many."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    return len(prompt) > 0 and isinstance(prompt[0], numbers.Integral) and not isinstance(prompt[0], bool)


def encode(lm: LanguageModel, prompt: Prompt) -> list[int]:
    """The token ids of a text or of a list of ids. Raises PromptError or TokenizerError."""
    size = lm.config.vocab_size
    if isinstance(prompt, str):
        if lm.tokenizer is None:
            raise lm.problem or TokenizerError(
                "this model has no tokenizer: give token ids (on the command line with --ids)"
            )
        ids = lm.tokenizer.encode(prompt)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        if any(isinstance(item, bool) or not isinstance(item, numbers.Integral) for item in prompt):
            raise PromptError(f"a prompt is text or a list of token ids, not {list(prompt)[:5]!r}")
        ids = [int(item) for item in prompt]
    else:
        raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    for item in ids:
        if not 0 <= item < size:
            raise PromptError(f"token id {short_repr(item)} is outside the vocabulary (0 to {size - 1})")
    return ids


class Request:
    """One prompt, checked, with how to continue it: what its samples share."""

    def __init__(self, lm: LanguageModel, prompt: Prompt, params: SamplingParams, index: int | None = None) -> None:
        try:
            check_params(params, lm.config.vocab_size)
            self.ids = encode(lm, prompt) or [lm.bos_id()]  # an empty prompt starts from the beginning of a text
            limit = lm.config.n_positions
            if len(self.ids) > limit and params.overflow == "stop":
                raise PromptError(
                    f"the prompt has {len(self.ids)} tokens, but the model's context is {limit}: shorten it, or use "
                    "overflow slide to keep its end"
                )
            if params.stop and lm.tokenizer is None:
                raise TokenizerError("stop strings need a tokenizer, and this model has none: use stop_ids")
        except (PromptError, TokenizerError) as error:
            raise error if index is None else type(error)(f"prompt {index}: {error}") from None
        self.params = params
        self.logits: Tensor | None = None  # after the prompt, kept for its further samples


class Row:
    """One sequence being continued: its tokens, its random generator, and the text it may show."""

    def __init__(self, lm: LanguageModel, request: Request, sample: int) -> None:
        params = request.params
        self.model, self.request, self.params = lm.model, request, params
        self.history = list(request.ids)  # prompt and drawn tokens: what the processors see
        self.limit = lm.config.n_positions
        self.slid = False
        self.finish_reason: str | None = None if params.max_new_tokens else "length"
        self.error: MiniGPTError | None = None
        self.steps: list[Step] = []
        self.end_ids = frozenset(lm.end_ids if params.stop_ids is None else params.stop_ids)
        self.missing_ids = lm.missing_ids
        self.text = TextStream(lm.tokenizer) if lm.tokenizer else None
        self.stop = StopText(params.stop)
        self.seed = params.seed
        self.generator: torch.Generator | None = None
        if params.temperature > 0:
            self.seed = secrets.randbits(32) if params.seed is None else (params.seed + sample) % 2**64
            self.generator = torch.Generator(lm.device)
            self.generator.manual_seed(self.seed)

    @property
    def max_len(self) -> int:
        """The tokens this row can need in the cache: the last one drawn is never fed."""
        return min(len(self.history) + self.params.max_new_tokens - 1, self.limit)

    @property
    def context(self) -> list[int]:
        """The tokens to prefill: the whole history, or its end (half a context) once it no longer fits."""
        return self.history if len(self.history) <= self.limit else self.history[-max(self.limit // 2, 1) :]

    def accept(self, logits: Tensor) -> Step | None:
        """Draw a token from the logits [V]. None if that fails: this row then ends, with `error` set, and only this."""
        try:
            return self._draw(logits)
        except MiniGPTError as error:
            self.error, self.finish_reason = error, "error"
            return None

    @torch.inference_mode()
    def _draw(self, logits: Tensor) -> Step:
        """Draw a token from the logits [V] and work out what it shows and whether it is the last."""
        params, drawn = self.params, len(self.steps)
        try:
            scores = process(logits, self.history, drawn, params, self.end_ids, self.missing_ids)
        except CheckpointError as error:
            damaged = [name for name, weight in self.model.named_parameters() if not weight.isfinite().all()]
            raise CheckpointError(f"{error}{f'; not finite: {damaged[0]}' if damaged else ''}") from None
        id = draw(scores, params, self.generator)
        logprob = None
        if params.logprobs is not None:
            logprob = TokenLogprob(id, *log_probabilities(logits, id, params.logprobs))
        self.history.append(id)
        ended = id in self.end_ids
        shown = "" if ended or self.text is None else self.stop.push(self.text.push(id))
        if ended or self.stop.found:
            self.finish_reason = "stop"
        elif drawn + 1 == params.max_new_tokens:
            self.finish_reason = "length"
        elif len(self.history) > self.limit and params.overflow == "stop":
            self.finish_reason = "context"
        if self.finish_reason and self.text is not None:
            shown += self.stop.push(self.text.flush()) + self.stop.flush()
            if self.stop.found:
                self.finish_reason = "stop"
        step = Step(shown, id, logprob, self.finish_reason)
        self.steps.append(step)
        return step

    def completion(self) -> Completion:
        """What `generate` returns for this row."""
        return Completion(
            text="".join(step.text for step in self.steps),
            ids=[step.id for step in self.steps],
            prompt_ids=list(self.request.ids),
            finish_reason=self.finish_reason or "length",
            logprobs=None if self.params.logprobs is None else [step.logprob for step in self.steps if step.logprob],
            seed=self.seed,
        )
