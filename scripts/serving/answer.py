"""What a request gets: the pieces of its choices as they come, and the whole of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from serving.asked import Asked, RefusedError
from serving.engine import EngineError, Event

from minigpt import CheckpointError, Failure, Score, Step, TokenLogprob
from minigpt.text.stream import TextStream
from minigpt.text.tokenizer import Tokenizer

Piece = dict[str, Any]  # a choice as the interface has it, or a part of one


class Choice:
    """One sample of one prompt."""

    def __init__(self, index: int, prompt: Sequence[int], seed: int | None, tokenizer: Tokenizer | None) -> None:
        self.index, self.prompt, self.seed, self.tokenizer = index, prompt, seed, tokenizer
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._offset = len(text_of(prompt, tokenizer))  # where the next token begins, in prompt and text

    def echo(self, score: Score | None, finish_reason: str | None) -> Piece:
        """The prompt, with the log-probabilities of its tokens: there is none of the first."""
        logprobs = None
        if score is not None:
            best = score.top or [[]] * len(score.logprobs)
            pairs = zip(self.prompt[1:], score.logprobs, best, strict=True)
            offsets = offsets_of(self.prompt, self.tokenizer)
            logprobs = self._logprobs([None, *(TokenLogprob(*each) for each in pairs)], offsets)
        return self._piece(text_of(self.prompt, self.tokenizer), [], logprobs, finish_reason)

    def piece(self, step: Step) -> Piece:
        """A drawn token, and the text that it shows."""
        offset = self._offset
        if self._stream is not None:
            self._offset += len(self._stream.push(step.id))
        logprobs = None if step.logprob is None else self._logprobs([step.logprob], [offset])
        return self._piece(step.text, [step.id], logprobs, step.finish_reason)

    def _piece(self, text: str, ids: list[int], logprobs: Piece | None, finish_reason: str | None) -> Piece:
        reason = finish_reason and ("stop" if finish_reason == "stop" else "length")
        piece = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**piece, "token_ids": ids, "seed": self.seed}

    def _logprobs(self, tokens: Sequence[TokenLogprob | None], offsets: list[int]) -> Piece:
        shown = [token_of(self.prompt[0] if one is None else one.id, self.tokenizer) for one in tokens]
        return {
            "tokens": shown,
            "token_logprobs": [one and one.logprob for one in tokens],
            "top_logprobs": [
                one and {**{token_of(id, self.tokenizer): value for id, value in one.top}, name: one.logprob}
                for one, name in zip(tokens, shown, strict=True)
            ],
            "text_offset": offsets,
        }


class Answer:
    """The choices of a request. What `opening` and `take` give, joined, is what `whole` has."""

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer | None) -> None:
        self.asked = asked
        self.samples, self.n_new = asked.params[0].samples, asked.params[0].max_new_tokens
        self.choices: list[Choice] = []
        for ids, params in zip(asked.prompts, asked.params, strict=True):
            for sample in range(self.samples):
                seed = None if params.seed is None else (params.seed + sample) % 2**64
                self.choices.append(Choice(len(self.choices), ids, seed, tokenizer))
        self.pending = set(range(len(self.choices))) if self.n_new or asked.scored is not None else set[int]()
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self.head["model"] = model
        self._drawn = 0

    def opening(self) -> Iterator[Piece]:
        """What needs no model."""
        reason = None if self.n_new else "length"
        if self.asked.scored is None and (self.asked.echo or reason):
            for choice in self.choices:
                piece = choice.echo(None, reason)
                yield piece if self.asked.echo else {**piece, "text": ""}

    def take(self, at: int, event: Event) -> Iterator[Piece]:
        """What an event of the engine adds. Raises RefusedError for a failure."""
        if isinstance(event, Failure):
            ours = isinstance(event.error, (CheckpointError, EngineError))
            raise RefusedError(str(event.error), status=500 if ours else 400)
        if isinstance(event, Score):
            for choice in self.choices[at * self.samples : (at + 1) * self.samples]:
                if not self.n_new:
                    self.pending.discard(choice.index)
                yield choice.echo(event, None if self.n_new else "length")
        else:
            self._drawn += 1
            if event.finish_reason:
                self.pending.discard(at)
            yield self.choices[at].piece(event)

    @property
    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self._drawn, "total_tokens": prompt + self._drawn}

    def chunk(self, *pieces: Piece, **more: object) -> dict[str, Any]:
        """An event of the stream, or the answer to a request that does not stream."""
        return {**self.head, "choices": list(pieces), **more}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All pieces as one answer."""
        each: list[list[Piece]] = [[] for _ in self.choices]
        for piece in pieces:
            each[piece["index"]].append(piece)
        return self.chunk(*map(joined, each), usage=self.usage)


def joined(pieces: Sequence[Piece]) -> Piece:
    """A choice's pieces as one."""
    lists = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    logprobs = {name: [item for each in lists for item in each[name]] for name in lists[0]} if lists else None
    ids = [id for piece in pieces for id in piece["token_ids"]]
    return {**pieces[-1], "text": "".join(piece["text"] for piece in pieces), "logprobs": logprobs, "token_ids": ids}


def text_of(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of a prompt's ids; those that have none are left out."""
    return tokenizer.decode(id for id in ids if id in tokenizer) if tokenizer else ""


def offsets_of(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
    """Where each token begins in their text, in characters."""
    offsets, at, stream = [], 0, TextStream(tokenizer) if tokenizer else None
    for id in ids:
        offsets.append(at)
        if stream is not None and tokenizer is not None and id in tokenizer:
            at += len(stream.push(id))
    return offsets


def token_of(id: int, tokenizer: Tokenizer | None) -> str:
    """A token as the interface shows it: its text; bytes that are no text as bytes:\\xf0\\x9f."""
    if tokenizer is None or id not in tokenizer:
        return f"token_id:{id}"
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
