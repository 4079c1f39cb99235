"""The flat step of a CPU is the model's own, bit for bit, or is not used."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import from_hf, hf_model, save_hf
from torch import nn
from torch.nn.utils import parametrize

import minigpt
from minigpt import GPT2, KVCache, LanguageModel
from minigpt.decoding.step import FlatStep
from minigpt.network.linear import Dropout, Linear

CONFIGS: list[dict[str, Any]] = [
    {},
    {"activation_function": "relu", "n_inner": 40},
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    {"scale_attn_weights": False, "tie_word_embeddings": False, "n_layer": 1},
]


def assert_equal_steps(model: GPT2, lengths: list[int]) -> None:
    ids = torch.randint(0, 64, (len(lengths), 32))
    caches = [KVCache(model.config, len(lengths) + 1, 32) for _ in range(2)]
    for cache in caches:
        for row, length in enumerate(lengths):
            model(ids[row : row + 1, :length], cache.row(row))
        cache.lengths = list(lengths)
    step = FlatStep([])
    for at in range(6):
        new = ids[:, 20 + at : 21 + at]
        wanted = model(new, caches[0])[:, -1]
        found = step(model, new, caches[1])
        assert found is not None and torch.equal(found, wanted)
    assert caches[0].lengths == caches[1].lengths == [length + 6 for length in lengths]
    assert torch.equal(caches[0].keys, caches[1].keys) and torch.equal(caches[0].values, caches[1].values)


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [1, 20, 7]])
@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_its_steps_are_the_models_bit_for_bit(config: dict[str, Any], lengths: list[int]) -> None:
    assert_equal_steps(from_hf(hf_model(**config)).requires_grad_(False), lengths)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@torch.inference_mode()
def test_in_every_weight_format(dtype: str, tmp_path: Path) -> None:
    model = minigpt.load(save_hf(hf_model(), tmp_path), dtype=dtype).model
    for lengths in ([7], [1, 20, 7]):
        assert_equal_steps(model, lengths)


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step of decoding, whether it was flat."""
    used: list[bool] = []
    call = FlatStep.__call__

    def spy(self: FlatStep, *args: Any) -> Any:
        logits = call(self, *args)
        used.append(logits is not None)
        return logits

    monkeypatch.setattr(FlatStep, "__call__", spy)
    return used


def test_generation_uses_it(flat: list[bool]) -> None:
    lm = LanguageModel(from_hf(hf_model()))
    lm.model.train()  # as a program that trains would leave it
    lm.generate([3, 4], max_new_tokens=9, stop_ids=())
    assert flat == [True] * 8
    lm.generate([3, 4], max_new_tokens=9, stop_ids=(), ablate=["0.1"])
    lm.model.half()
    lm.generate([3, 4], max_new_tokens=9, stop_ids=())
    assert flat[8:] == [False] * 16


@pytest.mark.parametrize("rows", [32, 31])
def test_a_mask_of_anybody_elses_is_not_for_it(rows: int) -> None:
    model: Any = from_hf(hf_model())
    model.h[1].attn.mask = model.h[1].attn.mask[:rows, :rows].clone()
    assert FlatStep([])(model, torch.tensor([[3]]), KVCache(model.config, 1)) is None


class Doubled(Linear):
    def forward(self, *args: Any) -> torch.Tensor:
        return 2 * super().forward(*args)


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def ones(_: Any, x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
    return torch.ones_like(x)


# How to change what a model computes: seen in the middle of a text, or when a text begins.
LATER: dict[str, Callable[[Any, Any, pytest.MonkeyPatch], Any]] = {
    "a hook": lambda model, block, patch: block.mlp.c_fc.register_forward_hook(lambda m, args, out: 2 * out),
    "a hook before": lambda model, block, patch: block.mlp.register_forward_pre_hook(lambda m, args: (-args[0],)),
    "a hook of all": lambda model, block, patch: nn.modules.module.register_module_forward_hook(
        lambda m, args, out: 2 * out if m is block.mlp.c_fc else None
    ),
    "a hook before all": lambda model, block, patch: nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: (2 * args[0],) if m is block.mlp.c_fc else None
    ),
    "another layer": lambda model, block, patch: setattr(block.mlp, "c_fc", doubled()),
    "a norm switched off": lambda model, block, patch: setattr(block, "ln_1", Dropout(0.0).eval()),
    "an adapter": lambda model, block, patch: setattr(block.mlp, "dropout", nn.LayerNorm(24)),
    "another block": lambda model, block, patch: model.h.__setitem__(1, model.h[0]),
    "a parametrization": lambda model, block, patch: parametrize.register_parametrization(
        block.mlp.c_fc, "weight", Halved()
    ),
    "another weight": lambda model, block, patch: setattr(block.attn.c_attn, "weight", fixed(72, 24)),
    "another bias": lambda model, block, patch: setattr(block.ln_2, "bias", fixed(24)),
    "a weight in place": lambda model, block, patch: block.mlp.c_proj.weight.detach().neg_(),
    "a norm in place": lambda model, block, patch: block.ln_1.weight.detach().neg_(),
    "a bias in place": lambda model, block, patch: block.attn.c_proj.bias.detach().neg_(),
    "other weights": lambda model, block, patch: model.load_state_dict(from_hf(hf_model(5)).state_dict(), assign=True),
    "the scale": lambda model, block, patch: setattr(block.attn, "scale", 5.0),
    "the activation": lambda model, block, patch: setattr(block.mlp, "activation", torch.cos),
    "epsilon": lambda model, block, patch: setattr(block.ln_1, "eps", 9.0),
}
BEFORE: dict[str, Callable[[Any, Any, pytest.MonkeyPatch], Any]] = {
    "another method": lambda model, block, patch: setattr(block.attn, "forward", partial(ones, None)),
    "another head": lambda model, block, patch: setattr(model, "head", lambda x: x @ fixed(24, 64)),
    "another part": lambda model, block, patch: setattr(block.attn, "_weights", lambda q, k, visible: q @ k.mT),
    "a class": lambda model, block, patch: patch.setattr(type(block.mlp), "forward", ones),
    "a class of torch": lambda model, block, patch: patch.setattr(nn.LayerNorm, "forward", ones),
    "a class of linear": lambda model, block, patch: patch.setattr(
        Linear, "forward", lambda self, x: F.linear(x, -self.weight, self.bias)
    ),
    "dropout": lambda model, block, patch: setattr(block.mlp.dropout.train(), "p", 1.0),
    "compiled": lambda model, block, patch: setattr(block.mlp, "_compiled_call_impl", partial(ones, None)),
}


def fixed(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float32).sin().view(shape), requires_grad=False)


def doubled() -> Linear:
    layer = Doubled(24, 96).requires_grad_(False)
    layer.weight, layer.bias = fixed(96, 24), fixed(96)
    return layer


def steps_of(folder: Path, dtype: str, how: str | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of a text, in the middle of which (or before) the model is changed."""
    lm = minigpt.load(folder, dtype=dtype)
    undo = None
    steps = []
    with monkeypatch.context() as patch:
        try:
            if how in BEFORE:
                undo = BEFORE[how](lm.model, lm.model.h[1], patch)
            for step in lm.stream([3, 4], max_new_tokens=8, stop_ids=(), logprobs=1):
                steps.append((step.id, step.logprob))
                if len(steps) == 4 and how in LATER:
                    undo = LATER[how](lm.model, lm.model.h[1], patch)
        finally:
            if hasattr(undo, "remove"):
                undo.remove()
    return steps


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("how", [*LATER, *BEFORE])
def test_what_is_done_to_a_model_is_seen(how: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf(hf_model(), tmp_path)
    plain = steps_of(folder, dtype, None, monkeypatch)
    found = steps_of(folder, dtype, how, monkeypatch)
    assert found != plain and (how in BEFORE or found[:4] == plain[:4])
    monkeypatch.setattr(FlatStep, "__call__", lambda *args: None)
    assert found == steps_of(folder, dtype, how, monkeypatch)
    assert plain == steps_of(folder, dtype, None, monkeypatch)
