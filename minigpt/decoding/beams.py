"""Beam search: the most probable continuations of a prompt, where greedy decoding takes the best next token alone.

Formulas and order are those of Hugging Face transformers 5 (GenerationMixin._beam_search). N = num_beams sequences run
on. A step adds all tokens' log-probabilities to their scores, and takes the best K candidates (or draws them):

    K = N * max(2, 1 + number of end ids), so that N of them do not end
    those of the best N that end are complete, with the score  sum of log-probabilities / tokens ** length_penalty
    the best N of the K that do not end run on

A candidate ends with an end id, a stop string (in transformers also one that began in the prompt), or where
max_new_tokens, the context or max_seconds do. The best N complete ones are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minigpt.checks import agreement
from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sampling import process
from minigpt.decoding.sequence import Drawn, Limits, Prompt, Sequence, Step
from minigpt.errors import MiniGPTError, NoTokenError

_NEVER = -1e9  # the score of no sequence, below those of all others


class Beam(Sequence):
    """A sequence of a search, with a slot of its own in the cache. In the end, the first hold the results."""

    def __init__(self, search: Search, prompt: Prompt, params: SamplingParams, limits: Limits) -> None:
        super().__init__(prompt, params, 0, limits)
        self.search, self.drawn = search, list[Drawn]()

    def accept(self, logits: Tensor) -> Step | None:  # type: ignore[override]  # no graph draws for beams
        """Wait for the other beams' logits; with the last ones, all go a step further. Steps come at the end."""
        self.search.logits[self] = logits
        try:
            if len(self.search.logits) == len(self.search.beams):
                self.search.advance()
        except MiniGPTError as error:
            for beam in self.search.beams:
                beam.error, beam.finish_reason = error, "error"
        return None


class Search:
    """The N beams of one prompt, and what they have found."""

    def __init__(self, prompt: Prompt, params: SamplingParams, limits: Limits) -> None:
        N = params.num_beams
        self.beams = [Beam(self, prompt, params, limits) for _ in range(N)]
        self.prompt, self.params, self.n_new = prompt, self.beams[0].params, 0
        for beam in self.beams:
            beam.together, beam.seed = self.beams, self.beams[0].seed  # the seed may be a fresh one
        self.most = min(params.max_new_tokens, limits.n_positions - len(prompt.ids) + 1)
        self.keep = max(2, 1 + len(self.beams[0].end_ids))  # candidates of each beam, and tokens that the filters leave
        self.logits: dict[Beam, Tensor] = {}  # [V] each, until all have come
        self.running = list(self.beams)  # by score [N]: of beams that are all the same at first, one counts
        self.scores = torch.tensor([0.0, *[_NEVER] * (N - 1)], dtype=torch.float32, device="cpu")
        self.best = torch.full((N,), _NEVER, dtype=torch.float32, device="cpu")  # of what is complete, by score [N]
        self.found, self.complete, self.barred = [list[Drawn]()] * N, self.best > 0, limits.undecodable_ids
        self.generator: torch.Generator | None = None

    @torch.inference_mode()
    def advance(self) -> None:
        """Add a token to every beam, from the logits that each has got."""
        self.n_new, late = self.n_new + 1, self.beams[0].late
        N, penalty = len(self.beams), self.params.length_penalty
        scores, candidates = self.candidates()
        if not candidates:
            return self.finish(late)
        ends = torch.tensor([late or self.n_new == self.most or self.ends(*one) for one in candidates], device="cpu")

        self.scores, run_on = (scores + ends.float() * _NEVER).topk(N)
        done = ends & (torch.arange(len(ends), device="cpu") < N)
        self.best, kept = torch.cat([self.best, scores / self.n_new**penalty + (~done).float() * _NEVER]).topk(N)
        self.complete = torch.cat([self.complete, done])[kept]
        new = [self.grown(*one) if done[i] and scores[i] > _NEVER / 2 else [] for i, one in enumerate(candidates)]
        self.found = [(self.found + new)[i] for i in kept.tolist()]  # [] for what only fills a place

        long = self.most if self.params.early_stopping == "never" and penalty > 0 else self.n_new
        hope = (self.scores[0] / long**penalty > torch.where(self.complete, self.best.min(), _NEVER)).any()
        if ends.all() or not hope or (self.params.early_stopping is True and self.complete.all()):
            self.finish(late)
        else:
            self.go_on([candidates[i] for i in run_on.tolist()])

    def candidates(self) -> tuple[Tensor, list[tuple[Beam, int]]]:
        """The K best continuations, best first: scores [K], beams and next tokens. None where all are barred."""
        rows = torch.stack([self.logits[beam] for beam in self.running]).float().log_softmax(-1)  # (N, V)
        rows = torch.stack([self.processed(beam, row) for beam, row in zip(self.running, rows, strict=True)])
        scores = (rows + self.scores.to(rows.device)[:, None]).flatten()
        if scores.max() == -math.inf:
            return scores[:0], []
        K = min(self.keep * len(rows), len(scores))
        if self.params.temperature > 0:
            self.generator = self.generator or torch.Generator(rows.device).manual_seed(self.beams[0].seed or 0)
            drawn = torch.multinomial(scores.softmax(-1), K, generator=self.generator)
            drawn = drawn[scores[drawn].argsort(descending=True)]
        else:
            drawn = scores.topk(K).indices
        return scores[drawn].cpu(), [(self.running[i // rows.shape[1]], i % rows.shape[1]) for i in drawn.tolist()]

    def processed(self, beam: Beam, row: Tensor) -> Tensor:
        """The log-probabilities [V] after a beam, changed by the processors, which see no logits here."""
        try:
            return process(row, beam.history, self.n_new - 1, self.params, beam.end_ids, self.barred, self.keep)
        except NoTokenError:  # other beams may go on
            return torch.full_like(row, -math.inf)

    def ends(self, beam: Beam, id: int) -> bool:
        """Whether a token ends the text of a beam."""
        tokenizer, stops = beam.limits.tokenizer, self.params.stop
        if id in beam.end_ids or not stops or tokenizer is None or id not in tokenizer:
            return id in beam.end_ids
        length = max(len(stop.encode()) for stop in stops)  # no stop string is made of more tokens
        text = tokenizer.decode([id for id, _ in beam.drawn[-length:]] + [id])
        return any(stop in text for stop in stops)

    def grown(self, beam: Beam, id: int) -> list[Drawn]:
        """A beam's tokens with one more."""
        return [*beam.drawn, (id, beam.logprob(self.logits[beam], id))]

    def go_on(self, chosen: list[tuple[Beam, int]]) -> None:
        """Give each continuation a beam: its own or, where another has it, one given up. The cache copies the rest."""
        grown = [self.grown(beam, id) for beam, id in chosen]
        spare = [beam for beam in self.beams if all(beam is not source for source, _ in chosen)]
        self.running = []
        for source, _ in chosen:
            beam = spare.pop() if source in self.running else source
            if beam is not source:
                beam.forked_from, beam.shared = source, agreement(beam.history, source.history)
            self.running.append(beam)
        for beam, drawn in zip(self.running, grown, strict=True):
            beam.drawn, beam.history = drawn, [*self.prompt.ids, *(id for id, _ in drawn)]
        self.logits = {}

    def finish(self, late: bool) -> None:
        """Write the results into the beams, the best into the first, as if each had drawn its tokens."""
        for beam, found, score in zip(self.beams, self.found, self.best.tolist(), strict=True):
            beam.history, beam.score = list(self.prompt.ids), score
            for id, logprob in found:
                if beam.finish_reason is None:
                    beam.take(id, logprob, late and len(beam.steps) + 1 == self.n_new)
            if not beam.steps:
                beam.error = NoTokenError("no token is left to draw: the parameters bar all before so many texts end")
            beam.finish_reason = "error" if beam.error else beam.finish_reason or "stop"
