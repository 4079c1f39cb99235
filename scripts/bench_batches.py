"""What continuous batching gains: 64 prompts whose continuations are 1 to 256 tokens long, 8 at a time.

Compares generate_many, where a row that ends makes room for the next prompt, with batches that keep their finished rows
until the longest is done. Both count only the tokens that were asked for, and take turns, so that only the ratio of the
two matters. On a busy machine, --threads 1 and the ratio of the processor's time, given in brackets, say more. GPT-2
small's layout, random weights.

    python scripts/bench_batches.py [--draws 5] [--prompts 64] [--batch-size 8] [--longest 256] [--threads N]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from minigpt import GPT2, GPT2Config, LanguageModel, SamplingParams


def refilled(lm: LanguageModel, prompts: list[list[int]], lengths: list[int], batch_size: int) -> None:
    """Continuous batching: what minigpt does."""
    params = [SamplingParams(max_new_tokens=length, stop_ids=()) for length in lengths]
    assert [len(done.ids) for done in lm.generate_many(prompts, params, batch_size=batch_size)] == lengths


def kept(lm: LanguageModel, prompts: list[list[int]], lengths: list[int], batch_size: int) -> None:
    """Fixed batches: every row goes on until the longest of its batch is done."""
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        params = SamplingParams(max_new_tokens=max(lengths[part]), stop_ids=())
        list(lm.generate_many(prompts[part], params, batch_size=batch_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("draws", 5), ("prompts", 64), ("batch-size", 8), ("longest", 256), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    lm = LanguageModel(GPT2(GPT2Config(n_layer=args.layers)).to(args.device))
    ratios = []
    for draw in range(args.draws):
        rng = random.Random(draw)
        prompts = [[rng.randrange(50256) for _ in range(rng.randint(1, 32))] for _ in range(args.prompts)]
        lengths = [rng.randint(1, args.longest) for _ in prompts]
        seconds, processor = [], []
        for run in (refilled, kept):
            started, busy = time.perf_counter(), time.process_time()
            run(lm, prompts, lengths, args.batch_size)
            seconds.append(time.perf_counter() - started)
            processor.append(time.process_time() - busy)
        ratios.append((seconds[1] / seconds[0], processor[1] / processor[0]))
        rates = [sum(lengths) / each for each in seconds]
        shown = "{:.2f} x ({:.2f} x)".format(*ratios[-1])
        print(f"{draw}: {rates[0]:.1f} tokens/s refilled, {rates[1]:.1f} kept, {shown}", flush=True)
    print("median {:.2f} x ({:.2f} x)".format(*map(statistics.median, zip(*ratios, strict=True))))


if __name__ == "__main__":
    main()
