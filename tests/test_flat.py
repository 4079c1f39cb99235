"""The flat step of a CPU is the model's own, bit for bit, or is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import from_hf, hf_model, save_hf
from torch import nn
from torch.nn.utils import parametrize

import minigpt
from minigpt import GPT2, KVCache, LanguageModel, flat
from minigpt.flat import flat_step
from minigpt.linear import Linear

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
    step = flat_step(model, [])
    assert step is not None
    for at in range(6):
        new = ids[:, 20 + at : 21 + at]
        wanted = model(new, caches[0])[:, -1]
        assert torch.equal(step(new, caches[1]), wanted)
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


def test_generation_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    step = flat.FlatStep.__call__
    monkeypatch.setattr(flat.FlatStep, "__call__", lambda self, *args: calls.append(self) or step(self, *args))
    lm = LanguageModel(from_hf(hf_model()))
    lm.model.train()  # as a program that trains would leave it
    lm.generate([3, 4], max_new_tokens=9, stop_ids=())
    assert len(calls) == 8 and len(set(calls)) == 1
    lm.generate([3, 4], max_new_tokens=9, stop_ids=(), ablate=["0.1"])
    assert len(calls) == 8


class Doubled(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def touch(model: GPT2, how: str) -> Any:
    """Change what `model` computes; a hook's handle is returned, to remove it."""
    block: Any = model.h[1]
    layer = block.mlp.c_fc
    if how == "hook":
        return layer.register_forward_hook(lambda module, args, out: 2 * out)
    if how == "hook before":
        return layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    if how == "hook of all modules":
        return nn.modules.module.register_module_forward_hook(
            lambda module, args, out: 2 * out if module is layer else None
        )
    if how == "hook before all modules":
        return nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: (2 * args[0],) if module is layer else None
        )
    if how == "another layer":
        block.mlp.c_fc = Doubled(24, 96)
    if how == "another method":
        block.attn.forward = lambda x, *args, **more: torch.ones_like(x)
    if how == "another head":
        model.head = lambda states: states @ torch.ones(24, 64).cumsum(1)  # type: ignore[method-assign]
    if how == "a parametrization":
        parametrize.register_parametrization(layer, "weight", Halved())
    if how == "dropout":
        block.mlp.dropout.train().p = 1 - 1e-9
    return None


HOWS = ["hook", "hook before", "hook of all modules", "hook before all modules", "another layer", "another method"]


@pytest.mark.parametrize("how", [*HOWS, "another head", "a parametrization", "dropout"])
def test_a_model_that_was_touched_takes_its_own_steps(how: str) -> None:
    lm = LanguageModel(from_hf(hf_model()))
    before = lm.generate([3, 4], max_new_tokens=8, stop_ids=(), logprobs=1)
    assert flat_step(lm.model, []) is not None
    handle = touch(lm.model, how)
    try:
        assert flat_step(lm.model, []) is None
        after = lm.generate([3, 4], max_new_tokens=8, stop_ids=(), logprobs=1)
        wanted = [lm.generate([3, 4, *after.ids[:n]], max_new_tokens=1, stop_ids=()).ids[0] for n in range(8)]
        assert after.ids == wanted and after.logprobs != before.logprobs
    finally:
        if handle:
            handle.remove()


def test_weights_that_change_in_the_middle_of_a_text_are_seen() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    ids = []
    for number, step in enumerate(lm.stream([3, 4], max_new_tokens=8, stop_ids=())):
        ids.append(step.id)
        if number == 3:
            with torch.no_grad():
                for parameter in lm.model.parameters():
                    parameter.neg_()
    other = LanguageModel(from_hf(hf_model())).generate([3, 4], max_new_tokens=8, stop_ids=()).ids
    assert ids[:4] == other[:4] and ids != other
