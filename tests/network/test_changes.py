"""A weight that changes is never multiplied as it was: every optimizer, every other write that PyTorch counts.

A fused step of training leaves `_version` at 0. What had been packed stayed, so that new biases met old matrices.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils import swap_tensors

import minigpt
from minigpt import GPT2, KVCache
from minigpt.decoding.step import Steps
from minigpt.network import products
from minigpt.network.linear import Embedding, Linear
from minigpt.network.products import Packed

FORMATS = ["float32", "float16", "int8"]
IDS = torch.tensor([[3, 4, 5, 6]])


def plain(model: GPT2) -> GPT2:
    """A copy whose products are those of a fresh model in the same format."""
    other = copy.deepcopy(model).requires_grad_(False)
    for weight in other.parameters():
        weight.grad = None
    return other


def agrees(model: GPT2, steps: Steps | None = None, atol: float = 0.0) -> None:
    """The modules, and a step bound before, give what a model that never knew other weights gives."""
    fresh = plain(model) if not any(map(products.learns, model.parameters())) else unpacked(model)
    with torch.inference_mode():
        wanted = fresh(IDS)
        assert torch.allclose(model(IDS), wanted, rtol=0, atol=atol or 2e-5)
        if steps is not None:
            cache = KVCache(model.config)
            parts = [steps(part, cache) for part in IDS.split(1, dim=1)]
            assert torch.allclose(torch.cat(parts, 1), wanted, rtol=0, atol=atol or 2e-5)


def unpacked(model: GPT2) -> GPT2:
    other = plain(model)
    for module in other.modules():
        if isinstance(module, (Linear, Embedding)):
            module.packed = None
    return other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_hf(tiny.hf_model(), tmp_path_factory.mktemp("model"))


def loaded(folder: Path, dtype: str = "float32") -> tuple[GPT2, Steps]:
    """A model that has packed all of its weights, and a bound step of it."""
    model = minigpt.load(folder, dtype=dtype, device="cpu").model
    steps = Steps(model)
    with torch.inference_mode():
        model(IDS)
        steps(IDS, KVCache(model.config))
    return model, steps


def optimizers() -> list[Any]:
    found = []
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or kind is torch.optim.Optimizer or not issubclass(kind, torch.optim.Optimizer):
            continue
        takes = inspect.signature(kind).parameters
        ways = [{}, *({way: True} for way in ("fused", "foreach") if way in takes)]
        found += [pytest.param(kind, way, id="-".join([name, *way])) for way in ways]
    return found


def trained(model: GPT2, kind: Any, way: dict[str, bool]) -> torch.optim.Optimizer:
    """One step of training, by the loss of the model; the matrices alone where the optimizer takes no others."""
    weights = [weight for weight in model.parameters() if weight.dim() == 2 or kind.__name__ != "Muon"]
    if kind.__name__ == "LBFGS":  # it refuses the transposed views of a loaded model
        for weight in weights:
            weight.data = weight.data.contiguous()
    optimizer = kind(weights, lr=0.05, **way)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(IDS)[0, :-1], IDS[0, 1:])
        value.backward()
        if kind.__name__ == "SparseAdam":
            for weight in weights:
                weight.grad = weight.grad.to_sparse()
        return value

    optimizer.step(loss)
    return optimizer


@pytest.mark.parametrize(("kind", "way"), optimizers())
def test_every_optimizer_is_seen(folder: Path, kind: Any, way: dict[str, bool]) -> None:
    model, steps = loaded(folder)
    before = model(IDS)
    model.requires_grad_(True)
    with torch.no_grad():
        model(IDS)  # which packed them
    try:
        optimizer = trained(model, kind, way)
    except RuntimeError as error:
        assert "fused" in str(error) or "foreach" in str(error), error
        pytest.skip(str(error))
    assert not torch.allclose(model(IDS), before, atol=1e-3)
    agrees(model, steps)
    model.requires_grad_(False)  # with gradients: an optimizer would go on with these
    if kind.__name__ not in ("LBFGS", "SparseAdam"):
        optimizer.step()
    agrees(model, steps)
    optimizer.zero_grad()
    for weight in model.parameters():
        weight.grad = None
    agrees(model, steps)  # now they are packed again
    assert model.h[0].mlp.c_fc.packed is not None and model.h[0].mlp.c_fc.packed._made[2] is not None


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_weight_that_learns_is_not_packed_in_any_format(folder: Path, dtype: str) -> None:
    model, steps = loaded(folder, dtype)
    packs = [module.packed for module in model.modules() if isinstance(module, (Linear, Embedding))]
    assert all(packed._made[2] is not None for packed in packs)
    model.requires_grad_(True)
    with torch.no_grad():
        exact = model(IDS)
        assert all(packed._made[2] is None and packed._stored is None for packed in packs)
        assert torch.allclose(exact, unpacked(model)(IDS), atol=2e-5)
    trained(model, torch.optim.AdamW, {"fused": True})
    agrees(model, steps)
    for weight in model.parameters():
        weight.grad = None
    model.requires_grad_(False)
    with torch.inference_mode():
        again = model(IDS)
        assert torch.equal(again, plain(model)(IDS))
        assert all(packed._made[2] is not None for packed in packs)
    if dtype != "float32":
        assert not torch.equal(again, unpacked(model)(IDS))  # in its format again


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def averaged(model: GPT2) -> None:
    """An exponential moving average, kept by torch in the model itself."""
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    ema.module = model
    ema.n_averaged += 1
    ema.update_parameters(tiny.from_hf(tiny.hf_model(7)))


def by_hand(model: GPT2) -> None:
    other = tiny.from_hf(tiny.hf_model(7))
    with torch.no_grad():
        for weight, newer in zip(model.parameters(), other.parameters(), strict=True):
            weight.lerp_(newer, 0.5)


def copied(model: GPT2) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))


def swapped(model: GPT2) -> None:
    for weight in list(model.parameters()):
        swap_tensors(weight, nn.Parameter(weight.detach().flip(0), requires_grad=False))


def replaced(model: GPT2) -> None:
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                setattr(module, name, nn.Parameter(weight.flip(0), requires_grad=False))


def moved(model: GPT2) -> None:
    for weight in model.parameters():
        weight.data = weight.data.flip(0).contiguous()


def at_its_address(model: GPT2) -> None:
    """The weight goes, and another comes that may lie where it was."""
    layer = model.h[0].mlp.c_fc
    shape = layer.weight.shape
    layer.weight = None
    layer.weight = nn.Parameter(torch.full(shape, 0.3), requires_grad=False)


CHANGES: dict[str, Callable[[GPT2], Any]] = {
    "copy_": copied,
    "load_state_dict": lambda model: model.load_state_dict(tiny.from_hf(tiny.hf_model(7)).state_dict()),
    "load_state_dict, assign": lambda model: model.load_state_dict(
        {name: weight.detach() for name, weight in tiny.from_hf(tiny.hf_model(7)).state_dict().items()}, assign=True
    ),
    "swap_tensors": swapped,
    "new parameters": replaced,
    "new data": moved,
    "a parametrization": lambda model: parametrize.register_parametrization(model.h[0].mlp.c_fc, "weight", Halved()),
    "weight_norm": lambda model: (
        parametrizations.weight_norm(model.h[0].mlp.c_fc),
        model.h[0].mlp.c_fc.parametrizations.weight.original0.mul_(2),
    ),
    "an EMA of torch": averaged,
    "an EMA by hand": by_hand,
    "through a view": lambda model: model.h[0].mlp.c_fc.weight.t()[0].fill_(2.0),
    "detached": lambda model: model.h[0].attn.c_proj.weight.detach().neg_(),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "another at its address": at_its_address,
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_write_that_is_counted_is_seen(folder: Path, change: str, dtype: str) -> None:
    model, steps = loaded(folder, dtype)
    with torch.no_grad():
        before = model(IDS)
        CHANGES[change](model)
        model.requires_grad_(False)
        assert not torch.allclose(model(IDS), before, atol=1e-3)
    agrees(model, steps)


UNCOUNTED: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda weight: weight.data.neg_(),
    "numpy": lambda weight: weight.numpy().__imul__(-1),
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("write", UNCOUNTED)
def test_what_nobody_counts_can_be_told(folder: Path, write: str, dtype: str) -> None:
    model, steps = loaded(folder, dtype)
    versions = [weight._version for weight in model.parameters()]
    UNCOUNTED[write](model.h[1].mlp.c_proj.weight)
    assert [weight._version for weight in model.parameters()] == versions
    products.forget(model)
    agrees(model, steps)


def test_a_write_before_the_first_use_that_nobody_counts_can_be_told(folder: Path) -> None:
    """The weight would be packed from its file."""
    model = minigpt.load(folder, device="cpu").model
    model.h[1].mlp.c_proj.weight.data.neg_()
    products.forget(model)
    agrees(model)


def test_it_can_be_told_in_inference_mode_and_of_models_without_formats(folder: Path) -> None:
    with torch.inference_mode():
        model = tiny.from_hf(tiny.hf_model())
        for module in model.modules():
            if isinstance(module, (Linear, Embedding)):
                module.packed = Packed(torch.int8)
        model.requires_grad_(False)(IDS)
        model.h[1].mlp.c_proj.weight.neg_()  # not counted in inference mode
        products.forget(model)
    agrees(model)
    products.forget(nn.Linear(2, 2))


def test_a_fused_step_on_the_demos_way(folder: Path) -> None:
    """As it was found: one forward without gradients packs, one fused step, and generate, score and save differ."""
    lm = minigpt.load(folder, device="cpu")
    lm.model.requires_grad_(True)
    with torch.no_grad():
        lm.model(IDS)
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=0.1, fused=True)
    lm.model(IDS).square().mean().backward()
    optimizer.step()
    other = minigpt.LanguageModel(unpacked(lm.model))
    assert lm.generate([3, 4], max_new_tokens=9).ids == other.generate([3, 4], max_new_tokens=9).ids
    with torch.no_grad():
        assert (lm.model(IDS) - other.model(IDS)).abs().max() < 2e-5  # was 26, of the demo model
