"""What a weight format costs in quality: loss and greedy tokens against float32, on any model.

    python scripts/compare_formats.py [-m demo] [--text FILE] [--dtypes float16 int8]

The loss is that of the text, cut into pieces of at most the context, or, without --text, of 100 continuations that the
model itself draws in float32. Greedy agreement continues the first 16 tokens of each piece by 64: the share of tokens
that are float32's, up to and without the first that is not, and the share of pieces that stay the same to the end.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import minigpt

PROMPT, NEW = 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--text", type=Path, help="UTF-8; its first 100 pieces are used")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "int8"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    reference = minigpt.load(args.model, device=args.device)
    size = min(reference.config.n_positions, 256)
    if args.text:
        ids = reference.encode(args.text.read_text("utf-8")[: 100 * size * 8])
        pieces = [ids[at : at + size] for at in range(0, min(len(ids), 100 * size), size)]
    else:
        drawn = reference.generate([], max_new_tokens=size - 1, temperature=1.0, samples=100, seed=0)
        pieces = [completion.prompt_ids + completion.ids for completion in drawn]
    pieces = [ids for ids in pieces if len(ids) > PROMPT]

    def measure(lm: minigpt.LanguageModel) -> tuple[float, list[list[int]]]:
        scores = [lm.score(ids) for ids in pieces]
        loss = -math.fsum(score.total for score in scores) / sum(len(score.logprobs) for score in scores)
        prompts = [ids[:PROMPT] for ids in pieces]
        return loss, [done.ids for done in lm.generate_many(prompts, max_new_tokens=NEW, stop_ids=())]

    loss, wanted = measure(reference)
    print(f"{len(pieces)} pieces, {sum(map(len, pieces))} tokens\n")
    print("| dtype | loss, nats per token | change | greedy tokens as float32 | whole continuations |")
    print("|---|---|---|---|---|")
    print(f"| float32 | {loss:.4f} | | | |")
    for dtype in args.dtypes:
        changed, found = measure(minigpt.load(args.model, device=args.device, dtype=dtype))
        agreed = [
            next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(theirs))
            for ours, theirs in zip(found, wanted, strict=True)
        ]
        tokens = sum(agreed) / sum(map(len, wanted))
        whole = sum(ours == theirs for ours, theirs in zip(found, wanted, strict=True)) / len(wanted)
        print(f"| {dtype} | {changed:.4f} | {(changed / loss - 1):+.3%} | {tokens:.1%} | {whole:.0%} |")


if __name__ == "__main__":
    main()
