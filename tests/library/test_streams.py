"""Streams: what came so far, closing from anywhere, deadlines, and many prompts at once in one loop."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny import from_hf, hf_model

import minigpt
from minigpt import GPT2, Completion, Failure, GPT2Config, LanguageModel, SamplingParams, Step, Stream


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(from_hf(hf_model()))


LONG = SamplingParams(max_new_tokens=30, stop_ids=())


def test_a_stream_says_what_came_so_far(lm: LanguageModel) -> None:
    whole = lm.generate([3, 4], LONG)
    with lm.stream([3, 4], LONG) as stream:
        assert stream.completion == Completion("", [], [3, 4], None, None, None)
        steps = [next(stream) for _ in range(4)]
        assert stream.completion.ids == [step.id for step in steps] == whole.ids[:4]
        assert stream.completion.finish_reason is None
        assert [*steps, *stream] and stream.completion == whole
    assert list(stream) == [] and stream.completion == whole


def test_a_closed_stream_ends_and_frees_its_cache(lm: LanguageModel) -> None:
    stream = lm.stream([3], LONG)
    next(stream)
    cache = weakref.ref(stream._drawn.gi_frame.f_locals["batch"].cache)
    stream.close()
    assert cache() is None and list(stream) == [] and len(stream.completion.ids) == 1
    stream.close()  # twice is once
    lm.stream([3], LONG).close()  # before the first step


def test_a_dropped_stream_closes_itself(lm: LanguageModel) -> None:
    stream: Stream | None = lm.stream([3], LONG)
    assert stream is not None
    next(stream)
    batch = weakref.ref(stream._drawn.gi_frame.f_locals["batch"])
    del stream
    gc.collect()
    assert batch() is None


def test_a_stream_is_closed_from_another_thread(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the first thread is in the middle of a step: it ends with that step."""
    inside, go_on = threading.Event(), threading.Event()
    stream = lm.stream([3], LONG)
    next(stream)
    hidden = lm.model.hidden
    steps = type(stream._drawn.gi_frame.f_locals["batch"].steps)
    feed = steps.feed

    def slow(self: object, *args: object) -> object:
        inside.set()
        assert go_on.wait(20)
        return feed(self, *args)

    monkeypatch.setattr(steps, "feed", slow)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        assert inside.wait(20)
        stream.close()
        go_on.set()
        assert rest.result(20) == []
    assert lm.model.hidden == hidden and len(stream.completion.ids) == 1


def test_an_error_keeps_what_came_before_it(lm: LanguageModel) -> None:
    barred = SamplingParams(max_new_tokens=9, suppress_tokens=range(3, 64), no_repeat_ngram_size=1, stop_ids=())
    stream = lm.stream([3], barred)
    with pytest.raises(minigpt.MiniGPTError, match="no token is left"):
        list(stream)
    assert len(stream.completion.ids) == 3 and stream.completion.finish_reason == "error"


def test_a_deadline_ends_after_at_least_one_token(lm: LanguageModel) -> None:
    for done in (
        lm.generate([3], max_new_tokens=20, stop_ids=(), max_seconds=0),
        *lm.generate_many([[3], [4]], max_new_tokens=20, stop_ids=(), max_seconds=0),
        *lm.generate_each([([3], SamplingParams(max_seconds=0, stop_ids=()))]),
    ):
        assert isinstance(done, Completion) and len(done.ids) == 1 and done.finish_reason == "time"
    assert lm.generate([3], max_new_tokens=1, stop_ids=(), max_seconds=0).finish_reason == "length"  # it comes earlier
    assert len(lm.generate([3], max_new_tokens=20, stop_ids=(), max_seconds=1000).ids) == 20


def test_many_streams_give_what_each_prompt_gives_alone(lm: LanguageModel) -> None:
    prompts = [[3], [4, 5], [6, 7, 8], [9], [10, 11]]
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, stop_ids=())
    found: dict[int, list[int]] = {}
    order = []
    for row, step in lm.stream_many(prompts, params, batch_size=3):
        assert isinstance(step, Step)
        found.setdefault(row, []).append(step.id)
        order.append(row)
    assert found == {row: lm.generate(prompt, params).ids for row, prompt in enumerate(prompts)}
    assert order[:6] == [0, 1, 2, 0, 1, 2]  # as they are drawn, not one after the other


def test_many_streams_take_tasks_failures_samples_and_nothing_yet(lm: LanguageModel) -> None:
    def tasks() -> Iterator[object]:
        yield [3]
        yield None
        yield [999]  # outside the vocabulary
        yield [4], SamplingParams(max_new_tokens=2, samples=2, temperature=1.0, seed=1, stop_ids=())
        yield None
        yield Failure(ValueError("mine"))

    found: dict[int, list[Step | Failure]] = {}
    for row, step in lm.stream_many(tasks(), max_new_tokens=3, stop_ids=()):  # type: ignore[arg-type]
        found.setdefault(row, []).append(step)
    assert [len(found[row]) for row in range(5)] == [3, 1, 2, 2, 1]
    assert isinstance(found[1][0], Failure) and "999" in str(found[1][0].error) and not found[1][0].started
    assert isinstance(found[4][0], Failure) and str(found[4][0].error) == "mine"


def test_one_of_many_streams_is_closed_and_its_slot_is_free(lm: LanguageModel) -> None:
    streams = lm.stream_many([[3], [4], [5]], LONG, batch_size=2)
    rows = [next(streams)[0] for _ in range(4)]
    assert rows == [0, 1, 0, 1]
    streams.close(0)
    rest = [row for row, _ in streams]
    assert rest.count(0) == 0 and rest[:3] == [2, 1, 2] and rest.count(1) == 28 and rest.count(2) == 30
    early = lm.stream_many([[3], [4], [5]], LONG, batch_size=1)
    early.close(1)  # before it was read: it costs no step
    assert [row for row, _ in early] == [0] * 30 + [2] * 30
    closed = lm.stream_many([[3], [4]], LONG)
    next(closed)
    closed.close()
    assert list(closed) == []


def nan_model() -> LanguageModel:
    """Token 5 has NaN for its embedding; the head is another tensor."""
    config = GPT2Config(vocab_size=20, n_positions=64, n_embd=16, n_head=2, n_layer=2, tie_word_embeddings=False,
                        initializer_range=0.5, bos_token_id=0, eos_token_id=None)  # fmt: skip
    model = GPT2(config)
    with torch.no_grad():
        model.wte.weight[5] = float("nan")
    return LanguageModel(model)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_row_that_fails_leaves_no_nan_for_the_next_in_its_slot(batch_size: int) -> None:
    lm = nan_model()
    bar = {"suppress_tokens": (5,)}
    tasks = [([5] * 40, SamplingParams(max_new_tokens=20, **bar)), ([7], SamplingParams(max_new_tokens=30, **bar)),
             ([11, 12], SamplingParams(max_new_tokens=30, **bar))]  # fmt: skip
    bad, *good = lm.generate_each(tasks, batch_size=batch_size)
    assert isinstance(bad, Failure) and "not finite: wte.weight" in str(bad.error)
    assert good == [lm.generate(prompt, params) for prompt, params in tasks[1:]]


def test_options_without_effect_are_said(lm: LanguageModel) -> None:
    with pytest.warns(UserWarning, match="top_k, seed have no effect at temperature 0"):
        lm.generate([3], top_k=5, seed=1, max_new_tokens=1)
    with pytest.warns(UserWarning, match="samples has no effect"):
        lm.generate([3], samples=2, max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate([3], SamplingParams(top_k=5), temperature=1.0, max_new_tokens=1)
        lm.generate([3], max_new_tokens=1)


def test_prompts_in_other_clothes(lm: LanguageModel) -> None:
    numpy = pytest.importorskip("numpy")
    wanted = lm.generate([3, 4, 5], max_new_tokens=4)
    for prompt in (torch.tensor([3, 4, 5]), numpy.array([3, 4, 5]), (3, 4, 5)):
        assert lm.generate(prompt, max_new_tokens=4) == wanted
        assert lm.stream(prompt, max_new_tokens=4).completion.prompt_ids == [3, 4, 5]
        assert lm.score(prompt) == lm.score([3, 4, 5])
    assert lm.generate(torch.tensor([[3, 4], [5, 6]]), max_new_tokens=2) == lm.generate(
        [[3, 4], [5, 6]], max_new_tokens=2
    )
    for wrong in (torch.tensor([0.5]), torch.tensor(3), b"abc", {3: 4}):
        with pytest.raises(minigpt.PromptError):
            lm.generate(wrong)


def test_a_model_says_what_it_is(lm: LanguageModel) -> None:
    assert repr(lm) == "LanguageModel(0.0M parameters, cpu, float32, tokenizer: none)"
    assert "12.4M parameters, cpu, float32" in repr(minigpt.load("demo", device="cpu"))


def test_ablated_calls_follow_the_model() -> None:
    """Weights, layers and hooks that come and go after the first ablated call."""
    lm = LanguageModel(from_hf(hf_model()).requires_grad_(False))
    params = SamplingParams(max_new_tokens=8, stop_ids=())
    first = lm.generate([3], params, ablate=["0.1"])
    assert lm.without(["0.1"]) is lm.without(["0.1", "0.1"]) and lm.without([]) is lm
    handle = lm.model.h[0].mlp.register_forward_hook(lambda module, args, out: out * 3)
    hooked = lm.generate([3], params, ablate=["0.1"])
    handle.remove()
    assert lm.generate([3], params, ablate=["0.1"]) == first != hooked
    with torch.no_grad():
        lm.model.h[0].attn.c_proj.weight[:, :6].mul_(-1)  # head 0
    moved = lm.generate([3], params, ablate=["0.1"])
    assert moved == lm.without(["0.1"]).generate([3], params) != first
    lm.model.h[1] = from_hf(hf_model(seed=5)).h[1]
    assert lm.generate([3], params, ablate=["0.1"]) != moved


def test_ablated_calls_follow_an_optimizer_that_counts_nothing() -> None:
    """A fused step leaves the versions of the weights as they are."""
    lm = LanguageModel(from_hf(hf_model()).requires_grad_(True))
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=0.1, fused=True)
    before = lm.score([3, 4, 5, 6], ablate=["0.1"])
    lm.model(torch.tensor([[3, 4, 5, 6]])).logsumexp(-1).sum().backward()
    optimizer.step()
    after = lm.score([3, 4, 5, 6], ablate=["0.1"])
    fresh = LanguageModel(copy.deepcopy(lm.model)).score([3, 4, 5, 6], ablate=["0.1"])
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)  # measured: 0, on two threads
    assert after.logprobs != pytest.approx(before.logprobs, abs=0.1)


def test_save_and_load_say_what_they_take(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"not GPT2LMHeadModel: those of transformers have save_pretrained\(folder\)"):
        minigpt.save(hf_model(), tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a name or a folder, not a GPT2LMHeadModel"):
        minigpt.load(hf_model())  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_after_use_works_with_one_thread() -> None:
    """With more threads OpenMP hangs in the child, as scripts/README.md says. In a process of its own."""
    code = (
        "import os, sys, torch, minigpt; torch.set_num_threads(1); lm = minigpt.load('demo', device='cpu');"
        "wanted = lm.generate('Once', max_new_tokens=4).ids; child = os.fork();"
        "same = lm.generate('Once', max_new_tokens=4).ids == wanted;"
        "child or os._exit(0 if same else 3);"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if same else 4)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
