"""The bundled model: the trained case that random weights cannot be."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from drawn import assert_same, theirs
from safetensors import safe_open
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import KVCache, LanguageModel, SamplingParams
from minigpt.cli.main import main
from minigpt.files.locate import locate

PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "Tom and his dog went to the park.",
    "One day, a bird could not fly.",
    "The bear was very hungry",
    '"Can I play with you?" asked Mia.',
    "It was raining, so Ben",
    "Mom said",
    "She was sad because",
    "The End.",
    "",
)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return minigpt.load("demo", device="cpu", offline=True)


@pytest.fixture(scope="module")
def reference() -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(locate("demo"), dtype=torch.float32).eval()


def test_what_the_repository_promises_of_it() -> None:
    folder = locate("demo")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 25_000_000
    config = minigpt.load("demo", device="cpu").config
    assert config.vocab_size == 50257 and config.n_positions >= 256
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("prompt", [PROMPTS[0], *(pytest.param(text, marks=pytest.mark.slow) for text in PROMPTS[1:])])
def test_200_tokens_equal_transformers(lm: LanguageModel, reference: GPT2LMHeadModel, prompt: str) -> None:
    ids = lm.generate(prompt, max_new_tokens=0).prompt_ids
    for options in ({}, {"temperature": 0.8, "top_k": 40, "seed": 11}):
        params = SamplingParams(max_new_tokens=200, min_new_tokens=200, **options)
        assert_same(lm, ids, lm.generate(prompt, params).ids, theirs(reference, ids, params), params)


@torch.no_grad()
def test_cached_and_uncached_logits_equal_transformers(lm: LanguageModel, reference: GPT2LMHeadModel) -> None:
    ids = torch.tensor([lm.tokenizer.encode(" ".join(PROMPTS))])  # type: ignore[union-attr]
    expected = reference(ids).logits
    whole = lm.model(ids)
    cache = KVCache(lm.config)
    cached = torch.cat([lm.model(part, cache) for part in ids.split(7, dim=1)], dim=1)
    assert (whole - expected).abs().max() < 2e-4  # of logits up to 30; measured: 2e-5
    assert (cached - whole).abs().max() < 2e-4  # measured: 2e-5


@torch.no_grad()
def test_the_float16_file_is_computed_in_float32(lm: LanguageModel) -> None:
    """The weights are widened exactly: nothing is rounded again after reading."""
    assert lm.dtype == torch.float32
    with safe_open(locate("demo") / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, parameter in lm.model.named_parameters():
        conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        assert torch.equal(parameter.t() if conv1d else parameter, stored[name].float())


def test_it_writes_a_story_and_ends_it(lm: LanguageModel) -> None:
    completion = lm.generate(PROMPTS[0], temperature=0.5, top_k=40, seed=0, max_new_tokens=250)
    assert "Lily" in completion.text
    assert lm.score(PROMPTS[0], bos=True).perplexity < 10


def test_a_checkout_finds_its_own_copy() -> None:
    assert locate("demo") == Path(minigpt.__file__).resolve().parent.parent / "weights" / "demo"


def test_the_readme_shows_what_its_first_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^\.venv/bin/python -m minigpt (generate -m demo .*)$", readme, re.MULTILINE)
    shown = re.search(r"```text\n(.*?)```", readme, re.DOTALL)
    assert command is not None and shown is not None
    assert main(shlex.split(command[1])) == 0
    assert capsys.readouterr().out == shown[1]
