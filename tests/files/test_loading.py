"""load: what it passes on, what it refuses, and that the program around it does not matter."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hub_server import HubServer
from safetensors.torch import save_file
from transformers import GenerationConfig

import minigpt
from minigpt import SamplingParams
from minigpt.files.checkpoint import read_config, read_generation
from minigpt.loading import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gpt2_folder(tmp_path_factory.mktemp("model"))


# generation_config.json


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, {}),
        ({"temperature": 0.5}, {}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": 0.5, "top_k": 0}, {"temperature": 0.5}),
        (
            {"do_sample": True, "top_p": 0.5, "min_p": 0.1},
            {"temperature": 1.0, "top_k": 50, "top_p": 0.5, "min_p": 0.1},
        ),
        (
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        ),
        ({"suppress_tokens": [3, 4], "max_new_tokens": 7}, {"suppress_tokens": (3, 4), "max_new_tokens": 7}),
        ({"min_new_tokens": 2, "max_length": 9, "top_k": None}, {"min_new_tokens": 2}),
        ({"repetition_penalty": "much", "no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    ],
)
def test_defaults_are_what_transformers_applies(tmp_path: Path, data: dict[str, Any], expected: dict[str, Any]) -> None:
    """These settings were ignored without a word."""
    tiny.gpt2_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 50256, **data}))
    assert minigpt.load(tmp_path, device="cpu").defaults == SamplingParams(**expected)


def test_the_models_defaults_give_transformers_ids(tmp_path: Path) -> None:
    reference = tiny.hf_model()
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [7, 9], "max_new_tokens": 12}
    settings |= {"do_sample": True, "top_p": 0.9}
    reference.generation_config = GenerationConfig(eos_token_id=2, bos_token_id=1, pad_token_id=2, **settings)
    tiny.save_hf(reference, tmp_path)
    lm = minigpt.load(tmp_path, device="cpu")
    prompt = [5, 9, 2, 33]
    torch.manual_seed(3)
    theirs = reference.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist()
    assert list(lm.generate(prompt, lm.defaults, seed=3).ids) == theirs
    assert read_generation(tmp_path, read_config(tmp_path))[1]["top_k"] == 50  # transformers' own, which nobody wrote


# What stands in the way of text alone


def test_a_tokenizer_that_cannot_be_read_leaves_ids(tmp_path: Path) -> None:
    (tiny.gpt2_folder(tmp_path) / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    lm = minigpt.load(tmp_path, device="cpu")
    assert len(lm.generate([1, 2, 3], max_new_tokens=4).ids) == 4
    with pytest.raises(minigpt.TokenizerError, match=r"tokenizer_config\.json: add_prefix_space is not supported"):
        lm.generate("Hello")


# Not a name


def test_an_object_in_place_of_a_name(folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    for given, advice in (
        (lm, "must be a name or a folder, not a LanguageModel: "),
        (lm.model, r"not a GPT2: minigpt\.LanguageModel\(model, tokenizer\) takes a GPT2"),
        (tiny.hf_model(), r"not a GPT2LMHeadModel: .* write one with save_pretrained\(folder\)"),
        (None, "not a NoneType: "),
        (b"gpt2", "not a bytes: "),
    ):
        for load in (minigpt.load, load_tokenizer):
            with pytest.raises(TypeError, match=advice):
                load(given)


# The program around it


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_hosts_defaults_do_not_matter(folder: Path, tmp_path: Path, dtype: str) -> None:
    expected = minigpt.load(folder, device="cpu", dtype=dtype)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        lm = minigpt.load(folder, device="cpu", dtype=dtype)
        minigpt.save(lm, tmp_path / "saved")
        again = minigpt.load(tmp_path / "saved", device="cpu", dtype=dtype)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for other in (lm, again):
        ours = dict(other.model.named_parameters())
        for name, theirs in expected.model.named_parameters():
            assert ours[name].dtype == torch.float32 and torch.equal(ours[name], theirs), name
        assert {buffer.device.type for buffer in other.model.buffers()} <= {"cpu"}
        assert {buffer.dtype for buffer in other.model.buffers()} == {
            buffer.dtype for buffer in expected.model.buffers()
        }
        assert other.generate("Hello", max_new_tokens=8) == expected.generate("Hello", max_new_tokens=8)


def test_contiguous_copies_as_the_docstring_says(folder: Path, tmp_path: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    before = lm.generate("Hello", max_new_tokens=8)
    with pytest.raises(ValueError, match="contiguous"):
        save_file(lm.model.state_dict(), tmp_path / "model.safetensors")
    assert "p.data = p.data.contiguous()" in (minigpt.load.__doc__ or "")
    for p in lm.model.parameters():
        p.data = p.data.contiguous()
    save_file(lm.model.state_dict(), tmp_path / "model.safetensors")
    torch.nn.utils.parameters_to_vector(lm.model.parameters())
    assert lm.generate("Hello", max_new_tokens=8) == before


def test_the_log_tells_what_was_chosen(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="minigpt"):
        minigpt.load(folder, dtype="float32", device="cpu")
    text = caplog.text
    assert (
        str(folder) in text
        and "device cpu" in text
        and "float32" in text
        and "GPT-2's own: the folder has none" in text
    )


# Without weights


@pytest.mark.slow
def test_gpt2s_tokenizer_needs_no_network_and_a_hub_ids_no_weights(tmp_path: Path) -> None:
    code = """
import sys, minigpt.loading as loading
for name in ("gpt2", "gpt2-xl", "distilgpt2"):
    assert loading.load_tokenizer(name).encode("hello world") == [31373, 995]
print(loading.load_tokenizer("me/model").encode("hello world"))
"""
    config = b'{"model_type": "gpt2", "vocab_size": 50257}'
    with HubServer() as hub:
        hub.add("me/model", {"config.json": config, "model.safetensors": b"never read"})
        env = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
        run = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, text=True, capture_output=True)
        assert (run.stdout, run.stderr) == ("[31373, 995]\n", "")
        assert hub.asked() == {"config.json"}
        assert all("openai" not in path and "distil" not in path for _, path, _ in hub.requests)
