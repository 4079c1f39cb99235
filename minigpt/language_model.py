"""LanguageModel: a model, its tokenizer, and the decoding loop (prefill, decode, stops, streams, batches).

One loop serves everything: `stream` is a batch of one, `generate` collects it, and `generate_many` keeps a batch of
rows going, where a row that ends makes room for the next prompt.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minigpt import scoring
from minigpt.checks import integer
from minigpt.decoding.cuda_graph import DecodeStep
from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sequence import Completion, Failure, Prompt, Request, Row, Step, Task, encode, is_one_prompt
from minigpt.decoding.step import FlatStep
from minigpt.errors import MiniGPTError, PromptError
from minigpt.interpret import heads
from minigpt.network.cache import KVCache
from minigpt.network.config import GPT2Config
from minigpt.network.model import GPT2, undisturbed
from minigpt.scoring import Score
from minigpt.text.tokenizer import Tokenizer

BATCH_SIZE = 8


Heads = Collection[tuple[int, int]]  # (layer, head) pairs to switch off


def _completed(result: Completion | Failure) -> Completion:
    if isinstance(result, Failure):
        raise result.error
    return result


class LanguageModel:
    """A GPT-2 with its tokenizer. Safe to use from several threads: a call keeps its state to itself.

    model: GPT2.        tokenizer: Tokenizer, or None where the checkpoint has none (prompts are then token ids).
    config: GPT2Config. device, dtype: where the weights are and in what format.
    end_ids: the model's own end ids.

    The model is put into eval mode.
    """

    def __init__(self, model: GPT2, tokenizer: Tokenizer | None = None, end_ids: Collection[int] | None = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config: GPT2Config = model.config
        eos = self.config.eos_token_id
        own = end_ids if end_ids is not None else eos if isinstance(eos, tuple) else () if eos is None else (eos,)
        self.end_ids = tuple(id for id in own if 0 <= id < self.config.vocab_size)
        # Checkpoints may pad the vocabulary: rows without a token must never be drawn.
        every_id = range(self.config.vocab_size)
        self.missing_ids = [] if tokenizer is None else [id for id in every_id if id not in tokenizer]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The format of the weights in matrix products."""
        packed = self.model.output.packed
        return packed.dtype if packed else self.model.wte.weight.dtype

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ablate: Iterable[str] = (),
        **overrides: Any,
    ) -> Any:
        """Continue a prompt, text or token ids: a Completion. For several prompts, or samples > 1: a flat list of them.

        params: how to decode (one for all, or a list with one per prompt); overrides replace its fields.
        ablate: heads to switch off, as "layer.head".
        Raises PromptError for an unusable prompt, ValueError for a bad parameter, TypeError for an unknown one.
        """
        single = is_one_prompt(prompt)
        prompts: Any = [prompt] if single else prompt
        completions = list(self._complete(prompts, params, BATCH_SIZE, ablate, overrides))
        return completions[0] if single and len(completions) == 1 else completions

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        ablate: Iterable[str] = (),
        **overrides: Any,
    ) -> Iterator[Completion]:
        """Continue many prompts, `batch_size` rows at a time; completions come in input order, samples side by side.

        Each row gives what it gives alone. A list is checked whole before anything is generated, and an error names the
        prompt's index. Any other iterable is read as needed, so that memory stays bounded by the rows in work; a bad
        prompt in it raises once those before it are given. Raises as `generate` does.
        """
        return self._complete(prompts, params, batch_size, ablate, overrides)

    def generate_each(self, tasks: Iterable[Task], *, batch_size: int = BATCH_SIZE) -> Iterator[Completion | Failure]:
        """Continue prompts with parameters of their own, where one that fails must not stop the others.

        tasks: (prompt, SamplingParams) pairs, read as needed; or a Failure, which comes out in its turn.
        Gives, in order, a Completion for each sample of each task, or a Failure: one for a prompt that cannot be used,
        and one for a sample that could not go on (no token left to draw, logits that are not finite).
        """

        def rows() -> Iterator[Row | Failure]:
            for task in tasks:
                if isinstance(task, Failure):
                    yield task
                    continue
                try:
                    request = Request(self, *task)
                except (MiniGPTError, ValueError) as error:
                    yield Failure(error)
                    continue
                for sample in range(request.params.samples):
                    yield Row(self, request, sample)

        return self._in_order(rows(), integer("batch_size", batch_size, 1, 4096), [])

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, ablate: Iterable[str] = (), **overrides: Any
    ) -> Iterator[Step]:
        """Continue one prompt, yielding a Step per drawn token as soon as it is drawn (none if max_new_tokens is 0).

        Raises, at the call and not at the first step, as `generate` does.
        """
        params = replace(params or SamplingParams(), **overrides)
        if params.samples != 1:
            raise ValueError(f"stream gives one sample, not {params.samples}: use generate for several")
        if not is_one_prompt(prompt) and len(prompt):
            raise PromptError("stream takes one prompt: use generate_many for several")
        row = Row(self, Request(self, prompt, params), 0)
        heads = self._heads(ablate)

        def steps() -> Iterator[Step]:
            for _, step in self._run(iter([row]), 1, heads):
                if step:
                    yield step
            if row.error:
                raise row.error

        return steps()

    def score(
        self,
        text: Prompt,
        *,
        bos: bool = False,
        stride: int | None = None,
        ablate: Iterable[str] = (),
    ) -> Score:
        """How likely the model finds a text, or token ids: a log-probability for each token given those before it.

        bos: put the beginning-of-text token first, so that the first token of the text is scored too.
        stride: score a text of any length by windows of n_positions tokens that move on by this many.
        ablate: heads to switch off, as "layer.head".
        Raises PromptError for a text longer than the context if no stride is given.
        """
        size = self.config.n_positions
        if stride is not None:
            stride = integer("stride", stride, 1, size)
        ids = [*([self.bos_id()] if bos else []), *encode(self, text)]
        if len(ids) > size and stride is None:
            raise PromptError(f"the text has {len(ids)} tokens, but the model's context is {size}: give a stride")
        heads = self._heads(ablate)
        with undisturbed(self.model), torch.inference_mode():
            return scoring.evaluate(self.model, self.tokenizer, ids, stride, heads)

    def attention(self, text: Prompt, *, ablate: Iterable[str] = ()) -> Tensor:
        """What each head attends to in a text, or token ids: [L,H,T,T] float32 on the CPU; rows attend to columns.

        ablate: heads to switch off, as "layer.head".
        Raises PromptError for fewer than two tokens, or more than the context.
        """
        return heads.patterns(heads.without_heads(self.model, self._heads(ablate)), encode(self, text))

    def bos_id(self) -> int:
        """The beginning-of-text token. Raises PromptError if the model has none."""
        bos = self.config.bos_token_id
        if bos is None or not 0 <= bos < self.config.vocab_size:
            raise PromptError("the model has no beginning-of-text token, so the text must not be empty")
        return bos

    def _complete(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        batch_size: int,
        ablate: Iterable[str],
        overrides: dict[str, Any],
    ) -> Iterator[Completion]:
        """Check what can be checked now, and return the iterator that does the work."""
        batch_size = integer("batch_size", batch_size, 1, 4096)
        if isinstance(prompts, str):
            raise PromptError("generate_many takes a list of prompts: use generate for one")
        if params is None or isinstance(params, SamplingParams):
            each: Iterable[SamplingParams] = itertools.repeat(replace(params or SamplingParams(), **overrides))
        elif not isinstance(prompts, Sequence):
            raise ValueError("a list of params needs a list of prompts")
        else:
            params = list(params)
            if not all(isinstance(one, SamplingParams) for one in params):
                raise ValueError("params must be SamplingParams, or a list with one for each prompt")
            each = [replace(one, **overrides) for one in params]
            if len(params) != len(prompts):
                raise ValueError(f"{len(params)} params for {len(prompts)} prompts: give one for all, or one for each")
        named = not isinstance(prompts, Sequence) or len(prompts) > 1  # errors then say which prompt
        heads = self._heads(ablate)

        def requests() -> Iterator[Request]:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=False)):
                yield Request(self, prompt, one, index if named else None)

        if isinstance(prompts, Sequence):
            batch_size = max(1, min(batch_size, sum(request.params.samples for request in requests())))
        rows = (Row(self, request, sample) for request in requests() for sample in range(request.params.samples))
        return (_completed(result) for result in self._in_order(rows, batch_size, heads))

    def _in_order(self, rows: Iterator[Row | Failure], batch_size: int, heads: Heads) -> Iterator[Completion | Failure]:
        """Run the rows and give what becomes of them in the order in which they came."""
        order: deque[Row | Failure] = deque()  # what is not given yet

        def admitted() -> Iterator[Row | Failure | None]:
            while True:
                if len(order) >= 4 * batch_size:  # bounds what waits for one long row; None: not now
                    yield None
                    continue
                try:
                    row = next(rows, None)
                except (MiniGPTError, ValueError) as error:  # finish what is in work first; `rows` ends here
                    row = Failure(error)
                if row is None:
                    return
                order.append(row)
                yield row

        for _ in self._run(admitted(), batch_size, heads):
            while order and order[0].finish_reason:
                done = order.popleft()
                if isinstance(done, Failure):
                    yield done
                else:
                    yield Failure(done.error, started=True) if done.error else done.completion()

    def _run(
        self, waiting: Iterator[Row | Failure | None], slots: int, heads: Heads
    ) -> Iterator[tuple[Row | Failure, Step | None]]:
        """The decoding loop: yield each row's steps as they are drawn. A row that ends makes room for the next.

        A row that draws nothing comes with None, and so does one that fails: it ends with its `error` set.
        """
        cache: KVCache | None = None
        graph, flat = DecodeStep(self.model, heads), FlatStep(heads)
        active: list[Row] = []  # row i of the cache belongs to active[i]
        while True:
            while len(active) < slots and (row := next(waiting, None)) is not None:
                if isinstance(row, Failure) or row.finish_reason:  # max_new_tokens=0
                    yield row, None
                    continue
                if cache is None:
                    dtype = self.model.wpe.weight.dtype  # of the activations: self.dtype is that of the matrices
                    cache = KVCache(self.config, slots, row.max_len, device=self.device, dtype=dtype)
                    cache.lengths = []
                cache.reserve(row.max_len)
                with undisturbed(self.model), torch.inference_mode():
                    logits = self._admit(row, active, cache, heads)
                active.append(row)
                yield row, row.accept(logits)
                self._drop_finished(active, cache)
            if not active or cache is None:
                return
            with undisturbed(self.model), torch.inference_mode():
                logits = self._decode(active, cache, heads, graph, flat)
            for index, row in enumerate(active):
                yield row, row.accept(logits[index])
            self._drop_finished(active, cache)

    def _admit(self, row: Row, active: list[Row], cache: KVCache, heads: Heads) -> Tensor:
        """Fill the next slot of the cache, by prefill or from an active sample of the same prompt. Gives logits [V]."""
        slot = len(active)
        cache.lengths.append(0)
        request = row.request
        for index, other in enumerate(active):
            if other.request is request and not other.slid and request.logits is not None:
                cache.copy_row(index, slot, len(row.context))
                return request.logits
        logits = self._prefill(row.context, cache, slot, heads)
        if request.params.samples > 1:
            request.logits = logits
        return logits

    def _prefill(self, ids: list[int], cache: KVCache, slot: int, heads: Heads) -> Tensor:
        """Fill row `slot` of the cache with `ids` from position 0, and return the logits after the last one, [V]."""
        view = cache.row(slot)
        hidden = self.model.hidden(torch.tensor([ids], device=self.device), view, ablate=heads)  # (1, T, E)
        cache.lengths[slot] = view.lengths[0]
        return self.model.head(hidden[0, -1])

    def _decode(self, active: list[Row], cache: KVCache, heads: Heads, graph: DecodeStep, flat: FlatStep) -> Tensor:
        """Feed each row's last token; returns the logits after it, [B,V]."""
        for slot, row in enumerate(active):
            if cache.lengths[slot] == self.config.n_positions:  # only a row that slides gets here
                row.slid = True
                cache.lengths[slot] = 0
                if len(row.context) > 1:
                    self._prefill(row.context[:-1], cache, slot, heads)
        last = [row.history[-1] for row in active]
        if (logits := graph(last, cache)) is not None:  # on CUDA, when it pays
            return logits
        ids = torch.tensor(last, device=self.device)[:, None]  # (B, 1)
        if (logits := flat(self.model, ids, cache)) is not None:  # on a CPU, where it fits
            return logits
        return self.model.head(self.model.hidden(ids, cache, ablate=heads)[:, -1])

    def _drop_finished(self, active: list[Row], cache: KVCache) -> None:
        """Free the slots of finished rows; the last row moves into each gap."""
        for slot in reversed(range(len(active))):
            if active[slot].finish_reason:
                last = len(active) - 1
                if slot != last:
                    cache.copy_row(last, slot, cache.lengths[last])
                    active[slot] = active[last]
                active.pop()
                cache.lengths.pop()

    def _heads(self, ablate: Iterable[str]) -> list[tuple[int, int]]:
        return heads.named_heads(self.config, ablate)
