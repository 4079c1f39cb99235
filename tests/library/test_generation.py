"""LanguageModel: token for token against transformers, and the rules of stops, streams, seeds and context limits."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEVICES
from drawn import assert_same, theirs
from tiny import from_hf, hf_model
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel, PromptError, SamplingParams, Tokenizer, TokenizerError
from minigpt.decoding.batch import Batch
from minigpt.network.device import find_device, find_dtype


@pytest.fixture(scope="module")
def reference() -> GPT2LMHeadModel:
    return hf_model(vocab_size=131, n_positions=160, eos_token_id=130, bos_token_id=1)


@pytest.fixture(scope="module")
def lm(reference: GPT2LMHeadModel) -> LanguageModel:
    return LanguageModel(from_hf(reference))


@pytest.fixture(scope="module")
def gpt2_sized() -> LanguageModel:
    """A small model with GPT-2's real tokenizer, for everything about text."""
    torch.manual_seed(0)
    return LanguageModel(GPT2(GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=64)), Tokenizer.gpt2())


class Scripted(GPT2):
    """A model that says what it is told to: position p is followed by script[p], whatever came before."""

    def __init__(self, script: list[int], n_positions: int = 64) -> None:
        super().__init__(GPT2Config(n_embd=4, n_head=1, n_layer=1, n_positions=n_positions))
        self.script = script

    def hidden(self, ids: torch.Tensor, cache: Any = None, **_: Any) -> torch.Tensor:
        _, positions = cache.indices(ids.shape[1])
        cache.advance(ids.shape[1])
        return positions[..., None].float()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = hidden[..., 0].long()
        ids = torch.tensor([self.script[p % len(self.script)] for p in positions.flatten()]).view(positions.shape)
        return torch.nn.functional.one_hot(ids, self.config.vocab_size).float()


def scripted(ids: list[int], **options: Any) -> LanguageModel:
    """The model above with GPT-2's tokenizer: a one-token prompt is followed by exactly `ids`."""
    return LanguageModel(Scripted(ids, **options), Tokenizer.gpt2())


# Parity with transformers

PROCESSORS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 1},
    {"top_k": 10},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 20},
    {"suppress_tokens": (3, 5, 7, 130)},
    {"logit_bias": {4: 5.0, 9: -30.0}},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"logit_bias": {130: 6.0}, "min_new_tokens": 5, "top_k": 30},
    {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 4,
        "min_new_tokens": 10,
        "suppress_tokens": (1, 2),
        "logit_bias": {8: 1.0},
    },
]


@pytest.mark.parametrize("options", PROCESSORS, ids=str)
def test_sampled_and_greedy_ids_equal_transformers(
    reference: GPT2LMHeadModel, lm: LanguageModel, options: dict[str, Any]
) -> None:
    prompt = [5, 17, 99, 3, 17, 99, 42]
    ties = 0
    for seed in range(5):
        params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 40, "seed": seed, **options})
        ties += assert_same(lm, prompt, lm.generate(prompt, params).ids, theirs(reference, prompt, params), params)
    greedy = SamplingParams(**{**options, "temperature": 0.0, "max_new_tokens": 40})
    ties += assert_same(lm, prompt, lm.generate(prompt, greedy).ids, theirs(reference, prompt, greedy), greedy)
    assert ties <= 1, "ties are rare: more means that something is wrong"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_greedy_ids_equal_transformers_for_150_tokens(reference: GPT2LMHeadModel, device: str) -> None:
    lm = LanguageModel(from_hf(reference).to(device))
    params = SamplingParams(max_new_tokens=150, stop_ids=(), suppress_tokens=(130,))
    for seed in range(5):
        prompt = torch.randint(0, 130, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert_same(lm, prompt, lm.generate(prompt, params).ids, theirs(reference, prompt, params), params)


@pytest.mark.parametrize(
    "options", [{"reorder_and_upcast_attn": True}, {"tie_word_embeddings": False}, {"n_inner": 40}], ids=str
)
def test_variants_decode_as_transformers_does(options: dict[str, Any]) -> None:
    reference = hf_model(n_positions=128, **options)
    lm = LanguageModel(from_hf(reference))
    for params in (SamplingParams(max_new_tokens=100), SamplingParams(max_new_tokens=100, temperature=1, seed=3)):
        assert_same(lm, [4, 9, 2], lm.generate([4, 9, 2], params).ids, theirs(reference, [4, 9, 2], params), params)


@pytest.fixture(scope="module")
def official_layout(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Path]:
    """GPT-2 small's shape with random weights, as save_pretrained writes it: 548 MB."""
    reference = hf_model(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, eos_token_id=50256)
    for parameter in reference.parameters():
        parameter.data *= 0.3  # of 0.3: GPT-2's own weights have a standard deviation near 0.1
    folder = tmp_path_factory.mktemp("official")
    reference.save_pretrained(folder)
    return reference, folder


@pytest.mark.slow
def test_the_official_layout_decodes_as_transformers_does(official_layout: tuple[GPT2LMHeadModel, Path]) -> None:
    reference, folder = official_layout
    lm = minigpt.load(folder, device="cpu")
    prompt = Tokenizer.gpt2().encode("The quick brown fox jumps over the lazy dog")
    for options in ({}, {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 1}):
        params = SamplingParams(max_new_tokens=64, min_new_tokens=64, **options)
        expected = theirs(reference, prompt, params)
        assert len(expected) == 64
        assert assert_same(lm, prompt, lm.generate(prompt, params).ids, expected, params) == 0


# The published activations of a trained model


def test_llm_viz_activations_and_sorting(golden: Path) -> None:
    """Every activation recorded by llm-viz, and all 729 inputs sorted; the sixth token out uses the last position."""
    import numpy as np

    lm = minigpt.load(golden / "llmviz")
    recorded = {name: torch.from_numpy(array) for name, array in np.load(golden / "llmviz" / "partials.npz").items()}
    ids = recorded["idx"].long()
    seen: dict[str, torch.Tensor] = {}
    block = lm.model.h[0]
    hooks = {"ln1": block.ln_1, "qkv": block.attn.c_attn, "yProj": block.attn.c_proj, "ln2": block.ln_2}
    hooks |= {"fc": block.mlp.c_fc, "mlp": block.mlp.c_proj, "ln_f": lm.model.ln_f, "tok_emb": lm.model.wte}
    for name, module in hooks.items():
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out, f"{name} input": args[0]}))
    from minigpt.network.model import Record

    record = Record()
    with torch.no_grad():
        logits = lm.model.head(lm.model.hidden(ids, record=record))
    H, D = 3, 16
    q, k, v = (part.view(3, 11, H, D).transpose(1, 2) for part in seen["qkv"].split(H * D, dim=-1))
    seen |= {"q": q, "k": k, "v": v, "attSm": record.attentions[0], "y": seen["yProj input"], "gelu": seen["mlp input"]}
    seen |= {"pos_emb": lm.model.wpe.weight[None], "x": record.residuals[0], "attnResid": seen["ln2 input"]}
    seen |= {f"block{i}": record.residuals[i + 1] for i in range(3)} | {"mlpResid": record.residuals[1]}
    seen |= {"lm_head": logits, "probs": logits.softmax(-1)}
    for name, expected in recorded.items():
        if name not in ("idx", "att"):
            assert (seen[name] - expected).abs().max() < 2e-6, name
    scores = q @ k.transpose(-2, -1) / 4
    visible = torch.tril(torch.ones(11, 11, dtype=torch.bool)).expand_as(scores)
    assert (scores - recorded["att"])[visible].abs().max() < 2e-6

    prompts = [list(digits) for digits in itertools.product(range(3), repeat=6)]
    completions = lm.generate(prompts, max_new_tokens=6)
    assert [completion.ids for completion in completions] == [sorted(prompt) for prompt in prompts]
    assert lm.generate(prompts[5], max_new_tokens=7).finish_reason == "context"


# Edges of the context


@pytest.mark.parametrize("length", [1, 158, 159, 160])
def test_a_prompt_of_p_tokens_gives_n_positions_minus_p_plus_one(lm: LanguageModel, length: int) -> None:
    prompt = [3 + i % 100 for i in range(length)]
    completion = lm.generate(prompt, max_new_tokens=500, stop_ids=())
    assert len(completion.ids) == 160 - length + 1
    assert completion.finish_reason == "context"
    exact = lm.generate(prompt, max_new_tokens=160 - length + 1, stop_ids=())
    assert (exact.ids, exact.finish_reason) == (completion.ids, "length")
    history = list(prompt)  # the same, without a cache
    with torch.no_grad():
        for id in completion.ids:
            assert int(lm.model(torch.tensor([history]))[0, -1].argmax()) == id
            history.append(id)


def test_a_prompt_over_the_context_names_both_numbers(lm: LanguageModel) -> None:
    with pytest.raises(PromptError, match=r"^the prompt has 161 tokens, but the model's context is 160"):
        lm.generate([3] * 161)


@pytest.mark.parametrize("length", [5, 160, 161, 400])
def test_slide_goes_on_from_the_last_half_of_the_context(length: int) -> None:
    lm = LanguageModel(from_hf(hf_model(vocab_size=131, n_positions=32)))
    prompt = [i * 7 % 131 for i in range(length)]
    completion = lm.generate(prompt, max_new_tokens=100, overflow="slide", stop_ids=())
    assert (len(completion.ids), completion.finish_reason) == (100, "length")
    window = prompt if length <= 32 else prompt[-16:]
    history = list(prompt)
    with torch.no_grad():
        for id in completion.ids:
            if len(window) > 32:
                window = history[-16:]
            assert int(lm.model(torch.tensor([window]))[0, -1].argmax()) == id
            history.append(id)
            window = [*window, id]


def test_slide_in_a_batch_gives_what_each_prompt_gives_alone() -> None:
    lm = LanguageModel(from_hf(hf_model(vocab_size=131, n_positions=32)))
    prompts = [[5], [9] * 40, [3, 4, 5] * 6]
    options: dict[str, Any] = {"max_new_tokens": 70, "overflow": "slide", "stop_ids": ()}
    assert [c.ids for c in lm.generate(prompts, **options)] == [lm.generate(p, **options).ids for p in prompts]


def test_a_context_of_one_position_slides_too() -> None:
    lm = LanguageModel(from_hf(hf_model(n_positions=1)))
    assert len(lm.generate([3], max_new_tokens=5, overflow="slide", stop_ids=()).ids) == 5


# Stops


def test_the_end_token_is_in_the_ids_but_not_in_the_text() -> None:
    lm = scripted([464, 3290, 50256, 464])
    completion = lm.generate([0], max_new_tokens=10)
    assert (completion.text, completion.ids, completion.finish_reason) == ("The dog", [464, 3290, 50256], "stop")
    longer = lm.generate([0], max_new_tokens=4, stop_ids=())
    assert (longer.text, longer.finish_reason) == ("The dog<|endoftext|>The", "length")
    assert lm.generate([0], stop_ids=[3290]).text == "The"


def test_min_new_tokens_bars_the_end_token_only() -> None:
    lm = scripted([464, 50256, 3290])
    completion = lm.generate([0], min_new_tokens=3, max_new_tokens=5)
    assert completion.ids[:1] == [464] and completion.ids[1] != 50256 and len(completion.ids) >= 3
    stopped = scripted([464, 3290]).generate([0], min_new_tokens=9, max_new_tokens=9, stop=" dog")
    assert (stopped.text, stopped.finish_reason) == ("The", "stop")


@pytest.mark.parametrize(
    "ids, stop, text",
    [
        ([12159, 34236, 0], " beta gamma", ""),  # a stop across tokens
        ([64, 64, 64, 65, 66], "aab", "a"),  # begins inside a failed match
        ([198, 198, 0], "\n\n", ""),  # two tokens where encode gives one
        ([40, 986, 0], "..", "I"),  # ends inside the token "..."
        ([40, 8582, 25081, 0], "\U0001f642", "I"),  # an emoji made of two tokens
        ([464, 3290, 318], (" cat", "og i", " is"), "The d"),  # the first of several
        ([464, 3290, 318], "The", ""),
        ([464, 8582], "\ufffd", "The"),  # found when the end of the ids leaves half a character
    ],
)
def test_a_stop_string_cuts_at_the_character_and_never_leaks(ids: list[int], stop: Any, text: str) -> None:
    lm = scripted(ids)
    completion = lm.generate([0], stop=stop, max_new_tokens=len(ids))
    assert (completion.text, completion.finish_reason) == (text, "stop")
    steps = list(lm.stream([0], stop=stop, max_new_tokens=len(ids)))
    assert "".join(step.text for step in steps) == text
    assert [step.id for step in steps] == completion.ids
    assert all(text.startswith("".join(step.text for step in steps[:n])) for n in range(len(steps)))


def test_text_held_back_for_a_stop_that_does_not_come_is_flushed() -> None:
    completion = scripted([64, 64]).generate([0], stop="aaab", max_new_tokens=2)
    assert (completion.text, completion.finish_reason) == ("aa", "length")


def test_a_stop_string_in_the_prompt_does_not_fire(gpt2_sized: LanguageModel) -> None:
    assert len(gpt2_sized.generate("stop here", stop="stop", max_new_tokens=5, stop_ids=()).ids) == 5


def test_on_one_token_stop_wins_over_length_and_length_over_context() -> None:
    lm = scripted([464, 50256], n_positions=2)
    assert lm.generate([0], max_new_tokens=2).finish_reason == "stop"
    assert scripted([464], n_positions=2).generate([0], max_new_tokens=2).finish_reason == "length"
    assert scripted([464], n_positions=2).generate([0], max_new_tokens=3).finish_reason == "context"
    assert scripted([464, 3290]).generate([0], stop=" dog", max_new_tokens=2).finish_reason == "stop"


# Streams


@pytest.mark.parametrize(
    "ids", [[8582, 25081], [8582, 97, 245], [33768, 98, 17312, 105, 45739, 252], [8582], [464, 8582, 464]]
)
def test_a_stream_never_splits_a_character_and_adds_up_to_the_text(ids: list[int]) -> None:
    lm = scripted(ids)
    steps = list(lm.stream([0], max_new_tokens=len(ids)))
    text = "".join(step.text for step in steps)
    assert text == lm.generate([0], max_new_tokens=len(ids)).text == Tokenizer.gpt2().decode(ids)
    whole = "\ufffd" not in Tokenizer.gpt2().decode(ids)
    assert all("\ufffd" not in step.text for step in steps) or not whole
    assert [step.finish_reason for step in steps] == [None] * (len(ids) - 1) + ["length"]


def test_the_text_is_that_of_the_drawn_ids_alone() -> None:
    """Also where the prompt's ids end inside a character that the first drawn id completes."""
    assert Tokenizer.gpt2().decode([8582, 25081]) == "\U0001f642"
    assert scripted([25081]).generate([8582], max_new_tokens=1).text == Tokenizer.gpt2().decode([25081])


def test_no_new_tokens_is_an_empty_completion_and_an_empty_stream(lm: LanguageModel) -> None:
    completion = lm.generate([3], max_new_tokens=0)
    assert (completion.ids, completion.text, completion.finish_reason) == ([], "", "length")
    assert list(lm.stream([3], max_new_tokens=0)) == []


def test_each_token_is_computed_once_and_memory_is_what_the_cache_needs(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step computes the whole context again, or the logits of a prompt, or moves the cache to a larger place."""
    computed, projected, caches = [], [], set()
    update, head = minigpt.KVCache.update, GPT2.head

    def count_update(self: minigpt.KVCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        computed.append(k.shape[0] * k.shape[2])
        caches.add((self.keys.untyped_storage().data_ptr(), self.keys.untyped_storage().nbytes()))
        return update(self, layer, k, v)

    def count_head(self: GPT2, states: torch.Tensor) -> torch.Tensor:
        projected.append(states.numel() // self.config.n_embd)
        return head(self, states)

    monkeypatch.setattr(minigpt.KVCache, "update", count_update)
    monkeypatch.setattr(GPT2, "head", count_head)
    plain = LanguageModel(lm.model, draft="off")
    plain.generate([[5] * 50, [7] * 20], max_new_tokens=30, stop_ids=())
    assert sum(computed) == 3 * (50 + 20 + 2 * 29)  # in 3 blocks; the last drawn token is never fed
    assert projected == [1, 1]  # of each prompt the last position alone; steps have nothing else
    [(_, size)] = caches
    assert size == 4 * 3 * 2 * 79 * 24  # float32, layers, rows, tokens, width


@pytest.mark.slow
def test_nothing_is_kept_from_one_call_to_the_next() -> None:
    lm = LanguageModel(from_hf(hf_model()).requires_grad_(True))

    def tensors() -> int:
        lm.generate([[3], [4, 5]], temperature=1.0, max_new_tokens=8)
        assert not lm.attention([3, 4]).requires_grad
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    first = tensors()
    assert [tensors() for _ in range(5)] == [first] * 5


def test_an_abandoned_stream_leaves_no_trace(lm: LanguageModel) -> None:
    before = lm.generate([3, 4], max_new_tokens=10).ids
    stream = lm.stream([9], max_new_tokens=10)
    next(stream)
    assert not torch.is_inference_mode_enabled()  # the caller's own code runs between steps
    del stream
    assert lm.generate([3, 4], max_new_tokens=10).ids == before


def test_stream_takes_one_prompt_and_one_sample(lm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="stream gives one sample, not 2"):
        lm.stream([3], samples=2)
    with pytest.raises(PromptError, match="one prompt"):
        lm.stream([[3], [4]])  # type: ignore[list-item]


# Prompts


def test_what_counts_as_one_prompt_and_what_as_many(lm: LanguageModel) -> None:
    assert isinstance(lm.generate([3, 4], max_new_tokens=1), minigpt.Completion)
    assert isinstance(lm.generate((3, 4), max_new_tokens=1), minigpt.Completion)
    many = lm.generate([[3, 4], [5], []], max_new_tokens=1)
    assert [completion.prompt_ids for completion in many] == [[3, 4], [5], [1]]  # empty: the beginning-of-text token
    assert lm.generate([]) == []
    assert len(lm.generate([[3]], samples=3, max_new_tokens=1)) == 3
    assert len(lm.generate([3], samples=3, max_new_tokens=1)) == 3


def test_text_and_ids_and_the_empty_prompt(gpt2_sized: LanguageModel) -> None:
    assert (
        gpt2_sized.generate("The dog", max_new_tokens=3).ids == gpt2_sized.generate([464, 3290], max_new_tokens=3).ids
    )
    assert gpt2_sized.generate("", max_new_tokens=0).prompt_ids == [50256]
    assert gpt2_sized.generate(" ", max_new_tokens=0).prompt_ids == [220]
    assert gpt2_sized.generate("a<|endoftext|>", max_new_tokens=0).prompt_ids[-1] != 50256  # plain text by default


@pytest.mark.parametrize("bad", [[131], [-1], [3, 131]])
def test_an_id_outside_the_vocabulary_is_named_and_the_next_call_works(lm: LanguageModel, bad: list[int]) -> None:
    with pytest.raises(PromptError, match=rf"token id {bad[-1]} is outside the vocabulary \(0 to 130\)"):
        lm.generate(bad)
    assert len(lm.generate([3], max_new_tokens=2, stop_ids=()).ids) == 2


@pytest.mark.parametrize("bad", [3, None, {"a": 1}, b"text", [3, "a"], [3, 1.5], [True], [[3], "text", 4.5]])
def test_a_prompt_of_the_wrong_type_is_refused(gpt2_sized: LanguageModel, bad: Any) -> None:
    with pytest.raises(PromptError, match="a prompt is text or a list of token ids"):
        gpt2_sized.generate(bad)


def test_one_bad_prompt_among_many_is_named_before_anything_runs(gpt2_sized: LanguageModel) -> None:
    with pytest.raises(PromptError, match="prompt 1: the prompt has 65 tokens, but the model's context is 64"):
        gpt2_sized.generate_many(["fine", [5] * 65, "fine"])  # raises before the first next()


def test_without_a_tokenizer_only_ids_are_accepted(lm: LanguageModel) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer: give token ids"):
        lm.generate("text")
    with pytest.raises(TokenizerError, match="stop strings need a tokenizer"):
        lm.generate([3], stop="x")
    assert lm.generate([3], max_new_tokens=2).text == ""


def test_an_empty_prompt_needs_a_beginning_token() -> None:
    lm = LanguageModel(from_hf(hf_model(bos_token_id=None)))
    with pytest.raises(PromptError, match="no beginning-of-text token, so the text must not be empty"):
        lm.generate([[]])


# Parameters


def test_unknown_and_bad_parameters(lm: LanguageModel) -> None:
    with pytest.raises(TypeError, match="temprature"):
        lm.generate([3], temprature=1.0)
    with pytest.raises(ValueError, match="temperature"):
        lm.generate([3], temperature=-1)
    with pytest.raises(ValueError, match="suppress_tokens has token id 131"):
        lm.generate([3], suppress_tokens=[131])
    for bad in (0, 2.5, True, "8", 10**9):
        with pytest.raises(ValueError, match="batch_size must be"):
            lm.generate_many([[3]], batch_size=bad)
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        lm.generate([3], {"temperature": 1})  # type: ignore[arg-type]


def test_overrides_apply_over_params_and_params_may_be_one_per_prompt(lm: LanguageModel) -> None:
    base = SamplingParams(max_new_tokens=9, stop_ids=())
    assert len(lm.generate([3], base, max_new_tokens=2).ids) == 2
    lengths = [len(c.ids) for c in lm.generate([[3], [4]], [base, SamplingParams(max_new_tokens=4, stop_ids=())])]
    assert lengths == [9, 4]
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        lm.generate([[3], [4]], [base])


def test_ids_that_the_tokenizer_lacks_are_never_drawn() -> None:
    """Padded vocabularies have rows without a token; the draw still spans them, so the random stream is the same."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=50304, n_embd=8, n_head=1, n_layer=1, n_positions=64, initializer_range=1.0))
    with torch.no_grad():
        model.wte.weight[50257:] *= 10
    padded = LanguageModel(model, Tokenizer.gpt2())
    ids = padded.generate("a", max_new_tokens=60, temperature=2.0, seed=0, stop_ids=()).ids
    assert max(ids) < 50257
    assert max(LanguageModel(model).generate([64], max_new_tokens=60, temperature=2.0, seed=0).ids) >= 50257


def test_end_ids_outside_the_vocabulary_are_ignored() -> None:
    lm = LanguageModel(from_hf(hf_model(eos_token_id=50256)))
    assert lm.limits.end_ids == ()
    assert LanguageModel(from_hf(hf_model()), end_ids=[3, 999]).limits.end_ids == (3,)


def test_nan_in_the_weights_is_an_error_and_never_a_token() -> None:
    model = from_hf(hf_model())
    with torch.no_grad():
        model.ln_f.bias[3] = float("nan")
    with pytest.raises(minigpt.CheckpointError, match="NaN"):
        LanguageModel(model).generate([3])


# Seeds


def test_seeds_repeat_and_differ(lm: LanguageModel) -> None:
    for seed in (0, 7, 2**64 - 1):
        params = SamplingParams(temperature=1.0, max_new_tokens=20, seed=seed)
        assert lm.generate([3], params) == lm.generate([3], params)
        assert lm.generate([3], params).seed == seed
    fresh = [lm.generate([3], temperature=1.0, max_new_tokens=20) for _ in range(2)]
    assert fresh[0].seed != fresh[1].seed and fresh[0].ids != fresh[1].ids
    again = lm.generate([3], temperature=1.0, max_new_tokens=20, seed=fresh[0].seed)
    assert again == fresh[0]


def test_sample_j_uses_seed_plus_j_and_shares_the_prefill(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [lm.generate([3, 4, 5], temperature=1.0, max_new_tokens=12, seed=s).ids for s in (2**64 - 1, 0, 1, 2, 3)]
    prefills = []
    original = Batch.prefill

    def prefill(self: Batch, slot: int, ids: list[int]) -> Any:
        prefills.append(list(ids))
        return original(self, slot, ids)

    monkeypatch.setattr(Batch, "prefill", prefill)
    samples = lm.generate([3, 4, 5], temperature=1.0, max_new_tokens=12, seed=2**64 - 1, samples=5)
    assert [sample.seed for sample in samples] == [2**64 - 1, 0, 1, 2, 3]
    assert [sample.ids for sample in samples] == alone
    assert prefills == [[3, 4, 5]]
    assert len({tuple(ids) for ids in alone}) == 5
    greedy = lm.generate([3, 4, 5, 6], samples=3, max_new_tokens=5)
    assert len(greedy) == 3 and greedy[0] == greedy[1] == greedy[2]


def test_the_global_random_state_is_neither_read_nor_moved(lm: LanguageModel) -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    first = lm.generate([3], temperature=1.0, seed=5).ids
    lm.generate([3], temperature=1.0)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    torch.manual_seed(2)
    assert lm.generate([3], temperature=1.0, seed=5).ids == first


# Log-probabilities


def test_logprobs_are_the_raw_log_softmax(lm: LanguageModel) -> None:
    params = SamplingParams(temperature=0.5, top_k=5, repetition_penalty=1.5, seed=1, max_new_tokens=8, logprobs=3)
    completion = lm.generate([3, 4], params)
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.ids)
    history = [3, 4]
    for id, entry in zip(completion.ids, completion.logprobs, strict=True):
        with torch.no_grad():
            expected = lm.model(torch.tensor([history]))[0, -1].log_softmax(-1)
        best = expected.topk(3)
        assert entry.id == id and abs(entry.logprob - expected[id]) < 1e-4
        assert [token for token, _ in entry.top] == best.indices.tolist()
        history.append(id)
    assert lm.generate([3], max_new_tokens=2, logprobs=0).logprobs[0].top == []
    assert len(lm.generate([3], max_new_tokens=2, logprobs=999).logprobs[0].top) == 131
    assert lm.generate([3], max_new_tokens=2).logprobs is None


# Whatever the host program does


def test_training_mode_autocast_and_gradients_change_nothing() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    ids = [3, 5, 8, 13]
    expected = lm.generate(ids, max_new_tokens=8, logprobs=0), lm.score(ids)
    lm.model.requires_grad_(True).train()
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        assert (lm.generate(ids, max_new_tokens=8, logprobs=0), lm.score(ids)) == expected


def test_a_language_model_can_be_copied_and_pickled(gpt2_sized: LanguageModel) -> None:
    expected = gpt2_sized.generate("Hello", max_new_tokens=5)
    for twin in (copy.deepcopy(gpt2_sized), pickle.loads(pickle.dumps(gpt2_sized))):
        assert twin.generate("Hello", max_new_tokens=5) == expected


# Batches


def test_a_batch_gives_what_each_prompt_gives_alone(lm: LanguageModel) -> None:
    """Rows of mixed lengths that end at different steps, more prompts than slots, samples among them."""
    rng = random.Random(0)
    ties = 0
    for round in range(8):
        prompts = [[rng.randrange(131) for _ in range(rng.randint(0, 40))] for _ in range(rng.randint(1, 12))]
        temperature = rng.choice([0.0, 1.0])
        each = [
            SamplingParams(
                max_new_tokens=rng.randint(0, 30), temperature=temperature, seed=round, samples=rng.randint(1, 3)
            )
            for _ in prompts
        ]
        batched = list(lm.generate_many(prompts, each, batch_size=rng.randint(1, 5)))
        alone = [c for p, one in zip(prompts, each, strict=True) for c in lm.generate([p], one)]
        assert [c.prompt_ids for c in batched] == [c.prompt_ids for c in alone]
        for ours, expected in zip(batched, alone, strict=True):
            params = SamplingParams(temperature=temperature, seed=ours.seed)
            ties += assert_same(lm, ours.prompt_ids, ours.ids, expected.ids, params)
    assert ties <= 1


def test_completions_come_in_input_order_and_prompts_are_read_as_needed(lm: LanguageModel) -> None:
    taken = []

    def prompts() -> Iterator[list[int]]:
        for index in range(50):
            taken.append(index)
            yield [index]

    completions = lm.generate_many(prompts(), batch_size=2, max_new_tokens=3, stop_ids=())
    first = next(completions)
    assert first.prompt_ids == [0] and len(taken) <= 4
    assert [c.prompt_ids for c in completions] == [[index] for index in range(1, 50)]


@pytest.mark.parametrize("new", [0, 10])
def test_what_waits_for_a_long_row_is_bounded(lm: LanguageModel, new: int) -> None:
    """Rows that end at once must neither pull in every prompt nor starve the row that goes on."""
    taken = []

    def prompts() -> Iterator[list[int]]:
        for index in itertools.count():
            taken.append(index)
            yield [3] if index == 0 else [4] * 160  # 160 tokens leave room for one more

    completions = lm.generate_many(prompts(), batch_size=2, max_new_tokens=new, stop_ids=())
    assert [len(completion.ids) for completion in itertools.islice(completions, 3)] == [new, min(new, 1), min(new, 1)]
    assert len(taken) <= 4 * 2 + 3


def test_a_bad_prompt_in_an_iterator_loses_nothing_before_it(lm: LanguageModel) -> None:
    completions = lm.generate_many(iter([[3], [4], [999], [5]]), batch_size=4, max_new_tokens=5)
    assert [next(completions).prompt_ids, next(completions).prompt_ids] == [[3], [4]]
    with pytest.raises(PromptError, match="prompt 2: token id 999"):
        next(completions)


def test_many_prompts_with_samples_are_one_flat_list(lm: LanguageModel) -> None:
    params = SamplingParams(samples=3, temperature=1.0, seed=5, max_new_tokens=4)
    completions = lm.generate([[3], [4]], params)
    assert [(c.prompt_ids, c.seed) for c in completions] == [([p], s) for p in (3, 4) for s in (5, 6, 7)]


def test_more_samples_than_slots_after_a_slide() -> None:
    lm = LanguageModel(from_hf(hf_model(vocab_size=131, n_positions=32)))
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 45, "overflow": "slide", "stop_ids": ()}
    many = list(lm.generate_many([[3, 4]], SamplingParams(seed=1, samples=5, **options), batch_size=2))
    assert [c.ids for c in many] == [lm.generate([3, 4], seed=1 + j, **options).ids for j in range(5)]


def test_the_library_prints_nothing_and_changes_no_setting(
    lm: LanguageModel, capfd: pytest.CaptureFixture[str]
) -> None:
    def settings() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
        )

    before = settings()
    list(lm.generate_many([[3], [4]], temperature=1.0, max_new_tokens=5))
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_the_model_may_be_moved_after_loading() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    lm.model.double()
    assert lm.dtype == torch.float64 and len(lm.generate([3], max_new_tokens=3, stop_ids=()).ids) == 3


def test_two_threads_share_one_model(lm: LanguageModel) -> None:
    solo = [lm.generate([k], temperature=1.0, seed=k, max_new_tokens=30).ids for k in range(4)]
    results: dict[int, list[int]] = {}

    def work(k: int) -> None:
        results[k] = lm.generate([k], temperature=1.0, seed=k, max_new_tokens=30).ids

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[k] for k in range(4)] == solo


# Ablation and devices


def test_ablate_switches_heads_off_for_one_call(lm: LanguageModel) -> None:
    plain = lm.generate([3, 4], max_new_tokens=10).ids
    ablated = LanguageModel(from_hf(hf_model(vocab_size=131, n_positions=160, eos_token_id=130, bos_token_id=1)))
    with torch.no_grad():
        ablated.model.h[1].attn.c_proj.weight[:, 12:18] = 0
    expected = ablated.generate([3, 4], max_new_tokens=10).ids
    assert expected != plain
    assert lm.generate([3, 4], max_new_tokens=10, ablate=["1.2"]).ids == expected
    assert [step.id for step in lm.stream([3, 4], max_new_tokens=10, ablate=["1.2"])] == expected
    assert lm.generate([3, 4], max_new_tokens=10).ids == plain
    for bad in ("3.0", "0.4", "1", "a.b", "-1.0"):
        with pytest.raises(ValueError, match=r"from 0\.0 to 2\.3, not"):
            lm.generate([3], ablate=[bad])


@pytest.mark.parametrize(
    "device, message",
    [
        ("gpu", "use auto, cpu, cuda"),
        ("mps", "use auto"),
        ("cuda:99", "is not there"),
        ("cuda:99999999999999999999", "use auto"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_line(device: str, message: str) -> None:
    with pytest.raises(minigpt.DeviceError, match=message):
        minigpt.load("demo", device=device)


def test_auto_is_cuda_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never mps, which can give wrong text without an error; and CUDA is asked nothing where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name in ("is_bf16_supported", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("a CPU build raises here"))
    assert find_device("auto") == torch.device("cpu")
    assert find_dtype("float32", find_device("cpu")) == torch.float32


def test_a_dtype_that_the_device_lacks_names_the_ones_it_has() -> None:
    with pytest.raises(minigpt.DeviceError, match=r"dtype 'bfloat16' is not supported on cpu: use float32"):
        minigpt.load("demo", device="cpu", dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["allow_tf32", "fp32_precision", "set_float32_matmul_precision", "none"])
def test_float32_on_cuda_warns_if_the_program_enabled_tf32(setting: str) -> None:
    """In a process of its own: newer PyTorch lets a program use only one of these settings."""
    lines = {
        "allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
        "fp32_precision": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "set_float32_matmul_precision": "torch.set_float32_matmul_precision('high')",
        "none": "pass",
    }
    if setting == "fp32_precision" and not hasattr(torch.backends.cuda.matmul, setting):
        pytest.skip("this torch does not have the setting")
    code = "import torch, warnings; from minigpt.network.device import find_dtype; warnings.simplefilter('error')\n"
    code += (
        f"{lines[setting]}\ntry:\n    find_dtype('float32', torch.device('cuda'))\nexcept UserWarning as w: print(w)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("" if setting == "none" else "TF32 is enabled")
    assert bool(run.stdout) == (setting != "none")


@pytest.mark.slow
def test_loading_stays_clear_of_torch_dynamo(tmp_path: Path) -> None:
    """Initialising on the meta device imports it, which takes longer than the rest of loading."""
    from_hf_model = hf_model()
    from_hf_model.save_pretrained(tmp_path)
    code = (
        f"import minigpt, sys; minigpt.load({str(tmp_path)!r}).generate([3]); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
