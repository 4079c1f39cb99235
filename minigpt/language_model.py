"""LanguageModel: a GPT-2 and its tokenizer, to generate, stream, score and look inside with; and `save`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from minigpt import prompts as given
from minigpt.checks import integer, short_repr
from minigpt.decoding.batch import in_order
from minigpt.decoding.cuda_graph import graphs_of
from minigpt.decoding.draft import source_of
from minigpt.decoding.params import SamplingParams
from minigpt.decoding.sequence import Completion, Failure, Limits, Prompt, Sequence
from minigpt.decoding.streams import Stream, Streams
from minigpt.errors import PromptError, TokenizerError
from minigpt.files.checkpoint import write_checkpoint
from minigpt.interpret import heads
from minigpt.network.model import GPT2, undisturbed
from minigpt.network.products import forget
from minigpt.prompts import Task, Text, is_one_prompt, listed
from minigpt.scoring import Score, score_texts
from minigpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minigpt.options import Call, OneSample, Options
    from minigpt.scoring import ScoreCall

BATCH_SIZE = 8


class LanguageModel:
    """A GPT-2 with its tokenizer. Several threads may use it: a call keeps its state to itself.

    model: GPT2; it is put into eval mode.
    tokenizer: Tokenizer; None, or the TokenizerError that reading it raised: prompts are then token ids.
    end_ids: the model's own end ids; None: those of its config.
    defaults: what the checkpoint's generation_config.json sets. Nothing uses it unless you pass it as params.
    draft: "lookup", "off", "int8" or a model, as in `load`.
    config: GPT2Config.     device, dtype: of the weights.      limits: what decoding must know of the model.
    """

    def __init__(
        self,
        model: GPT2,
        tokenizer: Tokenizer | TokenizerError | None = None,
        end_ids: Collection[int] | None = None,
        *,
        defaults: SamplingParams | None = None,
        draft: str | LanguageModel = "lookup",
    ) -> None:
        self.model, self.config, self.graphs = model.eval(), model.config, graphs_of(model)
        self.defaults, self._tokenizer = defaults or SamplingParams(), tokenizer
        self.limits = Limits.of(self.config, tokenizer if isinstance(tokenizer, Tokenizer) else None, end_ids)
        self._draft, self._source = draft, source_of(draft, model, self.limits)
        self._without: dict[frozenset[tuple[int, int]], tuple[list[Any], list[Any], LanguageModel]] = {}

    def __repr__(self) -> str:
        millions, dtype = sum(one.numel() for one in self.model.parameters()) / 1e6, str(self.dtype)[len("torch.") :]
        tokenizer = self.limits.tokenizer.origin if self.limits.tokenizer else "none"
        return f"LanguageModel({millions:.1f}M parameters, {self.device}, {dtype}, tokenizer: {tokenizer})"

    def __getstate__(self) -> dict[str, Any]:  # for copy and pickle: kept ablations are made again
        return {**vars(self), "_without": {}}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError where the model has none."""
        if isinstance(self._tokenizer, Tokenizer):
            return self._tokenizer
        none = "this model has no tokenizer: give token ids (on a command line: --ids)"
        raise self._tokenizer or TokenizerError(none)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The format of the weights in matrix products."""
        packed = self.model.output.packed
        return packed.dtype if packed else self.model.wte.weight.dtype

    @property
    def draft(self) -> str | LanguageModel:
        """What guesses tokens, so that one pass verifies several: as in `load`."""
        return self._draft

    def encode(self, text: Text, *, special: bool = False) -> list[int]:
        """The token ids of a text, or of a list, 1-D tensor or array of ids, each in the vocabulary.

        special: special tokens spelled out in a text, such as <|endoftext|>, become one id each.
        Raises PromptError, or TokenizerError for a text where there is no tokenizer.
        """
        ids = self.tokenizer.encode(text, special=special) if isinstance(text, str) else given.as_ids(text)
        size = self.limits.vocab_size
        wrong = next((id for id in ids if not 0 <= id < size), None)
        if wrong is not None:
            raise PromptError(f"token id {short_repr(wrong)} is outside the vocabulary (0 to {size - 1})")
        return ids

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also an iterable of str: the first that fits counts
        self, prompt: Text, params: SamplingParams | None = None, **options: Unpack[Call]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Text, params: SamplingParams | None = None, *, samples: int, **options: Unpack[Call]
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompt: Iterable[Text], params: Any = None, *, samples: int | None = None, **options: Unpack[Call]
    ) -> list[Completion]: ...
    def generate(self, prompt: Any, params: Any = None, **options: Any) -> Any:
        """Continue a prompt, text or token ids: a Completion. For several prompts, or samples > 1: a flat list of them.

        params: how to decode (one for all, or a list with one per prompt); overrides replace its fields.
        special: as in `encode`.    ablate: heads to switch off, as "layer.head".
        Raises PromptError for an unusable prompt, ValueError for a bad parameter, TypeError for an unknown one.
        """
        single = is_one_prompt(prompt := listed(prompt))
        completions = list(self.generate_many([prompt] if single else prompt, params, **options))
        return completions[0] if single and len(completions) == 1 else completions

    def generate_many(
        self,
        prompts: Iterable[Text],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        special: bool = False,
        ablate: Iterable[str] = (),
        **overrides: Unpack[Options],
    ) -> Iterator[Completion]:
        """Continue many prompts, `batch_size` rows at a time; completions come in input order, samples side by side.

        Each row gives what it gives alone. A list is checked whole before anything is generated, and an error names the
        prompt's index. Any other iterable is read as needed, so that memory stays bounded by the rows in work; a bad
        prompt in it raises once those before it are given. Raises as `generate` does.
        """
        slots, lm, prompts = integer("batch_size", batch_size, 1, 4096), self.without(ablate), listed(prompts)
        pairs = given.checked(prompts, params, overrides, partial(lm.encode, special=special), lm.limits)
        if isinstance(prompts, SequenceOf):
            pairs = iter(whole := list(pairs))
            slots = max(1, min(slots, sum(max(one.samples, one.num_beams) for _, one in whole)))
        rows = (row for prompt, one in pairs for row in given.samples(prompt, one, lm.limits))
        return map(given.completed, in_order(lm.model, rows, slots, lm._source))

    def generate_each(self, tasks: Iterable[Task], *, batch_size: int = BATCH_SIZE) -> Iterator[Completion | Failure]:
        """Continue prompts with parameters of their own, where one that fails must not stop the others.

        tasks: (prompt, SamplingParams) pairs, read as needed; or a Failure, which comes out in its turn.
        Gives, in order, a Completion for each sample of each task, or a Failure: one for a prompt that cannot be used,
        and one for a sample that could not go on (no token left to draw, logits that are not finite).
        """
        slots = integer("batch_size", batch_size, 1, 4096)
        rows = (row for row in given.sequences(tasks, self.encode, self.limits) if row is not None)
        return in_order(self.model, rows, slots, self._source)

    def stream(
        self,
        prompt: Text,
        params: SamplingParams | None = None,
        *,
        special: bool = False,
        ablate: Iterable[str] = (),
        **overrides: Unpack[OneSample],
    ) -> Stream:
        """Continue one prompt, a Step per drawn token as soon as it is drawn (none if max_new_tokens is 0).

        Raises, at the call and not at the first step, as `generate` does.
        """
        params, lm, prompt = given.final(params, overrides), self.without(ablate), listed(prompt)
        if params.samples != 1:
            raise ValueError(f"stream gives one sample, not {params.samples}: use generate for several")
        if params.num_beams != 1:
            raise ValueError("stream shows tokens as they are drawn, num_beams above 1 decides later: use generate")
        if not is_one_prompt(prompt) and len(prompt):
            raise PromptError("stream takes one prompt: use generate_many for several")
        checked = Prompt(lm.encode(prompt, special=special), params, lm.limits)
        return Stream(lm.model, Sequence(checked, params, 0, lm.limits), lm._source)

    def stream_many(
        self,
        prompts: Iterable[Text | Task | None],
        params: SamplingParams | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        special: bool = False,
        **overrides: Unpack[Options],
    ) -> Streams:
        """Continue many prompts together: (row, Step or Failure) as they come; see Streams.

        prompts: read as slots become free; each a prompt, or a task as in `generate_each`, or None for "nothing yet":
            let the input wait a moment before it gives None, as it is asked again at once where no row is running.
        """
        base, slots = given.final(params, overrides), integer("batch_size", batch_size, 1, 4096)
        rows = given.sequences(prompts, partial(self.encode, special=special), self.limits, base)
        return Streams(self.model, rows, slots, self._source)

    @overload
    def score(self, text: Text, **options: Unpack[ScoreCall]) -> Score: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, text: Iterable[Text], **options: Unpack[ScoreCall]) -> list[Score]: ...
    def score(
        self,
        text: Any,
        *,
        context: Any = None,
        bos: bool = False,
        stride: int | None = None,
        logprobs: int | None = None,
        special: bool = False,
        ablate: Iterable[str] = (),
    ) -> Any:
        """How likely the model finds a text, or token ids: a Score. For a list of texts: a list of them, in batches.

        context: text or ids that come before and are not scored; for a list, a list with one for each. Text is cut into
            tokens as the lm-evaluation-harness does; an empty context is the beginning-of-text token; of one that is
            too long the end is used.
        bos: put the beginning-of-text token first, so that the first token of the text is scored too.
        stride: score a text of any length by windows of n_positions tokens that move on by this many.
        logprobs: also the k best tokens in each place (Score.top).
        Raises PromptError for a text longer than the context if no stride is given.
        """
        text, lm = listed(text), self.without(ablate)
        texts, contexts = ([text], [context]) if (single := is_one_prompt(text)) else (text, context)
        contexts = [None] * len(texts) if contexts is None else contexts
        with undisturbed(lm.model):
            encode = partial(lm.encode, special=special)
            scores = score_texts(lm.model, lm.limits, encode, texts, contexts, bos, stride, logprobs)
        return scores[0] if single else scores

    def attention(self, text: Text, *, special: bool = False, ablate: Iterable[str] = ()) -> Tensor:
        """What each head attends to in a text, or token ids: [L,H,T,T] float32 on the CPU; rows attend to columns.

        Raises PromptError for fewer than two tokens, or more than the context.
        """
        return heads.patterns(self.without(ablate).model, self.encode(text, special=special))

    def without(self, ablate: Iterable[str]) -> LanguageModel:
        """This model with heads, named "layer.head", switched off; itself where none is named.

        It shares all memory but the W_O of the named layers. Four are kept until the model changes.
        """
        pairs = frozenset(heads.named_heads(self.config, ablate))
        if not pairs:
            return self
        modules, weights = list(self.model.modules()), list(self.model.parameters())
        hooks = [key for at in modules for key in (*at._forward_hooks, *at._forward_pre_hooks)]
        # object(): equal to nothing, as nobody counts what an optimizer writes
        counts = [object() if w.requires_grad else 0 if w.is_inference() else w._version for w in weights]
        state = [*map(id, [*modules, *weights]), *hooks, *counts]
        if (known := self._without.get(pairs)) is None or known[0] != state:
            model = heads.without_heads(self.model, pairs)
            lm = LanguageModel(model, self._tokenizer, self.limits.end_ids, defaults=self.defaults, draft="off")
            lm._draft, lm._source = self._draft, self._source  # a draft may be of another model, here with all heads
            known = self._without[pairs] = (state, [modules, weights], lm)  # held, so that no id is used again
            if len(self._without) > 4:
                self._without.pop(next(iter(self._without)), None)
        return known[2]

    def weights_changed(self) -> None:
        """Say that weights were written to in a way that PyTorch does not count: through `.data`, numpy or C code."""
        forget(self.model)
        self._without.clear()

    def release(self) -> None:
        """Give back the memory that is only kept for speed: the last ablated models, CUDA graphs not in use."""
        self._without.clear()
        self.graphs.release()


def save(lm_or_model: LanguageModel | GPT2, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Write a model as OpenAI's checkpoints are, for transformers too; of a LanguageModel, also the tokenizer's files.

    dtype: a float format for the file, the model's own where not given. Every file appears whole or not at all.
    Raises CheckpointError if the folder holds a model already, or cannot be written; ValueError for a dtype that is no
    float, TypeError for another kind of model.
    """
    if isinstance(lm_or_model, LanguageModel):
        tokenizer = lm_or_model.limits.tokenizer
        write_checkpoint(lm_or_model.model, Path(folder), dtype, tokenizer.files() if tokenizer else {})
    elif isinstance(lm_or_model, GPT2):
        write_checkpoint(lm_or_model, Path(folder), dtype)
    else:
        kind = type(lm_or_model).__name__
        raise TypeError(f"save takes a minigpt model, not {kind}: those of transformers have save_pretrained(folder)")
