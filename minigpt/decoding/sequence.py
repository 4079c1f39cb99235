"""One prompt being continued: what the model allows, the sequence that draws its tokens, and what comes out."""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigpt.decoding.params import SamplingParams, fresh_seed
from minigpt.decoding.sampling import best_log_probabilities, check_params, draw, process
from minigpt.errors import MiniGPTError, PromptError, TokenizerError
from minigpt.network.config import GPT2Config
from minigpt.text.stream import StopText, TextStream
from minigpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A drawn token's log-probability, before any processor, and the k best tokens' as (id, logprob), best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


Drawn = tuple[int, TokenLogprob | None]


@dataclass(frozen=True)
class Step:
    """One drawn token. `text` is ready to be shown: whole characters, and nothing that may begin a stop string.

    finish_reason is None until the last step, which flushes the text held back; then as in Completion.
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
    finish_reason: "stop" (an end id or stop string), "length" (max_new_tokens), "context" (no position left) or "time"
        (max_seconds); on one token the earlier in this list wins. None while a Stream is still running.
    logprobs: one TokenLogprob per id, or None.      seed: of the sampling; None for greedy without one.
    score: of a beam search, the log-probability / len(ids) ** length_penalty; else None.
    passes: of the model, after the prompt's: fewer than ids where drafts were right.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None
    seed: int | None
    score: float | None = None
    passes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Failure:
    """Why a prompt could not be used or, if `started`, why one of its samples could not go on."""

    error: MiniGPTError | ValueError
    started: bool = False
    finish_reason = "error"  # as in Sequence: there is nothing left to do


@dataclass(frozen=True)
class Limits:
    """What a sequence must know of its model.

    n_positions, vocab_size: of the config.     bos_id: the beginning-of-text token, if there is one.
    end_ids: the model's own.                   undecodable_ids: rows of a padded vocabulary, never to be drawn.
    tokenizer: None where the model takes token ids only.
    """

    n_positions: int
    vocab_size: int
    bos_id: int | None
    end_ids: tuple[int, ...]
    undecodable_ids: tuple[int, ...]
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, config: GPT2Config, tokenizer: Tokenizer | None, end_ids: Collection[int] | None) -> Limits:
        """Those of a model; end_ids None: its config's."""
        V, bos, eos = config.vocab_size, config.bos_token_id, config.eos_token_id
        ends = end_ids if end_ids is not None else eos if isinstance(eos, tuple) else () if eos is None else (eos,)
        bos_id = bos if bos is not None and 0 <= bos < V else None
        missing = () if tokenizer is None else tuple(id for id in range(V) if id not in tokenizer)
        return cls(config.n_positions, V, bos_id, tuple(id for id in ends if 0 <= id < V), missing, tokenizer)

    def begun(self, ids: SequenceOf[int]) -> list[int]:
        """The ids; for none of them the beginning of a text. Raises PromptError where the model knows no such token."""
        if not ids and self.bos_id is None:
            raise PromptError("the model has no beginning-of-text token, so the text must not be empty")
        return list(ids) or [self.bos_id or 0]


class Prompt:
    """A prompt's checked token ids and, once they are computed, the logits [V] after them: its samples share both."""

    def __init__(self, ids: SequenceOf[int], params: SamplingParams, limits: Limits) -> None:
        """An empty prompt starts from the beginning of a text. Raises PromptError, TokenizerError or ValueError."""
        check_params(params, limits.vocab_size)
        self.ids = limits.begun(ids)
        self.logits: Tensor | None = None
        if len(self.ids) > limits.n_positions and params.overflow == "stop":
            raise PromptError(
                f"the prompt has {len(self.ids)} tokens, but the model's context is {limits.n_positions}: shorten it, "
                "or use overflow slide to keep its end"
            )
        if (params.stop or params.bad_words) and limits.tokenizer is None:
            name, other = ("stop strings", "stop_ids") if params.stop else ("bad_words", "bad_words_ids")
            raise TokenizerError(f"{name} need a tokenizer, and this model has none: use {other}")


class Sequence:
    """One sample of a prompt being continued: its tokens, its random numbers, and the text that it may show."""

    together: SequenceOf[Sequence] = ()  # all beams of a search: they are admitted at once
    forked_from: Sequence | None = None  # the beam whose tokens it has taken over, those after the first `shared`
    shared = 0
    score: float | None = None
    passes = 0

    def __init__(self, prompt: Prompt, params: SamplingParams, sample: int, limits: Limits) -> None:
        self.prompt, self.params, self.limits = prompt, params, limits
        if params.bad_words and limits.tokenizer:
            words = [limits.tokenizer.encode(space + text) for text in params.bad_words for space in ("", " ")]
            self.params = params.over({"bad_words_ids": [*params.bad_words_ids, *words]})
        self.history = list(prompt.ids)  # prompt and drawn tokens: the processors see them all
        self.slid = False  # whether its beginning has left the cache
        self.cancelled = False  # set by any thread: the loop drops it at its next step
        self.finish_reason: str | None = None if params.max_new_tokens else "length"
        self.error: MiniGPTError | None = None
        self.steps: list[Step] = []
        self.end_ids = frozenset(limits.end_ids if params.stop_ids is None else params.stop_ids)
        self._text = TextStream(limits.tokenizer) if limits.tokenizer else None
        self._stop = StopText(params.stop)
        self._begun = time.monotonic()
        self.seed = params.seed
        if params.temperature > 0:
            self.seed = fresh_seed() if params.seed is None else (params.seed + sample) % 2**64
        self.generator: torch.Generator | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing left to draw."""
        return self.finish_reason is not None or self.cancelled

    @property
    def late(self) -> bool:
        """Whether max_seconds have passed."""
        return self.params.max_seconds is not None and time.monotonic() - self._begun >= self.params.max_seconds

    @property
    def max_len(self) -> int:
        """The tokens that it can need in the cache: the last one drawn is never fed."""
        return min(len(self.history) + self.params.max_new_tokens - 1, self.limits.n_positions)

    @property
    def context(self) -> list[int]:
        """The tokens to prefill: the whole history, or its end (half a context) once it no longer fits."""
        size = self.limits.n_positions
        return self.history if len(self.history) <= size else self.history[-max(size // 2, 1) :]

    def accept(self, logits: Tensor | Drawn) -> Step | None:
        """Take a token, or draw it from logits [V]. None if that fails: this sequence ends, with an `error`."""
        try:
            return self._draw(logits)
        except MiniGPTError as error:
            self.error, self.finish_reason = error, "error"
            return None

    @torch.inference_mode()
    def _draw(self, logits: Tensor | Drawn) -> Step:
        """Take the token that is drawn, or draw it from the logits [V]."""
        if not isinstance(logits, Tensor):
            return self.take(*logits, self.late)
        params, barred = self.params, self.limits.undecodable_ids
        scores = process(logits, self.history, len(self.steps), params, self.end_ids, barred)
        if params.temperature > 0 and self.generator is None:
            self.generator = torch.Generator(logits.device).manual_seed(self.seed or 0)
        id = draw(scores, params, self.generator)
        return self.take(id, self.logprob(logits, id), self.late)

    def logprob(self, logits: Tensor, id: int) -> TokenLogprob | None:
        """What the Step of a token drawn from the raw logits [V] says of its probability, if that was asked for."""
        k, barred = self.params.logprobs, self.limits.undecodable_ids
        return None if k is None else TokenLogprob(id, *best_log_probabilities(logits, id, k, barred))

    def take(self, id: int, logprob: TokenLogprob | None, late: bool) -> Step:
        """Append a token: work out the text that it shows, and whether it is the last."""
        self.history.append(id)
        ended = id in self.end_ids
        shown = "" if ended or self._text is None else self._stop.push(self._text.push(id))
        self.finish_reason = self._reason(ended, late)
        if self.finish_reason and self._text is not None:
            shown += self._stop.push(self._text.flush()) + self._stop.flush()
            if self._stop.found:
                self.finish_reason = "stop"
        step = Step(shown, id, logprob, self.finish_reason)
        self.steps.append(step)
        return step

    def _reason(self, ended: bool, late: bool) -> str | None:
        """Why the token just drawn is the last, the first reason that holds; None if it is not the last."""
        params = self.params
        if ended or self._stop.found:
            return "stop"
        if len(self.steps) + 1 == params.max_new_tokens:
            return "length"
        if len(self.history) > self.limits.n_positions and params.overflow == "stop":
            return "context"
        return "time" if late else None

    def completion(self) -> Completion:
        """What is drawn so far."""
        return Completion(
            text="".join(step.text for step in self.steps),
            ids=[step.id for step in self.steps],
            prompt_ids=list(self.prompt.ids),
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else [step.logprob for step in self.steps if step.logprob],
            seed=self.seed,
            score=self.score,
            passes=self.passes,
        )
