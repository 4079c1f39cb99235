"""What drafts gain: the same tokens with draft "off" and others, in turns, and how many of them one pass gives.

    python scripts/bench_drafts.py [-m demo] [--drafts lookup int8] [--tokens 200] [--rounds 5] [--transformers]

Five kinds of text: greedy, which soon goes round in circles; a loop, which greedy decoding has gone round for a while;
temperature 0.4 and 1; and random ids to go on from, where nothing comes twice. A ratio is the median over rounds of
off's time by the draft's. --transformers also measures its prompt look-up (prompt_lookup_num_tokens) and what that
gains over transformers alone. `-m 124M` is GPT-2 small's layout with random weights, whose matrices in int8 agree with
float32 as often as the tokens a pass show.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel, SamplingParams
from minigpt.files.locate import locate

LOOP = 120  # tokens, after which greedy text repeats itself
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, in a loop": {},
    "temperature 0.4": {"temperature": 0.4, "seed": 1},
    "temperature 1": {"temperature": 1.0, "seed": 1},
    "greedy, from random ids": {},
}


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def prompts(kind: str, lm: LanguageModel) -> list[list[int]]:
    rng = random.Random(kind)
    if "random" in kind or lm.limits.tokenizer is None:
        return [[rng.randrange(lm.limits.vocab_size) for _ in range(16)] for _ in range(3)]
    given = [lm.encode(text) for text in ("Once upon a time", "One day, a little bird", "The king said")]
    options = {"max_new_tokens": LOOP, "stop_ids": ()} if "loop" in kind else {"max_new_tokens": 0}
    return [ids + lm.generate(ids, **options).ids for ids in given]


def measure(lms: dict[str, LanguageModel], tokens: int, rounds: int) -> None:
    for kind, options in KINDS.items():
        params = SamplingParams(max_new_tokens=tokens, stop_ids=(), **options)
        took: dict[str, list[float]] = {name: [] for name in lms}
        given, ids = prompts(kind, lms["off"]), dict[str, list[list[int]]]()
        passes: dict[str, int] = {}
        for turn in range(rounds + 1):  # the first is not counted: weights are packed in it
            for name, lm in lms.items():
                each = list[minigpt.Completion]()
                took[name].append(seconds(lambda: each.extend(lm.generate(one, params) for one in given)))  # noqa: B023
                ids[name], passes[name] = [one.ids for one in each], sum(one.passes for one in each)
            if not turn:
                took = {name: [] for name in lms}
        drawn = sum(map(len, ids["off"]))
        print(f"{kind}: off {drawn / statistics.median(took['off']):.1f} tokens/s", flush=True)
        for name in lms.keys() - {"off"}:
            gain = statistics.median(off / mine for off, mine in zip(took["off"], took[name], strict=True))
            same = "the same ids" if ids[name] == ids["off"] else "ids that part at a near tie"
            print(f"    {name}: {gain:.2f} x, {drawn / passes[name]:.2f} tokens a pass, {same}", flush=True)


def measure_transformers(folder: Path, lm: LanguageModel, tokens: int, rounds: int) -> None:
    from transformers import GPT2LMHeadModel

    model: Any = GPT2LMHeadModel.from_pretrained(folder).eval()
    for kind in ("greedy", "greedy, from random ids"):
        took: dict[str, list[float]] = {"alone": [], "look-up": []}
        for _ in range(rounds):
            for name, more in (("alone", {}), ("look-up", {"prompt_lookup_num_tokens": 10})):
                fixed = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
                given = [torch.tensor([ids]) for ids in prompts(kind, lm)]
                run = lambda: [model.generate(one, **fixed, **more) for one in given]  # noqa: B023, E731
                took[name].append(seconds(run))
        gain = statistics.median(a / b for a, b in zip(took["alone"], took["look-up"], strict=True))
        rate = 3 * tokens / statistics.median(took["look-up"])
        print(f"{kind}: transformers' look-up {gain:.2f} x, {rate:.1f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--drafts", nargs="+", default=["lookup", "int8"])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=minigpt.usable_cpus())
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with TemporaryDirectory() as folder:
        if args.model == "124M":
            torch.manual_seed(0)
            minigpt.save(GPT2(GPT2Config()), folder)
            args.model = folder
        lms = {name: minigpt.load(args.model, draft=name, device="cpu") for name in ["off", *args.drafts]}
        torch.set_grad_enabled(False)
        measure(lms, args.tokens, args.rounds)
        if args.transformers:
            measure_transformers(locate(args.model), lms["off"], args.tokens, args.rounds)


if __name__ == "__main__":
    main()
