"""LanguageModel: a model, its tokenizer, and the decoding loop (prefill, decode, stops, streams, batches).

One loop serves everything: `stream` is a batch of one, `generate` collects it, and `generate_many` keeps a batch of rows
going, where a row that ends makes room for the next prompt.
"""

from __future__ import annotations

import operator
import os
import re
import secrets
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minigpt import checkpoint
from minigpt.cache import KVCache
from minigpt.config import GPT2Config, SamplingParams
from minigpt.errors import DeviceError, PromptError, TokenizerError
from minigpt.model import GPT2
from minigpt.sampling import check_params, draw, log_probabilities, process
from minigpt.tokenizer import TextStream, Tokenizer

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

    text: without the end token or stop string.     ids: every drawn token, those of the end or stop included.
    finish_reason: "stop" (an end id or stop string), "length" (max_new_tokens) or "context" (no position left).
    logprobs: one TokenLogprob per id, or None.      seed: what the sampling used; None for greedy without one.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    seed: int | None


def load(
    model: str | os.PathLike[str] = "gpt2",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    offline: bool = False,
    progress: bool = False,
) -> LanguageModel:
    """Load a model with its tokenizer.

    model: "demo", an alias (gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2), a folder, or a Hugging Face hub id.
    device: "auto" (CUDA if usable, else the CPU), "cpu", "cuda" or "cuda:N".
    dtype: "float32"; on CUDA also "float16" and "bfloat16".
    revision: a branch, tag or commit on the hub.
    offline: never use the network, only what is already in the cache.
    progress: show download bars on stderr.

    Raises ModelNotFoundError, CheckpointError, TokenizerError or DeviceError, each saying what to do.
    """
    place = _device(device)
    precision = _dtype(dtype, place)
    folder = checkpoint.locate(model, revision=revision, offline=offline, progress=progress)
    config = checkpoint.read_config(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    network = checkpoint.load_model(folder, device=place, dtype=precision)
    return LanguageModel(network, tokenizer, checkpoint.end_ids(folder, config))


def _device(device: str | torch.device) -> torch.device:
    """The device meant, if it is there; DeviceError where it is not."""
    name = str(device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise DeviceError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    place = torch.device(name)
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            there = f"this machine has {count} (cuda:0 to cuda:{count - 1})" if count else "PyTorch finds no CUDA device"
            raise DeviceError(f"device {name!r} is not there: {there}; use --device cpu or auto")
    return place


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype meant, if `device` supports it; DeviceError naming the ones that it does otherwise."""
    name = str(dtype).removeprefix("torch.")
    allowed = ("float32",) if device.type == "cpu" else ("float32", "float16", "bfloat16")
    if name not in allowed:
        raise DeviceError(f"dtype {name!r} is not supported on {device.type}: use {' or '.join(allowed)}")
    if device.type == "cuda" and name == "float32" and torch.get_float32_matmul_precision() != "highest":
        warnings.warn(
            "TF32 is enabled (torch.backends.cuda.matmul.allow_tf32 or torch.set_float32_matmul_precision): "
            "float32 results will differ from the CPU's in the third digit",
            stacklevel=3,
        )
    found: torch.dtype = getattr(torch, name)
    return found


class LanguageModel:
    """A GPT-2 with its tokenizer. Safe to use from several threads: a call keeps its state to itself.

    model: GPT2.        tokenizer: Tokenizer, or None where the checkpoint has none (prompts are then token ids).
    config: GPT2Config. device, dtype: where the weights are and in what format.
    end_ids: the model's own end ids.
    """

    def __init__(self, model: GPT2, tokenizer: Tokenizer | None = None, end_ids: Collection[int] | None = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config: GPT2Config = model.config
        self.device = model.wte.weight.device
        self.dtype = model.wte.weight.dtype
        eos = self.config.eos_token_id
        own = end_ids if end_ids is not None else eos if isinstance(eos, tuple) else () if eos is None else (eos,)
        self.end_ids = tuple(id for id in own if 0 <= id < self.config.vocab_size)
        # Checkpoints may pad the vocabulary: rows without a token must never be drawn.
        self._missing_ids = [id for id in range(self.config.vocab_size) if tokenizer is not None and id not in tokenizer]

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ablate: Iterable[str] = (),
        **overrides: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt, text or token ids: a Completion. For several prompts, or samples > 1: a flat list of them.

        params: how to decode (one for all, or a list with one per prompt); overrides replace its fields.
        ablate: heads to switch off, as "layer.head".
        Raises PromptError for a prompt that cannot be used, ValueError for a bad parameter, TypeError for an unknown one.
        """
        single = _is_one_prompt(prompt)
        prompts: Any = [prompt] if single else prompt
        completions = list(self._complete(prompts, params, 8, ablate, overrides))
        return completions[0] if single and len(completions) == 1 else completions

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = 8,
        **overrides: Any,
    ) -> Iterator[Completion]:
        """Continue many prompts, `batch_size` rows at a time; completions come in input order, samples side by side.

        Each row gives what it gives alone. A list is checked whole before anything is generated, and an error names the
        prompt's index; any other iterable is read as needed, so that memory stays bounded by the rows in work.
        """
        return self._complete(prompts, params, batch_size, (), overrides)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, ablate: Iterable[str] = (), **overrides: Any
    ) -> Iterator[Step]:
        """Continue one prompt, yielding a Step per drawn token as soon as it is drawn (none if max_new_tokens is 0)."""
        params = replace(params or SamplingParams(), **overrides)
        if params.samples != 1:
            raise ValueError(f"stream gives one sample, not {params.samples}: use generate for several")
        if not _is_one_prompt(prompt):
            raise PromptError("stream takes one prompt: use generate_many for several")
        row = _Row(self, _Request(self, prompt, params), 0)
        return (step for _, step in self._run(iter([row]), 1, self._heads(ablate)))

    def _complete(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        batch_size: int,
        ablate: Iterable[str],
        overrides: dict[str, Any],
    ) -> Iterator[Completion]:
        """Check what can be checked now, and return the iterator that does the work."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size!r}")
        if isinstance(prompts, str):
            raise PromptError("generate_many takes a list of prompts: use generate for one")
        shared = None
        if params is None or isinstance(params, SamplingParams):
            shared = replace(params or SamplingParams(), **overrides)
        if isinstance(prompts, Sequence):
            each = [shared] * len(prompts) if shared else [replace(one, **overrides) for one in params or ()]  # type: ignore[union-attr]
            if len(each) != len(prompts):
                raise ValueError(f"{len(each)} params for {len(prompts)} prompts: give one for all, or one for each")
            for index, prompt in enumerate(prompts):
                _Request(self, prompt, each[index], index)
            batch_size = max(1, min(batch_size, sum(one.samples for one in each)))
        elif shared is None:
            raise ValueError("a list of params needs a list of prompts")
        heads = self._heads(ablate)

        def rows() -> Iterator[_Row]:
            for index, prompt in enumerate(prompts):
                one = shared or each[index]
                request = _Request(self, prompt, one, index)
                for sample in range(one.samples):
                    yield _Row(self, request, sample)

        return self._in_order(rows(), batch_size, heads)

    def _in_order(self, rows: Iterator[_Row], batch_size: int, heads: Collection[tuple[int, int]]) -> Iterator[Completion]:
        """Run the rows and give their completions in the order in which the rows came."""
        order: list[_Row] = []

        def noted() -> Iterator[_Row]:
            for row in rows:
                order.append(row)
                yield row

        for _ in self._run(noted(), batch_size, heads):
            while order and order[0].finish_reason:
                yield order.pop(0).completion()
        yield from (row.completion() for row in order)

    def _run(self, waiting: Iterator[_Row], slots: int, heads: Collection[tuple[int, int]]) -> Iterator[tuple[_Row, Step]]:
        """The decoding loop: yield each row's steps as they are drawn. A row that ends frees its slot for the next one."""
        cache: KVCache | None = None
        active: list[_Row] = []  # row i of the cache belongs to active[i]
        while True:
            while len(active) < slots and (row := next(waiting, None)) is not None:
                if row.finish_reason:  # max_new_tokens=0
                    continue
                if cache is None:
                    cache = KVCache(self.config, slots, row.max_len, device=self.device, dtype=self.dtype)
                    cache.lengths = []
                cache.reserve(row.max_len)
                logits = self._admit(row, active, cache, heads)
                active.append(row)
                yield row, row.accept(logits)
                self._drop_finished(active, cache)
            if not active or cache is None:
                return
            logits = self._decode(active, cache, heads)
            for index, row in enumerate(active):
                yield row, row.accept(logits[index])
            self._drop_finished(active, cache)

    @torch.inference_mode()
    def _admit(self, row: _Row, active: list[_Row], cache: KVCache, heads: Collection[tuple[int, int]]) -> Tensor:
        """Prefill a row in the next slot of the cache; samples of one prompt share the work. Returns logits [V]."""
        slot = len(active)
        cache.lengths.append(0)
        request = row.request
        for index, other in enumerate(active):
            if other.request is request and not other.slid and request.logits is not None:
                cache.copy_row(index, slot, len(row.context))
                return request.logits
        request.logits = self._prefill(row.context, cache, slot, heads)
        return request.logits

    def _prefill(self, ids: list[int], cache: KVCache, slot: int, heads: Collection[tuple[int, int]]) -> Tensor:
        """Fill row `slot` of the cache with `ids` from position 0, and return the logits after the last of them, [V]."""
        view = cache.row(slot)
        hidden = self.model.hidden(torch.tensor([ids], device=self.device), view, ablate=heads)  # (1, T, E)
        cache.lengths[slot] = view.lengths[0]
        return self.model.head(hidden[0, -1])

    @torch.inference_mode()
    def _decode(self, active: list[_Row], cache: KVCache, heads: Collection[tuple[int, int]]) -> Tensor:
        """Feed each row's last token; returns the logits after it, [B,V]."""
        for slot, row in enumerate(active):
            if cache.lengths[slot] == self.config.n_positions:  # only a row that slides gets here
                row.slid = True
                cache.lengths[slot] = 0
                if len(row.context) > 1:
                    self._prefill(row.context[:-1], cache, slot, heads)
        ids = torch.tensor([[row.history[-1]] for row in active], device=self.device)  # (B, 1)
        return self.model.head(self.model.hidden(ids, cache, ablate=heads)[:, -1])

    def _drop_finished(self, active: list[_Row], cache: KVCache) -> None:
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
        """Heads named "layer.head" as pairs; ValueError for a name that the model does not have."""
        heads = []
        for name in [ablate] if isinstance(ablate, str) else ablate:
            match = re.fullmatch(r"(\d+)\.(\d+)", str(name))
            if not match or int(match[1]) >= self.config.n_layer or int(match[2]) >= self.config.n_head:
                raise ValueError(
                    f"ablate names heads as layer.head, from 0.0 to {self.config.n_layer - 1}.{self.config.n_head - 1}, "
                    f"not {name!r}"
                )
            heads.append((int(match[1]), int(match[2])))
        return heads


def _is_one_prompt(prompt: Any) -> bool:
    """A str or a list of ints is one prompt; a list of anything else, or of nothing, is many."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    return len(prompt) > 0 and hasattr(prompt[0], "__index__")


class _Request:
    """One prompt, checked, with how to continue it: what its samples share."""

    def __init__(self, lm: LanguageModel, prompt: Prompt, params: SamplingParams, index: int | None = None) -> None:
        try:
            check_params(params, lm.config.vocab_size)
            self.ids = self._encode(lm, prompt)
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

    @staticmethod
    def _encode(lm: LanguageModel, prompt: Prompt) -> list[int]:
        """The prompt's token ids; an empty prompt is the beginning-of-text token."""
        size = lm.config.vocab_size
        if isinstance(prompt, str):
            if lm.tokenizer is None:
                raise TokenizerError("this model has no tokenizer: give the prompt as token ids")
            ids = lm.tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            try:
                ids = [operator.index(item) for item in prompt]
            except TypeError:
                raise PromptError(f"a prompt is text or a list of token ids, not {list(prompt)[:5]!r}") from None
        else:
            raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        for item in ids:
            if not 0 <= item < size:
                raise PromptError(f"token id {item} is outside the vocabulary (0 to {size - 1})")
        bos = lm.config.bos_token_id
        if not ids and (bos is None or not 0 <= bos < size):
            raise PromptError("the prompt is empty, and the model has no beginning-of-text token to start from")
        return ids or [bos]  # type: ignore[list-item]


class _Row:
    """One sequence being continued: its tokens, its random generator, and the text it may show."""

    def __init__(self, lm: LanguageModel, request: _Request, sample: int) -> None:
        params = request.params
        self.request, self.params = request, params
        self.history = list(request.ids)  # prompt and drawn tokens: what the processors see
        self.limit = lm.config.n_positions
        self.slid = False
        self.finish_reason: str | None = None if params.max_new_tokens else "length"
        self.steps: list[Step] = []
        self.end_ids = frozenset(lm.end_ids if params.stop_ids is None else params.stop_ids)
        self.missing_ids = lm._missing_ids
        self.text = TextStream(lm.tokenizer) if lm.tokenizer else None
        self.stop = _StopText(params.stop)
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

    @torch.inference_mode()
    def accept(self, logits: Tensor) -> Step:
        """Draw a token from the logits [V] and work out what it shows and whether it is the last."""
        params, drawn = self.params, len(self.steps)
        scores = process(logits, self.history, drawn, params, self.end_ids, self.missing_ids)
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


class _StopText:
    """Finds stop strings in streamed text: holds back what may begin one, cuts exactly before the first one found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take more text, give what can be shown. Nothing more is shown once a stop string is found."""
        if self.found:
            return ""
        self.held += text
        hits = [at for at in map(self.held.find, self.stops) if at >= 0]
        if hits:
            self.found = True
            cut = min(hits)
        else:  # keep the longest end of the text that begins a stop string
            cut = next((i for i in range(len(self.held)) if self._may_begin_stop(self.held[i:])), len(self.held))
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown

    def _may_begin_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self.stops)

    def flush(self) -> str:
        """No more text comes: what was held back, unless it is a stop string."""
        return "" if self.found else self.held
