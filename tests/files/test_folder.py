"""Folders that are nearly a model: what to do is said; heads for other tasks; paths that are not UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2DoubleHeadsModel, GPT2ForSequenceClassification, GPT2LMHeadModel

import minigpt
from minigpt.errors import CheckpointError
from minigpt.files.checkpoint import describe, load_model

IDS = torch.tensor([[5, 9, 2, 33, 60, 1, 1, 7]])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_hf(tiny.hf_model(), tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        minigpt.load(folder, device="cpu")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        out = model(IDS)
    return out if isinstance(out, torch.Tensor) else out.logits


# Heads for other tasks


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        (GPT2DoubleHeadsModel, ["multiple_choice_head.summary.bias", "multiple_choice_head.summary.weight"]),
        (GPT2ForSequenceClassification, ["score.weight"]),
    ],
)
def test_the_language_model_of_a_model_with_another_head(tmp_path: Path, kind: Any, left_out: list[str]) -> None:
    """Refused: multiple_choice_head.summary.weight is not known."""
    kind(tiny.hf_model().config).save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(load_model(tmp_path)), logits(reference), rtol=0, atol=2e-4)
    assert sorted(describe(tmp_path)["left_out"]) == left_out


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.transformer.", "pretrained_model."])
@pytest.mark.parametrize("head", ["classifier.weight", "qa_outputs.bias", "v_head.summary.weight"])
def test_prefixes_of_peft_and_trl(folder: Path, prefix: str, head: str) -> None:
    whole = logits(load_model(folder))
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file({**renamed, head: torch.zeros(3)}, folder / "model.safetensors")
    assert torch.equal(logits(load_model(folder)), whole)
    assert describe(folder)["left_out"] == [head]


def test_a_head_without_a_body_and_a_body_without_a_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({"score.weight": torch.zeros(2, 24)}, folder / "model.safetensors")
    assert "holds only a head (score.weight), without GPT-2's body" in refused(folder)
    config = (folder / "config.json").read_text()
    assert '"tie_word_embeddings": true' in config
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    save_file(tensors, folder / "model.safetensors")
    text = refused(folder)
    assert "lm_head.weight is missing, but tie_word_embeddings is false: these weights are no language model's" in text


# Nearly a model


@pytest.mark.parametrize("configured", [True, False])
def test_a_lora_adapter(tmp_path: Path, original: Path, configured: bool) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    if configured:
        shutil.copy(original / "config.json", tmp_path)
    text = refused(tmp_path)
    assert ": it is a LoRA adapter, which needs its base model: merge the two" in text
    assert f"M.from_pretrained('{tmp_path}').merge_and_unload().save_pretrained('{tmp_path}-merged')" in text


def test_checkpoints_inside(tmp_path: Path, original: Path) -> None:
    for step in (500, 1500, 90):
        shutil.copytree(original, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2500").mkdir()
    text = refused(tmp_path)
    assert text.endswith(
        f"has no config.json, but checkpoint-1500 inside has: did you mean {tmp_path}/checkpoint-1500?"
    )
    shutil.copy(original / "config.json", tmp_path)
    assert text.replace("config.json", "model.safetensors") == refused(tmp_path)


@pytest.mark.slow
def test_the_cure_for_a_pickle_takes_the_tokenizer_along(folder: Path) -> None:
    """Run as it is printed: the vocabulary stayed behind, and the result spoke with GPT-2's."""
    (folder / "model.safetensors").unlink()
    torch.save(tiny.hf_model().state_dict(), folder / "pytorch_model.bin")
    assert "AutoTokenizer" not in refused(folder)
    chars = "abcd<>|Ġ"
    (folder / "vocab.json").write_text(
        '{"<|endoftext|>": 9, ' + ", ".join(f'"{c}": {n}' for n, c in enumerate(chars)) + "}"
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    command = refused(folder).partition("convert it: ")[2]
    assert command.startswith('python -c "') and command.endswith('"')
    subprocess.run([sys.executable, "-c", command[11:-1]], check=True, capture_output=True, timeout=120)
    lm = minigpt.load(f"{folder}-safetensors", device="cpu")
    assert lm.tokenizer.encode("abc") == [0, 1, 2]
    torch.testing.assert_close(logits(lm.model), logits(tiny.hf_model()), rtol=0, atol=2e-4)


# Names


@pytest.mark.skipif(sys.platform != "linux", reason="names here are bytes")
def test_of_a_path_that_is_not_utf8_the_path_is_the_problem(original: Path, tmp_path: Path) -> None:
    """Healthy weights were called damaged: "delete it and download it again"."""
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    shutil.copytree(original, place)
    text = refused(place)
    assert "is a path that is not UTF-8: rename the folder" in text and "delete" not in text
