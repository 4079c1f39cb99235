"""The decode step of CUDA graphs: static shapes give the ordinary logits. On the CPU the step runs without a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import from_hf, hf_model

from minigpt import GPT2, Failure, KVCache, LanguageModel, PromptError, SamplingParams
from minigpt.decoding import cuda_graph
from minigpt.decoding.step import Steps, bound
from minigpt.network.cache import StaticCache

SIZES = {"vocab_size": 131, "n_positions": 64, "eos_token_id": 130}
PROMPTS = [[5] * 9, [7], [11, 12], [3, 4, 5] * 12, [9] * 30, [8] * 60, [1, 2, 3]]
USES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 30},
    "sampled": {"max_new_tokens": 30, "temperature": 1.0, "seed": 3, "logprobs": 2, "stop_ids": range(124, 131)},
    "slide": {"max_new_tokens": 90, "overflow": "slide", "stop_ids": ()},
    "samples": {"max_new_tokens": 30, "temperature": 1.0, "seed": 3, "samples": 3},
}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The static step from the third step on, run and not replayed: a buffer takes its results, as a graph's does."""
    made = []

    def captured(step: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
        made.append(device)
        static = step()
        return lambda: static.copy_(step())

    monkeypatch.setattr(cuda_graph, "pays", lambda ids, steps: steps >= 2)
    monkeypatch.setattr(cuda_graph, "captured", captured)
    return made


def filled(model: GPT2, ids: torch.Tensor, lengths: list[int], slots: int) -> KVCache:
    """A cache with a row for each length, and slots of rubbish after them."""
    cache = KVCache(model.config, slots, dtype=model.wte.weight.dtype)
    cache.keys[:, len(lengths) :], cache.values[:, len(lengths) :] = 1e3, 1e3
    while len(cache.lengths) > len(lengths):
        cache.drop_row(len(cache.lengths) - 1)
    for row, length in enumerate(lengths):
        model(ids[row : row + 1, :length], cache.row(row))
    return cache


@pytest.mark.parametrize(
    "dtype, tolerance",  # of logits up to 6; measured: 3e-6, 0.006, 0.05
    [(torch.float32, 5e-5), (torch.float16, 0.06), (torch.bfloat16, 0.5)],
)
@torch.inference_mode()
def test_static_steps_give_the_ordinary_logits(
    captures: list[torch.device], dtype: torch.dtype, tolerance: float
) -> None:
    model = from_hf(hf_model()).to(dtype)
    ids, lengths = torch.randint(0, 64, (3, 32)), [1, 20, 7]
    ordinary, static = filled(model, ids, lengths, 3), filled(model, ids, lengths, 5)
    unused = static.keys[:, 3:, :, 1:].clone()
    step = Steps(model)
    for at in range(12):
        new = torch.stack([ids[row, length : length + 1] for row, length in enumerate(ordinary.lengths)])
        logits = step(new, static)
        assert len(captures) == (at >= 2)
        expected = model(new, ordinary)
        assert logits.shape == (3, 1, 64) and (logits - expected).abs().max() < tolerance  # False for NaN
        assert static.lengths == ordinary.lengths == [length + at + 1 for length in lengths]
    # Slots not in use: written at position 0 alone, which whatever fills them next begins with.
    assert torch.equal(static.keys[:, 3:, :, 1:], unused) and (static.keys[:, 3:, :, 0] != 1e3).all()
    for row, length in enumerate(static.lengths):
        assert (static.keys[:, row, :, :length] - ordinary.keys[:, row, :, :length]).abs().max() < tolerance
        assert not static.keys[:, row, :, length:].any()
    assert captures == [torch.device("cpu")]


@torch.inference_mode()
def test_a_full_row_is_refused_before_anything_is_written(captures: list[torch.device]) -> None:
    """On CUDA a position outside the cache would end the process's use of CUDA."""
    model = from_hf(hf_model())
    cache, ids = filled(model, torch.randint(0, 64, (2, 32)), [30, 5], 2), torch.ones(2, 1, dtype=torch.long)
    step = Steps(model)
    for _ in range(2):
        step(ids, cache)
    keys, lengths = cache.keys.clone(), list(cache.lengths)
    with pytest.raises(PromptError, match="33 tokens do not fit a cache made for 32"):
        step(ids, cache)
    assert torch.equal(cache.keys, keys) and not captures and cache.lengths == lengths


@torch.inference_mode()
def test_several_new_tokens_take_no_graph(captures: list[torch.device]) -> None:
    model = from_hf(hf_model())
    cache, step = KVCache(model.config, 1), Steps(model)
    for _ in range(5):
        step(torch.tensor([[1, 2]]), cache)
    assert not captures


@torch.inference_mode()
def test_a_changed_model_is_captured_anew(captures: list[torch.device]) -> None:
    """A graph holds addresses: it would read the memory of weights that are gone."""
    model = from_hf(hf_model()).requires_grad_(False)
    cache, other, step, ids = KVCache(model.config, 1), KVCache(model.config, 1), Steps(model), torch.tensor([[3]])
    for at in range(12):
        if at == 6:
            model.ln_f.weight = torch.nn.Parameter(model.ln_f.weight * 2, requires_grad=False)
        if at == 10:
            model.h[1].mlp.register_forward_hook(lambda module, args, out: -out)
        logits = step(ids, cache)
        assert (logits - model(ids, other)).abs().max() < 5e-5
        assert len(captures) == (0 if at < 2 else 1 if at < 8 else 2)


@torch.inference_mode()
def test_static_steps_take_several_tokens_too() -> None:
    model, ids, lengths = from_hf(hf_model()), torch.randint(0, 64, (3, 32)), [1, 20, 7]
    take, ordinary, memory = bound(model), filled(model, ids, lengths, 3), filled(model, ids, lengths, 3)
    static = StaticCache(memory, torch.tensor([[length + at for at in range(4)] for length in lengths]))
    new = torch.stack([ids[row, length : length + 4] for row, length in enumerate(lengths)])
    assert take is not None and (take(new, static) - model(new, ordinary)).abs().max() < 5e-5
    for row, length in enumerate(lengths):
        assert (memory.keys[:, row, :, : length + 4] - ordinary.keys[:, row, :, : length + 4]).abs().max() < 5e-5


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("graph", [False, True], ids=["ordinary", "graph"])
def test_a_row_that_fails_spoils_no_other(captures: list[torch.device], graph: bool, batch_size: int) -> None:
    """NaN in a freed slot reached the prompt that got it next: 0 * NaN is NaN."""
    lm = LanguageModel(from_hf(hf_model(**SIZES, tie_word_embeddings=False)))
    tasks: list[Any] = [([5] * 40, 20), ([7] * 50, 10), ([7], 30), ([11, 12], 30), ([5], 3), ([3] * 5, 30)]
    wanted = [lm.generate(ids, max_new_tokens=new, stop_ids=(), suppress_tokens=[5]).ids for ids, new in tasks]
    with torch.no_grad():
        lm.model.wte.weight[5] = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        if not graph:
            patch.setattr(cuda_graph, "pays", lambda ids, steps: False)
        params = [SamplingParams(max_new_tokens=new, stop_ids=(), suppress_tokens=[5]) for _, new in tasks]
        pairs = [(ids, one) for (ids, _), one in zip(tasks, params, strict=True)]
        found = list(lm.generate_each(pairs, batch_size=batch_size))
    for (ids, _), done, expected in zip(tasks, found, wanted, strict=True):
        assert isinstance(done, Failure) if 5 in ids else done.ids == expected


@pytest.mark.parametrize("use", USES)
def test_generation_by_static_steps_is_generation(captures: list[torch.device], use: str) -> None:
    """Rows end, join, move into gaps and slide, and the cache grows, which takes another capture."""
    lm = LanguageModel(from_hf(hf_model(**SIZES)))
    static = list(lm.generate_many(iter(PROMPTS), batch_size=3, **USES[use]))
    assert len(captures) == (1 if use == "slide" else 2)  # one more for the prompt of 36 tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "pays", lambda ids, steps: False)
        ordinary = list(lm.generate_many(iter(PROMPTS), batch_size=3, **USES[use]))
    assert [done.ids for done in static] == [done.ids for done in ordinary]
    for one, other in zip(static, ordinary, strict=True):
        for ours, expected in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert abs(ours.logprob - expected.logprob) < 5e-5


def test_a_capture_that_fails_is_one_warning_and_ordinary_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LanguageModel(from_hf(hf_model(**SIZES)))
    expected = lm.generate(PROMPTS, max_new_tokens=20, stop_ids=())

    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "pays", lambda ids, steps: True)
    monkeypatch.setattr(cuda_graph, "captured", fails)
    with pytest.warns(UserWarning, match="without a CUDA graph.*not permitted when stream is capturing") as given:
        assert lm.generate(PROMPTS, max_new_tokens=20, stop_ids=()) == expected
    assert len(given) == 1


def test_the_cpu_and_short_answers_take_no_graph() -> None:
    class OnCuda:
        is_cuda = True

    ids: Any = OnCuda()
    assert cuda_graph.pays(ids, 8) and not cuda_graph.pays(ids, 7)
    assert not cuda_graph.pays(torch.tensor([[1]]), 100)


@pytest.mark.parametrize("where", ["block", "model", "everywhere"])
def test_hooks_take_no_graph(captures: list[torch.device], where: str) -> None:
    lm = LanguageModel(from_hf(hf_model(**SIZES)))
    register = {
        "block": lm.model.h[1].mlp.register_forward_hook,
        "model": lm.model.ln_f.register_forward_pre_hook,
        "everywhere": torch.nn.modules.module.register_module_forward_hook,
    }[where]
    handle = register(lambda *_: None)
    try:
        lm.generate([3, 4], max_new_tokens=20, stop_ids=())
    finally:
        handle.remove()
    assert not captures
    lm.generate([3, 4], max_new_tokens=20, stop_ids=())
    assert captures


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_generation_by_a_cuda_graph_is_generation(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, dtype: torch.dtype, use: str
) -> None:
    """Two threads at a time with graphs, against one without; where the dtype rounds, up to the first close call."""
    lm = LanguageModel(from_hf(hf_model(**SIZES)).to("cuda", dtype))
    made = []
    captured = cuda_graph.captured
    monkeypatch.setattr(cuda_graph, "captured", lambda *args: made.append(captured(*args)) or made[-1])
    results: dict[int, Any] = {}

    def work(thread: int) -> None:
        results[thread] = list(lm.generate_many(iter(PROMPTS), batch_size=3, **USES[use]))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) >= 2 and not [warning for warning in recwarn if "CUDA graph" in str(warning.message)]
    monkeypatch.setattr(cuda_graph, "pays", lambda ids, steps: False)
    ordinary = list(lm.generate_many(iter(PROMPTS), batch_size=3, **USES[use]))
    assert [done.ids for done in results[0]] == [done.ids for done in results[1]]
    if dtype == torch.float32:
        assert [done.ids for done in results[0]] == [done.ids for done in ordinary]
    else:
        same = sum(one.ids[:9] == other.ids[:9] for one, other in zip(results[0], ordinary, strict=True))
        assert same >= len(ordinary) / 2 and len({tuple(done.ids) for done in ordinary}) > 1
