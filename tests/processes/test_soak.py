"""Thousands of calls in one process: memory, file handles, threads and results are at the end as at the beginning.

A short version by default; the whole one, 10,000 calls and 100,000 streamed tokens, with --soak.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import gpt2_folder

import minigpt
from minigpt import LanguageModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads memory and handles from /proc"),
]
WORDS = ["The", "cat", "sat", "on", "the", "mat,", "café", "🙂", "and", "1,024", "other", "things.\n"]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    lm = minigpt.load(gpt2_folder(tmp_path_factory.mktemp("model") / "tiny"), device="cpu")
    for rows in range(1, 513):  # oneDNN keeps code for each number of rows (linear.py): had now, it is no growth later
        states = lm.model.hidden(torch.zeros(rows, 1, dtype=torch.long))
        if rows <= 64:
            lm.model.head(states)
    return lm


def options(draw: random.Random) -> dict[str, Any]:
    """Decoding options of every kind."""
    return {
        "max_new_tokens": draw.choice([0, 1, 2, 3, 5, 8, 20]),
        "temperature": draw.choice([0.0, 0.0, 0.7, 1.0, 3.0]),
        "top_k": draw.choice([0, 0, 5, 40]),
        "top_p": draw.choice([1.0, 1.0, 0.9]),
        "min_p": draw.choice([0.0, 0.0, 0.05]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.2]),
        "no_repeat_ngram_size": draw.choice([0, 0, 2]),
        "logit_bias": draw.choice([{}, {}, {50256: 4.0, 13: 2.0}]),
        "stop": draw.choice([(), (), ("e",), ("the end", ".\n")]),
        "logprobs": draw.choice([None, None, 0, 3]),
        "overflow": draw.choice(["stop", "slide"]),
        "samples": draw.choice([1, 1, 1, 2, 5]),
        "seed": draw.randrange(2**32),
    }


def call(lm: LanguageModel, number: int) -> Any:
    """One call of a mixed lot, the same for the same number: the result, to be compared."""
    draw = random.Random(number)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.choice([0, 1, 3, 10, 20])))

    kind = draw.choice(["one"] * 6 + ["many", "ids", "stream", "abandoned", "score", "attention", "refused"])
    if kind == "one":
        return lm.generate(text(), **options(draw))
    if kind == "many":
        prompts = [text() for _ in range(draw.choice([1, 3, 12]))]
        return list(lm.generate_many(prompts, batch_size=draw.choice([1, 4, 8]), **options(draw)))
    if kind == "ids":
        return lm.generate(draw.choices(range(50257), k=draw.choice([1, 30, 64])), ablate=["0.1"], **options(draw))
    if kind == "score":
        return lm.score(text() + " a b", bos=True, stride=draw.choice([None, 16]))
    if kind == "attention":
        return lm.attention(text() + " a b").tolist()
    if kind == "refused":
        with pytest.raises(minigpt.PromptError, match="context is 64"):
            lm.generate(["a", "x " * 70], max_new_tokens=5)
        return None
    stream = lm.stream(text(), **{**options(draw), "samples": 1})
    return [step for step, _ in zip(stream, range(2 if kind == "abandoned" else 99), strict=False)]


def memory() -> float:
    """This process's memory in MB. Garbage is collected, and what the allocator keeps for later handed back: what stays
    is held by somebody."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)
    return resident()


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def handles() -> tuple[list[str], int, int]:
    """The open files, the threads of Python and those of the system."""
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = sorted(os.readlink(name) for name in files if os.path.lexists(name))
    return links, threading.active_count(), len(os.listdir("/proc/self/task"))


def check(work: Callable[[int], Any], count: int, first: int) -> None:
    """Do the work `count` times; what it gives for the `first` numbers at the beginning, it must give at the end."""
    warm = count // 10
    beginning = [work(number) for number in range(first)]
    for number in range(first, warm):
        work(number)
    before, at_first, seen = handles(), memory(), []
    for number in range(warm, count):
        work(number)
        if number % max(count // 10, 1) == 0:
            seen.append(f"{resident():.1f}")
    after, peak = handles(), resident()
    assert [work(number) for number in range(first)] == beginning
    grown = memory() - at_first
    print(f"{count}: {at_first:.1f} MB after {warm}, {peak:.1f} at the end, {grown:+.2f} MB held; on the way {seen}")
    assert after == before
    assert grown < 5


def test_thousands_of_calls_of_all_kinds_leave_nothing_behind(lm: LanguageModel, soak: bool) -> None:
    check(lambda number: call(lm, number), 10_000 if soak else 300, 30)


def test_many_streamed_tokens_leave_nothing_behind(lm: LanguageModel, soak: bool) -> None:
    def stream(number: int) -> list[Any]:
        sampled = {"temperature": 1.0, "seed": number, "overflow": "slide", "stop_ids": (), "logprobs": 1}
        return list(lm.stream(WORDS[number % len(WORDS)], max_new_tokens=100, **sampled))

    assert len(stream(0)) == 100
    check(stream, 1_000 if soak else 20, 2)


def test_one_long_stream_holds_no_more_than_its_own_tokens(lm: LanguageModel, soak: bool) -> None:
    """A token's Step, with its log-probability and text, is about 0.5 kB, kept for the Completion."""
    count, sizes = 20_000 if soak else 1_500, []
    for number, _ in enumerate(lm.stream("The", max_new_tokens=count, overflow="slide", stop_ids=(), logprobs=0)):
        if number in (count // 10, count - 1):
            sizes.append(memory())
    print(f"{count} tokens: {sizes[0]:.1f} MB after a tenth, {sizes[1]:.1f} at the end")
    assert sizes[1] - sizes[0] < count * 1000 / 1e6 + 5


def test_threads_with_one_model_give_the_solo_results(lm: LanguageModel, soak: bool) -> None:
    numbers = range(400 if soak else 30)
    solo = [call(lm, number) for number in numbers]
    found: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda k=k: found.update({k: [call(lm, number) for number in numbers]}))
        for k in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: solo, 1: solo}
