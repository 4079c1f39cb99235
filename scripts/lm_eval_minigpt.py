"""EleutherAI's lm-evaluation-harness on a GPT-2, through minigpt.

    pip install -e ".[lm-eval]"
    python scripts/lm_eval_minigpt.py --model_args pretrained=gpt2 --tasks lambada_openai,wikitext

All options are the harness's own (`--help`); --model is minigpt unless given. model_args: pretrained (what minigpt's -m
takes), device, dtype, revision, offline, and seed for tasks that sample (0 unless given). Encoding, windows and
truncation are those of the harness's `hf` model, so the scores are too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import minigpt
from minigpt import PromptError, SamplingParams, TokenizerError

OPTIONS = ("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")  # of transformers' names, as ours


@register_model("minigpt")
class MiniGPT(TemplateLM):  # type: ignore[misc]
    """A minigpt.LanguageModel for the harness: loglikelihood, loglikelihood_rolling and generate_until."""

    def __init__(
        self,
        pretrained: str = "gpt2",
        batch_size: int | str = 8,
        device: str | None = None,
        dtype: str = "float32",
        revision: str | None = None,
        offline: bool = False,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.lm = minigpt.load(pretrained, device=device or "auto", dtype=dtype, revision=revision, offline=offline)
        if self.lm.limits.tokenizer is None:
            raise TokenizerError(f"{pretrained} has no tokenizer, and the harness gives texts")
        self.batch_size = 8 if str(batch_size).startswith("auto") else int(batch_size)
        n_positions = self.lm.config.n_positions
        self.max_length = min(int(max_length or n_positions), n_positions)
        self.max_gen_toks, self.seed = int(max_gen_toks), int(seed)

    @property
    def eot_token_id(self) -> int:
        """The token that separates texts, and comes before a text without a context."""
        if self.lm.limits.bos_id is None:
            raise PromptError("the model has no beginning-of-text token, and the harness needs one")
        return self.lm.limits.bos_id

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return "minigpt"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids, where <|endoftext|> is one token, as transformers has it."""
        return self.lm.encode(string, special=True)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(context, continuation) ids -> the continuation's log-probability, and whether greedy decoding gives it."""
        longest = max((len(wanted) for _, _, wanted in requests), default=0)
        if longest > self.max_length:
            raise ValueError(f"a continuation has {longest} tokens, but the context is {self.max_length}")
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda at: -len(requests[at][1]) - len(requests[at][2]))
        for start in tqdm(range(0, len(order), self.batch_size), desc="loglikelihood", disable=disable_tqdm):
            batch = order[start : start + self.batch_size]
            inputs = [(requests[at][1] + requests[at][2])[-self.max_length - 1 : -1] for at in batch]
            longest = max(map(len, inputs))
            # Padded on the right, with any token: a causal model does not look ahead.
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in inputs], device=self.lm.device)
            hidden = self.lm.model.hidden(ids)  # (B, T, E)
            for row, at in enumerate(batch):
                context, wanted = requests[at][0], torch.tensor(requests[at][2], device=self.lm.device)
                last = len(inputs[row])
                logits = self.lm.model.head(hidden[row, last - len(wanted) : last]).float()  # (T', V)
                logprobs = logits.log_softmax(-1).gather(1, wanted[:, None])
                results[at] = (float(logprobs.sum()), bool((logits.argmax(-1) == wanted).all()))
                if context is not None:
                    self.cache_hook.add_partial("loglikelihood", context, results[at])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows that do not overlap, each after one token of context."""
        windows, owners = [], []
        for at, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, wanted in map(make_disjoint_window, rolling):
                windows.append((None, context, wanted))
                owners.append(at)
        totals = [0.0] * len(requests)
        for at, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[at] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text up to the first stop string; a context that leaves no room for it loses its beginning."""
        prompts, params = [], []
        end = self.lm.tokenizer.decode([self.eot_token_id])
        for request in requests:
            context, options = request.args
            wanted = dict(normalize_gen_kwargs(options, self.max_gen_toks))
            n_new = wanted.pop("max_gen_toks")
            stop = tuple(text for text in handle_stop_sequences(wanted.pop("until", None), eos=end) if text)
            temperature = wanted.pop("temperature", 0.0) if wanted.pop("do_sample", False) else 0.0
            if n_new >= self.max_length:
                raise ValueError(f"max_gen_toks ({n_new}) must be below the context of {self.max_length} tokens")
            if unknown := set(wanted) - set(OPTIONS):
                raise ValueError(f"generation option {sorted(unknown)[0]!r} is not supported")
            prompts.append(self.tok_encode(context)[-(self.max_length - n_new) :])
            seed = self.seed if temperature > 0 else None
            params.append(SamplingParams(max_new_tokens=n_new, temperature=temperature, stop=stop, seed=seed, **wanted))
        completions = self.lm.generate_many(prompts, params, batch_size=self.batch_size)
        texts = []
        for request, done in zip(requests, tqdm(completions, total=len(prompts), disable=disable_tqdm), strict=True):
            texts.append(done.text)
            self.cache_hook.add_partial("generate_until", request.args, done.text)
        return texts


if __name__ == "__main__":
    if not any(arg == "--model" or arg.startswith("--model=") for arg in sys.argv):
        at = 2 if sys.argv[1:2] == ["run"] else 1
        sys.argv[at:at] = ["--model", "minigpt"]
    cli_evaluate()
