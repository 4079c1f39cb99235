"""Ragged batches: every row gives what it gives alone, whatever shares the batch with it and whenever it ends."""

from __future__ import annotations

import random

import pytest
import torch
from drawn import assert_same

from minigpt import GPT2, GPT2Config, LanguageModel, SamplingParams


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    """GPT-2's vocabulary, so that 50256 has its usual meaning, and room for 200 tokens and their continuation."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=216, initializer_range=0.3))
    return LanguageModel(model)


def random_prompt(rng: random.Random) -> list[int]:
    prompt = [rng.randrange(50257) for _ in range(rng.randint(1, 200))]
    for _ in range(rng.choice([0, 0, 1, 3])):
        prompt[rng.randrange(len(prompt))] = 50256
    return [] if rng.random() < 0.1 else prompt


@pytest.mark.parametrize("batches", [10, pytest.param(210, marks=pytest.mark.slow)])
def test_random_batches_give_what_each_row_gives_alone(lm: LanguageModel, batches: int) -> None:
    rng = random.Random(0)
    ties = rows = 0
    lengths: set[int] = set()
    reasons: set[str] = set()
    for _ in range(batches):
        n_rows = rng.randint(1, 16)
        prompts = [random_prompt(rng) for _ in range(n_rows)]
        params = [
            SamplingParams(
                max_new_tokens=rng.randint(1, 12),
                temperature=rng.choice([0.0, 0.8]),
                top_k=rng.choice([0, 20]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                seed=rng.randrange(2**64),
                stop_ids=rng.sample(range(50257), 6000),
            )
            for _ in range(n_rows)
        ]
        together = list(lm.generate_many(prompts, params, batch_size=rng.randint(1, n_rows)))
        for prompt, one, ours in zip(prompts, params, together, strict=True):
            alone = lm.generate([prompt], one)[0]
            assert ours.prompt_ids == (prompt or [50256]) == alone.prompt_ids and ours.seed == alone.seed
            tie = assert_same(lm, ours.prompt_ids, ours.ids, alone.ids, one)
            assert tie or ours == alone
            ties += tie
            rows += 1
            lengths.add(len(ours.ids))
            reasons.add(ours.finish_reason)
    print(f"{ties} ties in {rows} rows of {batches} batches")
    assert rows > 7 * batches and lengths == set(range(1, 13)) and reasons == {"stop", "length"}
    assert ties <= 5  # measured: 0
