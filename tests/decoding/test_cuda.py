"""CUDA: the CPU's tokens, few launches, one wait a step. Where there is no GPU, on a simulated device."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_cuda import Capture, simulated
from tiny import from_hf, hf_model

from minigpt import GPT2 as Model
from minigpt import Failure, GPT2Config, LanguageModel, SamplingParams
from minigpt.decoding import cuda_graph
from minigpt.decoding.sampling import keep_top_p
from minigpt.network.device import find_dtype

SIZES = {"vocab_size": 131, "n_positions": 64, "eos_token_id": 130, "n_layer": 2}
PROMPTS = [[5] * 9, [7], [3, 4, 5] * 12, [8] * 60, [1, 2, 3]]
SHAPED = {"temperature": 0.8, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
USES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "sampled": {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "stop_ids": range(120, 131)},
    "shaped": {"max_new_tokens": 10, **SHAPED, "logit_bias": {7: 2.0, 9: -3.0}, "suppress_tokens": [11, 12]},
    "logprobs": {"max_new_tokens": 8, "logprobs": 3, "repetition_penalty": 1.2},
    "n-grams": {"max_new_tokens": 12, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "min_new": {"max_new_tokens": 12, "min_new_tokens": 5, "stop_ids": range(0, 131, 2), "temperature": 1.0, "seed": 1},
    "slide": {"max_new_tokens": 70, "overflow": "slide", "stop_ids": ()},
    "samples": {"max_new_tokens": 9, "temperature": 1.0, "seed": 3, "samples": 3},
    "words": {"max_new_tokens": 9, "bad_words_ids": [[3, 4], [7]], "sequence_bias": [[(5, 5), 4.0]]},
    "typical": {"max_new_tokens": 6, "temperature": 1.0, "seed": 3, "typical_p": 0.9, "eta_cutoff": 0.01},
    "beams": {"max_new_tokens": 6, "num_beams": 2, "stop_ids": ()},
    "ablated": {"max_new_tokens": 9, "ablate": ["0.1", "1.0"]},
}


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The simulated device; None where there is a real one, which runs the same tests but for the counts."""
    if torch.cuda.is_available():
        yield None
    else:
        with simulated() as device:
            yield device


@pytest.fixture
def counted(cuda: Any) -> Any:
    if cuda is None:
        pytest.skip("only the simulated CUDA device counts")
    return cuda


def small(**changes: Any) -> Model:
    return from_hf(hf_model(**{**SIZES, **changes})).requires_grad_(False)


def given(lm: LanguageModel, prompts: Any = PROMPTS, **options: Any) -> list[Any]:
    return list(lm.generate_many(iter(prompts), batch_size=3, **options))


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert [one.ids for one in found] == [one.ids for one in wanted]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert [id for id, _ in one.top] == [id for id, _ in other.top] and abs(one.logprob - other.logprob) < 5e-5


def test_smoke(cuda: Any) -> None:
    """Rows of three lengths, greedy and sampled side by side, once captured and once from the kept graph."""
    model = small(n_layer=1)
    mixed = [SamplingParams(max_new_tokens=5, stop_ids=()), SamplingParams(max_new_tokens=7, stop_ids=(), **SHAPED)]
    prompts = [[5] * 9, [7]]
    wanted = list(LanguageModel(model).generate_many(prompts, mixed))
    lm = LanguageModel(copy.deepcopy(model).to("cuda"))
    for _ in range(2):
        assert_same(list(lm.generate_many(prompts, mixed)), wanted)
    if cuda:
        assert cuda.counts["capture"] <= 2 and cuda.counts["replay"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_the_cpus_tokens(cuda: Any, use: str) -> None:
    """Rows end, join, move into gaps and slide; the random numbers of the simulated device are the CPU's."""
    model = small()
    wanted = given(LanguageModel(model), **USES[use])
    lm = LanguageModel(copy.deepcopy(model).to("cuda:1" if cuda else "cuda"))
    found = given(lm, **USES[use])
    if cuda or "temperature" not in USES[use]:
        assert_same(found, wanted)
    assert_same(given(lm, **USES[use]), found)  # from graphs that are kept
    assert_same([one for prompt in PROMPTS for one in given(lm, [prompt], **USES[use])], found)  # alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "refused", lambda: True)
        patch.setattr("minigpt.decoding.cuda_rows.refused", lambda: True)
        assert_same(given(lm, **USES[use]), found)  # without graphs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_formats(cuda: Any, dtype: torch.dtype) -> None:
    """Against ordinary steps on the same device, up to the first close call."""
    lm = LanguageModel(small().to("cuda", dtype))
    for use in ("greedy", "shaped"):
        found = given(lm, **USES[use])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minigpt.decoding.cuda_rows.refused", lambda: True)
            wanted = given(lm, **USES[use])
        assert sum(one.ids[:4] == other.ids[:4] for one, other in zip(found, wanted, strict=True)) >= 3


@pytest.mark.slow
def test_scores_and_attention(cuda: Any) -> None:
    model = small()
    lm, ours = LanguageModel(model), LanguageModel(copy.deepcopy(model).to("cuda"))
    score, other = lm.score(PROMPTS[2], logprobs=2), ours.score(PROMPTS[2], logprobs=2)
    assert max(abs(a - b) for a, b in zip(score.logprobs[1:], other.logprobs[1:], strict=True)) < 1e-4
    weights = ours.attention(PROMPTS[2])
    assert weights.is_cpu and (weights - lm.attention(PROMPTS[2])).abs().max() < 1e-5


def per_step(lm: LanguageModel, device: Any, rows: int, **options: Any) -> dict[str, float]:
    """What a step takes, once the graphs are there: the difference that ten tokens more make."""
    counts = []
    for new in (4, 14, 4, 14):
        device.clear()
        list(lm.generate_many([[5, 6]] * rows, batch_size=rows, max_new_tokens=new, stop_ids=(), **options))
        counts.append(device.counts.copy())
    return {kind: (counts[3][kind] - counts[2][kind]) / 10 for kind in ("kernel", "copy", "sync", "replay", "capture")}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_one_wait_a_step_for_all_rows(counted: Any, rows: int) -> None:
    """Ordinary steps took 4 to 8 waits for each row."""
    lm = LanguageModel(small(n_layer=1).to("cuda"))
    greedy = {"kernel": 0, "copy": 2, "sync": 1, "replay": 1, "capture": 0}  # to the device and back
    assert per_step(lm, counted, rows) == greedy
    assert per_step(lm, counted, rows, **SHAPED, logprobs=3) == {**greedy, "kernel": rows}  # random numbers
    bans = per_step(lm, counted, rows, no_repeat_ngram_size=9)
    assert bans == {**greedy, "copy": 2 + rows}  # the bans of each row


@pytest.mark.slow
def test_nodes_and_captures(counted: Any) -> None:
    """Masks and positions once a step; K and V by one kernel. There were 209 nodes; each call captured anew."""
    config = GPT2Config(vocab_size=97, n_positions=1024, n_embd=24, n_head=12, n_layer=12, initializer_range=0.5)
    lm = LanguageModel(Model(config).to("cuda"))
    for _ in range(20):
        lm.generate([5, 6], max_new_tokens=3, stop_ids=())
    assert counted.counts["capture"] == 1 and len(counted.graphs[0].nodes) <= 165


@pytest.mark.slow
def test_growing_prompts(counted: Any) -> None:
    lm = LanguageModel(small(n_positions=1024, n_layer=1).to("cuda"))
    for length in range(10, 901, 89):
        lm.generate([5] * length, max_new_tokens=3, stop_ids=())
    assert counted.counts["capture"] == 3
    lm.release()
    assert not lm.graphs.idle
    counted.free = 1000  # bytes: nothing is kept
    lm.generate([5], max_new_tokens=3, stop_ids=())
    assert not lm.graphs.idle


def test_fused_attention_meets_few_shapes(counted: Any) -> None:
    """cuDNN makes a plan for each shape, 0.1 to 0.4 s: every length of prompt and cache was one."""
    lm = LanguageModel(small(n_layer=1).to("cuda", torch.float16))
    lm.model.make_masks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minigpt.decoding.cuda_rows.refused", lambda: True)  # ordinary steps, too
        for length in range(2, 50, 6):
            lm.generate([5] * length, max_new_tokens=3, stop_ids=())
    assert len(counted.plans) == 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another weight": lambda m: setattr(m.ln_f, "weight", torch.nn.Parameter(-m.ln_f.weight, requires_grad=False)),
    "its memory": lambda m: setattr(m.ln_f.weight, "data", -m.ln_f.weight.data),
    "in place": lambda m: m.ln_f.weight.neg_(),
    "the scale": lambda m: setattr(m.h[0].attn, "scale", 3.0),
    "a hook": lambda m: m.ln_f.register_forward_hook(lambda module, args, out: -out),
}


@pytest.mark.slow
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_seen(cuda: Any, change: str, within: bool) -> None:
    """A graph went on with the old weight, by then freed memory. Within a call, what a step counts is seen."""
    if (within and change == "the scale") or (cuda and change == "its memory"):
        pytest.skip("seen from the next call on; the simulated CUDA device cannot change a tensor's memory")
    warnings.simplefilter("error")  # of a graph that failed; pytest puts the filters back
    results = []
    for device in ("cpu", "cuda"):
        lm = LanguageModel(small().to(device))
        stream = lm.stream([3, 4], max_new_tokens=12, stop_ids=())
        ids = [next(stream).id for _ in range(4)]
        if not within:
            ids += [step.id for step in stream]
        CHANGES[change](lm.model)
        ids += [step.id for step in (stream if within else lm.stream([3, 4], max_new_tokens=12, stop_ids=()))]
        results.append(ids)
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_row_that_fails_spoils_no_other(cuda: Any, batch_size: int) -> None:
    """Its failure comes as a flag, a step late; its slot is cleared; the others draw what they draw alone."""
    lm = LanguageModel(small(tie_word_embeddings=False).to("cuda"))
    lm.model.lm_head.weight[:] = 0.3 * torch.randn(131, 24, device="cpu").to(lm.device)
    shared = {"max_new_tokens": 9, "stop_ids": (), "temperature": 1.0, "seed": 4}
    tasks: list[Any] = [([7], {}), ([11, 12], {"logit_bias": {5: 90.0}}), ([5, 3] * 5, {"top_k": 9}), ([9], {})]
    pairs = [(ids, SamplingParams(**shared, **more)) for ids, more in tasks]
    wanted = [lm.generate(ids, params).ids for ids, params in pairs]
    lm.model.wte.weight[5] = math.nan
    found = list(lm.generate_each(pairs, batch_size=batch_size))
    for (ids, more), one, expected in zip(tasks, found, wanted, strict=True):
        if 5 in ids or more.get("logit_bias"):
            assert isinstance(one, Failure) and "not finite: wte.weight" in str(one.error)
        elif 5 not in expected:
            assert not isinstance(one, Failure) and one.ids == expected
    everything = range(131)
    barred = list(lm.generate_each([([7], SamplingParams(max_new_tokens=5, no_repeat_ngram_size=1,
        suppress_tokens=everything[3:], stop_ids=()))]))  # fmt: skip
    assert isinstance(barred[0], Failure) and "no token is left" in str(barred[0].error)


@pytest.mark.slow
def test_threads(cuda: Any) -> None:
    """Two at once, each with an entry of its own; the second call of each reuses one. The streams stay."""
    lm = LanguageModel(small().to("cuda"))
    stream = torch.cuda.current_stream()
    wanted = given(lm, **USES["shaped"])
    results: list[Any] = []

    def work() -> None:
        results.extend(given(lm, **USES["shaped"]) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and torch.cuda.current_stream() == stream
    for found in results:
        assert_same(found, wanted)
    assert 1 <= len(lm.graphs.idle) <= 2


def test_no_replay_beside_a_capture(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.13: "Offset increment outside graph capture"."""
    monkeypatch.setattr(cuda_graph, "REPLAYS_ALONE", True)
    counted.replay_disturbs = True
    lm = LanguageModel(small(n_layer=1).to("cuda"))
    wanted = lm.generate([3], max_new_tokens=4, stop_ids=())
    inside, done = threading.Event(), threading.Event()

    def waits() -> tuple[torch.Tensor, ...]:
        if Capture.running:
            inside.set()
            done.wait(0.3)
        return (torch.zeros(1, device="cuda"),)

    thread = threading.Thread(target=cuda_graph.captured, args=(waits, torch.device("cuda:0")))
    thread.start()
    assert inside.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lm.generate([3], max_new_tokens=4, stop_ids=()) == wanted
    thread.join()


def test_a_failed_capture_is_remembered(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call tried again and warned again; the thread's stream was the graph's from then on."""
    lm = LanguageModel(small(n_layer=1).to("cuda"))
    wanted = LanguageModel(small(n_layer=1)).generate([3], max_new_tokens=5, stop_ids=())
    stream = torch.cuda.current_stream()
    chosen = cuda_graph.Entry.chosen

    def reads(self: Any, logits: torch.Tensor, wants: Any) -> Any:
        assert logits.sum().item() or True
        return chosen(self, logits, wants)

    monkeypatch.setattr(cuda_graph.Entry, "chosen", reads)
    with pytest.warns(UserWarning, match="without a CUDA graph.*not permitted when stream is capturing") as given:
        for _ in range(3):
            assert lm.generate([3], max_new_tokens=5, stop_ids=()) == wanted
    assert len(given) == 1 and counted.counts["capture"] == 1
    assert torch.cuda.current_stream() is stream and len(stream.wait_stream.mock_calls) == 1


def test_deterministic_algorithms(counted: Any) -> None:
    """No capture is tried; top_p, whose cumsum CUDA refuses then, is computed on the CPU."""
    lm, cpu = LanguageModel(small(n_layer=1).to("cuda")), LanguageModel(small(n_layer=1))
    options: Any = {"max_new_tokens": 5, "stop_ids": (), **SHAPED}
    wanted = cpu.generate([3], **options)
    torch.use_deterministic_algorithms(True)
    try:
        assert lm.generate([3], **options) == wanted
        logits = torch.arange(9.0, device="cuda")
        assert keep_top_p(logits, 0.1, keep=3).isfinite().sum() == 3  # as a beam needs them
    finally:
        torch.use_deterministic_algorithms(False)
    assert not counted.counts["capture"]


def test_copies_and_pickles(counted: Any) -> None:
    lm = LanguageModel(small(n_layer=1).to("cuda"))
    lm.generate([3], max_new_tokens=3, stop_ids=())
    assert len(lm.graphs.idle) == 1
    assert not copy.deepcopy(lm.graphs).idle and not pickle.loads(pickle.dumps(lm.graphs)).idle


def test_masks_of_a_model_that_was_moved(counted: Any) -> None:
    """`.to` gives each block a mask of its own, for which the bound step, and so every graph, was refused."""
    lm = LanguageModel(small().to("cuda"))
    assert lm.model.h[0].attn.mask is not lm.model.h[1].attn.mask
    lm.generate([3], max_new_tokens=3, stop_ids=())
    assert counted.counts["capture"] == 1


def test_a_default_device(cuda: Any) -> None:
    lm = LanguageModel(small(n_layer=1).to("cuda"))
    torch.set_default_device("cuda")
    try:
        assert lm.attention([3, 4, 5]).is_cpu
        lm.generate([3], max_new_tokens=4, stop_ids=(), **SHAPED, logprobs=1, logit_bias={3: 1.0}, min_new_tokens=2)
    finally:
        torch.set_default_device(None)


def test_turing(counted: Any) -> None:
    counted.capability = (7, 5)
    with pytest.warns(UserWarning, match="no fast bfloat16.*float16"):
        find_dtype("bfloat16", torch.device("cuda:0"))


def test_a_full_cache_is_left_as_it_is(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths were off by one after a replay that raised."""
    lm = LanguageModel(small(n_layer=1).to("cuda"))
    wanted = lm.generate([3], max_new_tokens=6, stop_ids=())
    replay, calls = cuda_graph.torch.cuda.CUDAGraph.replay, []

    def fails(self: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("replay failed")
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", fails)
    with pytest.warns(UserWarning, match="replay failed"):
        assert lm.generate([3], max_new_tokens=6, stop_ids=()) == wanted
