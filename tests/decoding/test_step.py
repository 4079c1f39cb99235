"""The bound step is the model's own, bit for bit, or is not used."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import from_hf, hf_model, save_hf
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import swap_tensors

import minigpt
from minigpt import GPT2, KVCache, LanguageModel, PromptError
from minigpt.decoding import step
from minigpt.decoding.step import bound
from minigpt.network import products
from minigpt.network.linear import Dropout, Linear

CONFIGS: list[dict[str, Any]] = [
    {},
    {"activation_function": "relu", "n_inner": 40},
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    {"scale_attn_weights": False, "tie_word_embeddings": False, "n_layer": 1},
]


def assert_equal_steps(model: GPT2, lengths: list[int], n_new: int = 1) -> None:
    ids = torch.randint(0, 64, (len(lengths), 32))
    caches = [KVCache(model.config, len(lengths) + 1, 32, dtype=model.wpe.weight.dtype, rows=0) for _ in range(2)]
    for cache in caches:
        for row, length in enumerate(lengths):
            cache.add_row()
            if length:
                model(ids[row : row + 1, :length], cache.row(row))
    take = bound(model)
    assert take is not None
    for at in range(0, 6, n_new):
        new = ids[:, 20 + at : 20 + at + n_new]
        wanted = model(new, caches[0])
        assert torch.equal(take(new, caches[1]), wanted)
    assert caches[0].lengths == caches[1].lengths == [length + 6 for length in lengths]
    assert torch.equal(caches[0].keys, caches[1].keys) and torch.equal(caches[0].values, caches[1].values)


@pytest.mark.parametrize("n_new", [1, 3])
@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [1, 20, 7], [0, 3], [0, 0]])
@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_its_steps_are_the_models_bit_for_bit(config: dict[str, Any], lengths: list[int], n_new: int) -> None:
    assert_equal_steps(from_hf(hf_model(**config)).requires_grad_(False), lengths, n_new)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@torch.inference_mode()
def test_of_weights_in_any_dtype(dtype: torch.dtype) -> None:
    model = from_hf(hf_model(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)).to(dtype)
    for lengths in ([7], [1, 20, 7]):
        assert_equal_steps(model, lengths)
        assert_equal_steps(model, lengths, 2)


@torch.inference_mode()
def test_several_tokens_of_ragged_rows_are_causal() -> None:
    """For each row: what it gives alone, all at once."""
    model = from_hf(hf_model())
    take, cache, ids, lengths = bound(model), KVCache(model.config, 3), torch.randint(0, 64, (3, 32)), [1, 20, 7]
    for row, length in enumerate(lengths):
        model(ids[row : row + 1, :length], cache.row(row))
    assert take is not None
    found = take(torch.stack([ids[row, length : length + 4] for row, length in enumerate(lengths)]), cache)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, : length + 4])[0, length:]
        assert (found[row] - alone).abs().max() < 5e-5  # measured: 4e-6


@torch.inference_mode()
def test_too_many_tokens_are_refused_and_nothing_moves() -> None:
    model = from_hf(hf_model()).eval()
    take, cache = bound(model), KVCache(model.config, 1)
    model(torch.zeros(1, 31, dtype=torch.long), cache)
    assert take is not None
    with pytest.raises(PromptError, match="33 tokens are more than the model's 32 positions"):
        take(torch.tensor([[1, 2]]), cache)
    assert cache.lengths == [31]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@torch.inference_mode()
def test_in_every_weight_format(dtype: str, tmp_path: Path) -> None:
    model = minigpt.load(save_hf(hf_model(), tmp_path), dtype=dtype).model
    for lengths in ([7], [1, 20, 7]):
        assert_equal_steps(model, lengths)


def test_generation_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def spy(model: GPT2) -> Any:
        made.append((take := bound(model)) is not None)
        return take

    monkeypatch.setattr(step, "bound", spy)
    lm = LanguageModel(from_hf(hf_model()))
    lm.model.train()  # as a program that trains would leave it
    lm.generate([3, 4], max_new_tokens=9, stop_ids=())
    assert made == [True]  # once a call, not once a step
    handle = lm.model.ln_f.register_forward_hook(lambda *_: None)
    lm.generate([3, 4], max_new_tokens=9, stop_ids=())
    handle.remove()
    assert made == [True, False]


@pytest.mark.parametrize("rows", [32, 31])
def test_a_mask_of_anybody_elses_is_not_for_it(rows: int) -> None:
    model: Any = from_hf(hf_model())
    model.h[1].attn.mask = model.h[1].attn.mask[:rows, :rows].clone()
    assert bound(model) is None


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
    "swapped weights": lambda model, block, patch: swap_tensors(block.attn.c_proj.weight, fixed(24, 24)),
    "weights that change places": lambda model, block, patch: swap_tensors(
        block.attn.c_proj.weight, model.h[0].attn.c_proj.weight
    ),
    "another weight's data": lambda model, block, patch: setattr(block.mlp.c_proj.weight, "data", fixed(24, 96).data),
    "uncounted": lambda model, block, patch: (block.mlp.c_proj.weight.data.neg_(), products.forget(model)),
    "fused": lambda model, block, patch: fused(model),
    "other weights": lambda model, block, patch: model.load_state_dict(from_hf(hf_model(5)).state_dict(), assign=True),
    "the scale": lambda model, block, patch: setattr(block.attn, "scale", 5.0),
    "the activation": lambda model, block, patch: setattr(block.mlp, "activation", torch.cos),
    "epsilon": lambda model, block, patch: setattr(block.ln_1, "eps", 9.0),
}
BEFORE: dict[str, Callable[[Any, Any, pytest.MonkeyPatch], Any]] = {
    "another method": lambda model, block, patch: setattr(block.attn, "forward", partial(ones, None)),
    "another head": lambda model, block, patch: setattr(model, "head", lambda x: x @ fixed(24, 64)),
    "dropout": lambda model, block, patch: setattr(block.mlp.dropout.train(), "p", 1.0),
    "compiled": lambda model, block, patch: setattr(block.mlp, "_compiled_call_impl", partial(ones, None)),
}


def fixed(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float32).sin().view(shape), requires_grad=False)


def fused(model: GPT2) -> None:
    """A step of training that counts nothing."""
    model.requires_grad_(True)
    with torch.enable_grad():
        model(torch.tensor([[3, 4, 5]])).square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def doubled() -> Linear:
    layer = Doubled(24, 96).requires_grad_(False)
    layer.weight, layer.bias = fixed(96, 24), fixed(96)
    return layer


def steps_of(folder: Path, dtype: str, how: str | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of a text, in the middle of which (or before) the model is changed."""
    lm = minigpt.load(folder, dtype=dtype, draft="off")  # a pass over a draft rounds otherwise
    undo = None
    steps = []
    with monkeypatch.context() as patch:
        try:
            if how in BEFORE:
                undo = BEFORE[how](lm.model, lm.model.h[1], patch)
            for one in lm.stream([3, 4], max_new_tokens=8, stop_ids=(), logprobs=1):
                steps.append((one.id, one.logprob))
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
    monkeypatch.setattr(step, "bound", lambda model: None)
    assert found == steps_of(folder, dtype, how, monkeypatch)
    assert plain == steps_of(folder, dtype, None, monkeypatch)
