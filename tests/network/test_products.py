"""Matrix products on the CPU: every format against float64, what is packed when, and a torch without the operators."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

import minigpt
from minigpt import CheckpointError
from minigpt.network import formats, products
from minigpt.network.formats import OneDNN, Product
from minigpt.network.linear import Embedding, Linear
from minigpt.network.products import Packed, works

EXACT = (formats.Plain, formats.OneDNN, formats.Float32, formats.InParts)
FLOAT16 = (formats.Float16, formats.PlainFloat16)
INT8 = (formats.Int8, formats.Int8Narrow, formats.PlainInt8)
EVERY = (*EXACT, *FLOAT16, *INT8)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def needs(product: type[Product]) -> None:
    if not works(product):
        pytest.skip(f"{product.__name__} does not work on this machine")


@pytest.mark.parametrize("product", EVERY)
def test_a_product_is_that_of_float64(product: type[Product]) -> None:
    """For all shapes of x, and weights in either order of memory. Measured: 2e-7, float16 2e-4, int8 7e-3 to 1e-2."""
    needs(product)
    tolerance = 2e-6 if product in EXACT else 5e-4 if product in FLOAT16 else 0.02
    for K, N in ((768, 2304), (40, 7), (5, 257)):
        weight, bias = random(N, K, seed=1), random(N, 2, seed=2)[:, 0]  # a bias that is not contiguous
        for stored in (weight, weight.t().contiguous().t()):
            multiply = product(stored)
            strided = random(3, K, 4).transpose(1, 2), random(2, 5, K)[:, -1:]
            for x in (random(1, K), random(2, 3, K), random(9, K), *strided):
                for b in (bias, None):
                    wanted = F.linear(x.double(), weight.double(), None if b is None else b.double())
                    assert relative(multiply(x, b), wanted) < tolerance
            assert multiply(random(0, K), bias).shape == (0, N)


class PlainInt8Narrow(formats.PlainInt8):
    """What PlainInt8 gives with the 7-bit activations of a CPU without VNNI."""

    levels = formats.Int8Narrow.levels


@pytest.mark.parametrize(
    ("fast", "plain"),
    [
        (formats.Float16, formats.PlainFloat16),
        (formats.Int8, formats.PlainInt8),
        (formats.Int8Narrow, PlainInt8Narrow),
    ],
)
def test_the_slower_way_gives_the_same_numbers(fast: type[Product], plain: type[Product]) -> None:
    needs(fast)
    weight, bias, x = random(300, 96, seed=1), random(300, seed=2), random(20, 96)
    assert relative(fast(weight)(x, bias), plain(weight)(x, bias)) < 2e-6  # measured: 2e-7


def test_any_number_of_rows_gives_the_same_with_few_kernels() -> None:
    """oneDNN keeps 0.65 MB of code for each number of rows."""
    needs(OneDNN)
    weight, bias, x = random(6, 24, seed=1), random(6, seed=2), random(1300, 24)
    wanted, product = F.linear(x, weight, bias), OneDNN(weight)
    for rows in range(1, 1300, 7):
        assert torch.allclose(product(x[:rows], bias), wanted[:rows], atol=1e-5)
    assert len({product._size(rows) for rows in range(1, 5000)}) == 32
    assert all(product._size(rows) >= min(rows, product.most) for rows in range(1, 5000))


@pytest.mark.parametrize("product", [*FLOAT16, *INT8])
def test_a_row_does_not_depend_on_other_rows(product: type[Product]) -> None:
    """One scale for the whole input would let an outlier spoil all other rows. Equal to the bit, whatever is beside."""
    needs(product)
    multiply, x = product(random(64, 48, seed=1)), random(5, 48)
    alone = torch.cat([multiply(row[None], None) for row in x])
    outlier = torch.cat([x, 1e6 * random(1, 48, seed=3)])
    assert torch.allclose(multiply(x, None), alone, rtol=1e-6, atol=1e-6)
    assert torch.allclose(multiply(outlier, None)[:5], alone, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_hf(tiny.hf_model(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_formats_are_causal_and_rows_are_independent(folder: Path, dtype: str) -> None:
    """Neither a later token nor another row moves a logit, nor does a cache. float32 rounds by the shape: 4e-6."""
    lm = minigpt.load(folder, dtype=dtype)
    ids = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(0))
    wanted = lm.model(ids)
    later, other = ids.clone(), ids.clone()
    later[:, 12:] = 5
    other[1:] = 7
    close = {"rtol": 0.0, "atol": 1e-5}
    torch.testing.assert_close(lm.model(later)[:, :12], wanted[:, :12], **close)
    torch.testing.assert_close(lm.model(other)[0], wanted[0], **close)
    torch.testing.assert_close(lm.model(ids[:1])[0], wanted[0], **close)


@pytest.mark.parametrize(("dtype", "worst"), [("float16", 1e-2), ("int8", 0.2)])
def test_formats_stay_near_float32(folder: Path, dtype: str, worst: float) -> None:
    """Measured, as a fraction of the largest logit: float16 1.1e-3, int8 3.3e-2."""
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    exact, lm = minigpt.load(folder).model(ids), minigpt.load(folder, dtype=dtype)
    found = lm.model(ids)
    assert lm.dtype == getattr(torch, dtype) and lm.model.wte.weight.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < worst * exact.abs().max()


def test_a_weight_that_changes_is_packed_again(folder: Path) -> None:
    lm = minigpt.load(folder, dtype="int8")
    layer, x = lm.model.h[0].mlp.c_fc, random(2, 24)
    before = layer(x)
    layer.weight.mul_(2)
    layer.bias.zero_()
    twice = layer(x)
    assert relative(twice, F.linear(x, layer.weight)) < 0.02
    layer.weight = torch.nn.Parameter(random(96, 24, seed=5), requires_grad=False)
    assert relative(layer(x), F.linear(x, layer.weight)) < 0.02
    assert relative(before, twice) > 0.1
    lm.model.wte.weight[3] = 0.0  # also where the head is tied
    assert float(lm.model(torch.tensor([[1]]))[0, 0, 3]) == 0.0


def test_a_change_before_the_first_use_counts(folder: Path) -> None:
    lm = minigpt.load(folder)
    layer, x = lm.model.h[0].attn.c_attn, random(2, 24)
    layer.weight.zero_()
    assert torch.equal(layer(x), layer.bias.expand(2, -1))


def test_copies_and_pickles_compute_the_same(folder: Path) -> None:
    lm, ids = minigpt.load(folder, dtype="int8"), torch.tensor([[1, 2, 3]])
    logits = lm.model(ids)
    for other in (copy.deepcopy(lm.model), pickle.loads(pickle.dumps(lm.model))):
        assert torch.equal(other(ids), logits)


def test_other_types_and_gradients_go_the_ordinary_way(folder: Path) -> None:
    model = minigpt.load(folder).model
    x = random(2, 24).requires_grad_()
    layer = model.h[0].mlp.c_fc
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, -1), atol=1e-5)
    assert model.double()(torch.tensor([[1]])).dtype == torch.float64


def test_loading_inside_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        lm = minigpt.load(folder)
        first = lm.model(torch.tensor([[1, 2]]))
        lm.model.h[0].mlp.c_fc.weight.zero_()
        assert not torch.equal(lm.model(torch.tensor([[1, 2]])), first)


def test_threads_may_meet_at_the_first_use(folder: Path) -> None:
    lm, found = minigpt.load(folder), []
    threads = [
        threading.Thread(target=lambda: found.append(lm.generate([1, 2], max_new_tokens=9).ids)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [minigpt.load(folder).generate([1, 2], max_new_tokens=9).ids] * 4


def test_a_weight_beyond_float16_is_refused(folder: Path) -> None:
    lm = minigpt.load(folder, dtype="float16")
    lm.model.h[0].mlp.c_fc.weight[0, 0] = 1e5
    with pytest.raises(CheckpointError, match="too large for float16: use float32"):
        lm.generate([1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_nan_in_a_weight_is_an_error_in_every_format(folder: Path, dtype: str) -> None:
    lm = minigpt.load(folder, dtype=dtype)
    lm.model.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    problem = "a weight is not a number" if dtype == "float16" else r"not finite: h\.0\.mlp\.c_fc\.weight"
    with pytest.raises(CheckpointError, match=problem):
        lm.generate([1], max_new_tokens=2)


def test_a_zero_row_or_weight_divides_by_nothing() -> None:
    for product in (chosen for chosen in INT8 if works(chosen)):
        assert torch.equal(product(torch.zeros(4, 8))(random(2, 8), None), torch.zeros(2, 4))
        assert torch.equal(product(random(4, 8))(torch.zeros(2, 8), None), torch.zeros(2, 4))


class Saturating(formats.PlainInt8):
    """What a CPU without VNNI does to 8-bit activations: pairs of products saturate at 16 bits."""

    def _multiply(self, x: Tensor) -> Tensor:
        products = ((x * self.levels).round() + self.levels + 1)[..., None, :] * self.weight
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1)
        return (pairs - (self.levels + 1) * self.weight.sum(-1)) * (self.scale / self.levels)


class SaturatingNarrow(Saturating):
    levels = 63


class Missing(formats.Float32):
    def __init__(self, weight: Tensor) -> None:
        torch.ops.mkldnn._no_such_operator(weight)


def test_what_is_missing_or_wrong_here_is_not_chosen() -> None:
    assert not works(Saturating) and works(SaturatingNarrow)
    assert not works(Missing)
    assert products.chosen((Saturating, Missing, formats.Plain)) is formats.Plain


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_torch_without_the_operators(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    wanted = minigpt.load(folder, dtype=dtype).model(ids)
    if (
        products.chosen(products.FORMATS[torch.int8]) is formats.Int8Narrow
    ):  # 7-bit activations: compare with their like
        monkeypatch.setattr(formats.PlainInt8, "levels", formats.Int8Narrow.levels)
    monkeypatch.setattr(products, "works", lambda product: product.__name__.startswith("Plain"))
    lm = minigpt.load(folder, dtype=dtype)
    assert "PyTorch" in products.format_name(lm.model.output)
    torch.testing.assert_close(lm.model(ids), wanted, rtol=0.0, atol=0.02 if dtype == "int8" else 1e-4)
    assert isinstance(lm.model.output.packed.of(lm.model.output.weight), products.FORMATS[lm.dtype][-1])


def test_layers_without_a_checkpoint_need_no_copy() -> None:
    layer, embedding, x = Linear(24, 7).requires_grad_(False), Embedding(9, 24).requires_grad_(False), random(3, 24)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5)
    assert torch.allclose(embedding.logits(x[0]), embedding.weight @ x[0], atol=1e-5)
    assert products.format_name(layer) == products.chosen(products.IN_PLACE).name
    layer.packed = Packed(torch.float16)
    assert relative(layer(x), F.linear(x, layer.weight, layer.bias)) < 5e-4


def test_a_product_can_be_shared_and_another_weight_takes_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model that differs in one matrix packs only this one."""
    model = minigpt.load(folder, dtype="int8").model
    ids, layer = torch.tensor([[1, 2, 3]]), model.h[1].attn.c_proj
    logits, packs = model(ids), []
    pack = Packed._pack
    monkeypatch.setattr(Packed, "_pack", lambda self, weight: packs.append(weight) or pack(self, weight))
    other = copy.copy(layer)  # shares the dict of parameters until it has its own
    other._parameters = dict(layer._parameters)
    assert other.packed is layer.packed and torch.equal(other(random(2, 24)), layer(random(2, 24))) and not packs
    other.weight, other.packed = torch.nn.Parameter(layer.weight * 2, requires_grad=False), copy.copy(layer.packed)
    assert relative(other(random(2, 24)) - layer.bias, 2 * (layer(random(2, 24)) - layer.bias)) < 1e-5
    assert torch.equal(model(ids), logits) and len(packs) == 1 and other.packed.dtype == torch.int8


FRESH = """
import threading, warnings
import minigpt, torch
minigpt.GPT2, {before}
filters = list(warnings.filters)
lm = minigpt.load({folder!r}, dtype="int8")
work = lambda: [lm.model.h[0].mlp.c_fc.packed.forget() or lm.generate([1, 2], max_new_tokens=3) for _ in range(20)]
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert warnings.filters == filters, warnings.filters
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "torch.set_default_device('meta')"])
def test_int8_warns_of_nothing_and_leaves_the_filters_alone(folder: Path, before: str) -> None:
    """Two threads changed the filters and put them back by turns: ('ignore', None, Warning, None, 0) stayed."""
    code = FRESH.format(folder=str(folder), before=before)
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "quantize" not in done.stderr, done.stderr


def test_no_module_of_the_network_touches_the_filters() -> None:
    for module in Path(products.__file__).parent.glob("*.py"):
        assert "catch_warnings" not in module.read_text("utf-8")


@pytest.fixture
def host_defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_hosts_default_dtype_and_device_change_nothing(folder: Path, dtype: str, request: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    model = minigpt.load(folder, dtype=dtype, device="cpu").model
    wanted = model(ids), minigpt.load(folder, dtype=dtype, device="cpu").generate([1, 2], max_new_tokens=5).ids
    request.getfixturevalue("host_defaults")
    products.works.cache_clear()
    lm = minigpt.load(folder, dtype=dtype, device="cpu")
    found = lm.model(ids)
    assert found.dtype == torch.float32 and found.is_cpu and torch.equal(found, wanted[0])
    assert lm.generate([1, 2], max_new_tokens=5).ids == wanted[1]
    cache = minigpt.KVCache(lm.config)
    assert cache.keys.is_cpu and cache.keys.dtype == torch.float32
    assert torch.equal(lm.model(ids, cache), wanted[0])


@pytest.mark.parametrize("layout", ["(in, out)", "(out, in)"])
def test_a_few_rows_in_parts_and_the_order_of_onednn_for_more(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form gives the same numbers, and gives the file's pages back when it is made."""
    needs(formats.InParts)
    monkeypatch.setattr(formats.Use, "count", lambda *_: None)
    weight, bias, released = torch.randn(50, 64), torch.randn(50), []  # 16 parts of 3 outputs, and two more
    product = formats.InParts(weight.t().contiguous().t() if layout == "(in, out)" else weight)
    product.release = lambda: released.append(product.ordered is not None)
    for rows, ordered in (
        (1, False),
        (4, False),
        (5, False),
        (5, True),
        (1, True),
        (200, True),
        (3, False),
        (5, False),
    ):
        product.use.ordered = ordered
        x = torch.randn(rows, 64)
        assert torch.allclose(product(x, bias), F.linear(x, weight, bias), atol=2e-5)
        assert torch.allclose(product(x[None], None), F.linear(x[None], weight), atol=2e-5)
    assert released == [True, False]


def test_the_order_of_onednn_comes_with_many_rows_and_goes_with_one() -> None:
    use, changes = formats.Use(), []
    for rows, steps in ((5, 13), (1, 12), (64, 90), (65, 47), (1, 1)):
        for _ in range(steps):
            use.count(rows)
        changes.append(use.ordered)
    assert changes == [True, True, True, True, False]
