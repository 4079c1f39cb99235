"""What transformers draws, and whether ours is the same but for ties that rounding decides."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from minigpt import LanguageModel, SamplingParams
from minigpt.decoding.sampling import process

MARGIN = 1e-4  # below this relative gap between the two best candidates, rounding may decide


def theirs(model: GPT2LMHeadModel, ids: list[int], params: SamplingParams) -> list[int]:
    """What transformers draws for the same parameters."""
    options: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens or None,
        "do_sample": params.temperature > 0,
        "repetition_penalty": params.repetition_penalty,
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "suppress_tokens": list(params.suppress_tokens) or None,
        "sequence_bias": {(id,): float(bias) for id, bias in params.logit_bias.items()} or None,
        "pad_token_id": 0,
    }
    if params.temperature > 0:
        options |= {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p or None,
        }
        torch.manual_seed(params.seed or 0)
    inputs = torch.tensor([ids], device=model.device)
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    return list(out[0, len(ids) :].tolist())


def gap(lm: LanguageModel, history: list[int], n_new: int, params: SamplingParams) -> float:
    """How close the two best candidates of one step are, relatively: of the logits, or of the race P/q."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([history], device=lm.device))[0, -1]
    scores = process(logits, history, n_new, params, lm.limits.end_ids)
    if params.temperature > 0:
        generator = torch.Generator(lm.device).manual_seed(params.seed or 0)
        for _ in range(n_new + 1):
            q = torch.empty_like(scores).exponential_(1, generator=generator)
        scores = scores.softmax(-1) / q
    best, second = scores.topk(2).values.tolist()
    return float((best - second) / max(abs(best), 1e-30))


def assert_same(
    lm: LanguageModel, prompt: list[int], ours: list[int], expected: list[int], params: SamplingParams
) -> int:
    """The ids are equal up to a tie, if any. Returns 1 where a tie decided, and prints it."""
    if ours == expected:
        return 0
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, expected)) if a != b)
    margin = gap(lm, prompt + ours[:at], at, params)
    assert margin < MARGIN, (
        f"token {at}: {ours[at : at + 3]} but transformers draws {expected[at : at + 3]}, gap {margin}"
    )
    print(f"tie at token {at}: relative gap {margin:.1e}, {params}")
    return 1
