"""Drafts: whatever guesses, the tokens are those drawn without, greedy or sampled, of one row or a few."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from drawn import assert_same, theirs
from tiny import from_hf, hf_model

import minigpt
from minigpt import GPT2, LanguageModel, SamplingParams
from minigpt.decoding import draft as drafting

VARIANTS: list[dict[str, Any]] = [
    {},
    {"activation_function": "relu"},
    {"activation_function": "gelu"},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"tie_word_embeddings": False},
    {"n_inner": 40},
    {"layer_norm_epsilon": 1e-3},
    {"n_head": 1, "n_layer": 1},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"no_repeat_ngram_size": 3, "temperature": 0.5},
    {"min_new_tokens": 6, "temperature": 1.0},
    {"logit_bias": {2: 2.0}, "suppress_tokens": (5, 9), "temperature": 1.2},
    {"stop_ids": (3, 4, 5, 6, 7, 8)},
    {"overflow": "slide", "stop_ids": ()},
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying costs nothing, so that every guess is used, however bad."""
    monkeypatch.setattr(drafting, "_time", lambda n, packed, calls: 1.0)
    monkeypatch.setattr(drafting, "_size", lambda model: 1.0 if model.h[0].mlp.c_fc.packed is None else 0.0)


def drafted(model: GPT2, source: str, seed: int) -> LanguageModel:
    """The model with a draft of some kind: "other" is a smaller model, which guesses badly."""
    if source != "other":
        return LanguageModel(model, draft=source)
    shape = {name: getattr(model.config, name) for name in ("n_embd", "n_head", "n_inner", "activation_function")}
    other = from_hf(hf_model(seed, n_layer=1, n_positions=24, **shape))
    return LanguageModel(model, draft=LanguageModel(other))


@pytest.mark.parametrize("source", ["lookup", "int8", "other"])
@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_ids_are_those_without_drafts(source: str, rounds: int, eager: None) -> None:
    """Every setting, model variant and length, one to four rows: 2,400 runs with --slow."""
    rng, runs, ties, tokens, passes = random.Random(source), 0, 0, 0, 0
    for _, (at, options) in itertools.product(range(rounds), enumerate(VARIANTS if rounds > 1 else VARIANTS[::2])):
        model = from_hf(hf_model(number := rng.randrange(10**6), **options))
        plain, fast = LanguageModel(model, draft="off"), drafted(model, source, number)
        for setting in SETTINGS if rounds > 1 else SETTINGS[at % 3 :: 3]:
            prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 20))] for _ in range(rng.randint(1, 4))]
            prompts[0] += prompts[0][: 28 - len(prompts[0])]  # a text that repeats itself
            seed = rng.randrange(99) if "temperature" in setting else None
            params = SamplingParams(max_new_tokens=rng.randint(1, 40), seed=seed, **setting)
            expected = [plain.generate(prompt, params) for prompt in prompts]
            for ours, alone in zip(fast.generate(prompts, params), expected, strict=True):
                tie = assert_same(plain, ours.prompt_ids, ours.ids, alone.ids, params)
                assert tie or (ours.text, ours.finish_reason) == (alone.text, alone.finish_reason)
                runs, ties = runs + 1, ties + tie
                tokens, passes = tokens + len(ours.ids), passes + ours.passes
    print(f"{source}: {ties} ties in {runs} runs, {tokens / passes:.2f} tokens a pass")
    assert ties <= runs // 500


@pytest.mark.parametrize("source", ["lookup", "int8", "other"])
@pytest.mark.parametrize("setting", SETTINGS[:7])
def test_ids_are_those_of_transformers(source: str, setting: dict[str, Any], eager: None) -> None:
    reference = hf_model(7)
    plain = LanguageModel(from_hf(reference), draft="off")
    fast = drafted(plain.model, source, 7)
    for seed in range(5):
        params = SamplingParams(max_new_tokens=24, seed=seed if "temperature" in setting else None, **setting)
        prompt = [3, 4, 5, 3, 4, 5, 3, 4][seed:]
        ours = fast.generate(prompt, params)
        assert_same(plain, prompt, ours.ids, theirs(reference, prompt, params), params)


CIRCLE = "The king said"  # and goes round in a circle


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return minigpt.load("demo")


def test_passes_are_fewer_than_tokens(demo: LanguageModel) -> None:
    """A step comes for each token all the same."""
    stream = demo.stream(CIRCLE, stop_ids=(), max_new_tokens=120)
    steps = list(stream)
    assert [step.id for step in steps] == stream.completion.ids
    assert "".join(step.text for step in steps) == stream.completion.text
    assert stream.completion.passes < 40  # measured: 25
    plain = LanguageModel(demo.model, demo.tokenizer, draft="off").generate(CIRCLE, stop_ids=(), max_new_tokens=120)
    assert plain == stream.completion and plain.passes == 119


def test_stops_inside_a_draft(demo: LanguageModel) -> None:
    """A stop string, an end id, the number of tokens and the time end the row where they end it without drafts."""
    plain = LanguageModel(demo.model, demo.tokenizer, draft="off")
    whole = plain.generate(CIRCLE, stop_ids=(), max_new_tokens=120)
    for options in (
        {"stop": whole.text[200:212]},
        {"stop_ids": [whole.ids[77]]},
        {"stop_ids": [whole.ids[90]], "min_new_tokens": 80},
        {"max_new_tokens": 71},
        {"max_seconds": 0.0},
    ):
        ours, alone = (
            lm.generate(CIRCLE, **{"max_new_tokens": 120, "stop_ids": (), **options}) for lm in (demo, plain)
        )
        assert ours == alone and ours.finish_reason != "context"


def test_a_closed_stream_goes_no_further(demo: LanguageModel) -> None:
    with demo.stream(CIRCLE, stop_ids=(), max_new_tokens=120) as stream:
        first = [next(stream).id for _ in range(50)]
    assert stream.completion.ids == first and list(stream) == []


def test_large_batches_and_beams_do_not_draft(demo: LanguageModel) -> None:
    assert all(one.passes == 39 for one in demo.generate([CIRCLE] * 5, stop_ids=(), max_new_tokens=40))
    assert any(one.passes < 39 for one in demo.generate([CIRCLE] * 4, stop_ids=(), max_new_tokens=40))
    assert demo.generate("Once", num_beams=2, max_new_tokens=40).score is not None


def test_a_hook_sees_only_what_was_generated(demo: LanguageModel) -> None:
    seen: list[int] = []
    handle = demo.model.wte.register_forward_pre_hook(lambda _, args: seen.extend(args[0].flatten().tolist()))
    try:
        done = demo.generate(CIRCLE, stop_ids=(), max_new_tokens=60)
    finally:
        handle.remove()
    assert seen == [*done.prompt_ids, *done.ids[:-1]] and done.passes == 59


def test_a_draft_with_hooks_or_damaged_weights_fails_nothing(eager: None) -> None:
    model, other = from_hf(hf_model(1)), from_hf(hf_model(2, n_layer=1))
    expected = LanguageModel(model, draft="off").generate([3, 4], max_new_tokens=20)
    lm = LanguageModel(model, draft=LanguageModel(other))
    handle = other.h[0].register_forward_hook(lambda *_: pytest.fail("the draft was used"))
    assert lm.generate([3, 4], max_new_tokens=20) == expected
    handle.remove()
    other.h[0].mlp.c_fc.weight.data.fill_(torch.nan)
    assert lm.generate([3, 4], max_new_tokens=20) == expected


def test_weights_that_change_reach_the_draft(eager: None) -> None:
    """Both read the same memory: what the int8 copy draws is again what the model draws."""
    lm = LanguageModel(from_hf(hf_model(3)), draft="int8")
    lm.generate([3], max_new_tokens=25)
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight.copy_(weight.flip(0))
    expected = LanguageModel(lm.model, draft="off").generate([3], max_new_tokens=25, stop_ids=())
    done = lm.generate([3], max_new_tokens=25, stop_ids=())
    assert done == expected and done.passes < 20


def test_what_cannot_draft_is_refused() -> None:
    model = from_hf(hf_model(0))
    for draft, words in (
        ("lookups", "draft must be lookup, off, int8 or a LanguageModel, not 'lookups'"),
        (LanguageModel(from_hf(hf_model(0, vocab_size=65))), "the draft has another vocabulary than the model"),
        (LanguageModel(model.to("cpu"), draft="off"), ""),
    ):
        if words:
            with pytest.raises(ValueError, match=words):
                LanguageModel(model, draft=draft)
        else:
            assert LanguageModel(model, draft=draft).draft is draft
    with pytest.raises(AttributeError):
        LanguageModel(model).draft = "off"  # type: ignore[misc, assignment]
    with pytest.raises(ValueError, match="draft int8 is for a model in float32 or float16 on the CPU"):
        minigpt.load("demo", dtype="int8", draft="int8")


def test_a_draft_is_loaded_by_name(demo: LanguageModel) -> None:
    lm = minigpt.load("demo", draft="demo")
    assert isinstance(lm.draft, LanguageModel) and lm.draft.draft == "off"
    assert lm.generate("Once", max_new_tokens=30) == demo.generate("Once", max_new_tokens=30)
    assert minigpt.load("demo", draft="int8").draft == "int8"
    assert demo.draft == "lookup" == demo.without(["0.1"]).draft
