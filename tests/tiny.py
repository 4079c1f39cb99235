"""Tiny models built with Hugging Face transformers at test time: the reference for everything numerical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from minigpt import GPT2, save
from minigpt import GPT2Config as Config

TINY = {
    "vocab_size": 64,
    "n_positions": 32,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_model(seed: int = 0, **overrides: Any) -> GPT2LMHeadModel:
    """A tiny GPT-2 in eval mode. Every parameter is random, LayerNorm and biases too, and large enough that a missing
    bias, a wrong epsilon or the other GELU changes the logits visibly."""
    model = GPT2LMHeadModel(GPT2Config(**{**TINY, **overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, parameter in model.named_parameters():
            if "ln_" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def save_hf(model: GPT2LMHeadModel, folder: Path) -> Path:
    """Saves as transformers does (names with the `transformer.` prefix, safetensors) and gives the folder back."""
    model.save_pretrained(folder)
    return folder


def from_hf(reference: GPT2LMHeadModel) -> GPT2:
    """The same model in minigpt, copied parameter by parameter: no checkpoint code in between."""
    model = GPT2(Config.from_dict(reference.config.to_dict())).eval()
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = theirs[name if name == "lm_head.weight" else f"transformer.{name}"]
            conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            parameter.copy_(weight.t() if conv1d else weight)
    return model


def gpt2_folder(path: Path) -> Path:
    """A small random model with GPT-2's vocabulary, in the official layout; gives the folder back."""
    torch.manual_seed(0)
    save(GPT2(Config(n_embd=16, n_head=2, n_layer=2, n_positions=64, initializer_range=0.5)), path)
    return path
