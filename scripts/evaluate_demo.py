"""What the demo model must show, measured: python scripts/evaluate_demo.py stories.txt [-m demo]

The text is the one that the model was trained on, held-out documents included. Prints each figure with what is asked of
it, then 20 samples with their seeds, for a reader to judge. Exit code 1 if a figure is not reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from train_demo import END, read, validation_loss

import minigpt
from minigpt import MiniGPTError

OPENINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "Once upon a time, there was a little boy named Tim.",
    "Once upon a time, there was a big dog named Max.",
    "Once upon a time, there was a small cat named Kitty.",
    "Once upon a time, there was a little bird named Blue.",
    "Once upon a time, there was a boy named Tom who loved his red ball.",
    "One day, Lily found a shiny box in the garden.",
    "One day, a girl named Sue went to the park with her mom.",
    "Once upon a time, there was a big bear in the forest.",
    "Once upon a time, there was a little bunny named Ben.",
)
STORY = {"max_new_tokens": 45, "temperature": 0.2, "top_k": 40, "repetition_penalty": 1.03}


def loops(ids: Sequence[int], size: int = 8) -> bool:
    """Whether the same `size` tokens occur twice."""
    spans = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    return len(set(spans)) < len(spans)


def longest_shared(samples: Sequence[Sequence[int]], training: Sequence[Sequence[int]]) -> list[int]:
    """The longest run of tokens that a sample has in common with the training text."""
    text = "".join(map(chr, (id for ids in training for id in (END, *ids))))  # one character per token: search is fast
    longest = ""
    for sample in ("".join(map(chr, ids)) for ids in samples):
        for start in range(len(sample)):
            while (end := start + len(longest) + 1) <= len(sample) and sample[start:end] in text:
                longest = sample[start:end]
    return [ord(character) for character in longest]


def evaluate(model: str, text: Path) -> bool:
    lm = minigpt.load(model, device="cpu")
    training, validation = read([text], lm.config.n_positions)
    passed = []

    def check(name: str, value: object, asked: str, good: bool) -> None:
        passed.append(good)
        print(f"{name}: {value} (asked: {asked}) {'ok' if good else 'NOT REACHED'}", flush=True)

    loss = validation_loss(lm.model, validation)
    check(f"nats per token over {len(validation)} held-out documents", f"{loss:.4f}", "at most 2.50", loss <= 2.5)

    known = {END}.union(*training, *validation)
    drawn = [
        completion.ids
        for seed, opening in enumerate(OPENINGS * 10)
        for completion in [lm.generate(opening, max_new_tokens=100, temperature=0.8, top_k=40, seed=seed, stop_ids=())]
    ]
    strange = sum(id not in known for ids in drawn for id in ids)
    check("tokens outside the text's, in 100 samples of 100 tokens", strange, "0", strange == 0)

    free = sum(not loops(completion.ids) for completion in lm.generate(OPENINGS, max_new_tokens=60))
    check("greedy continuations of 60 tokens without a loop, of 10", free, "at least 5", free >= 5)

    cases = [(opening, seed) for opening in OPENINGS for seed in (1, 2)]
    samples = [lm.generate(opening, seed=seed, **STORY) for opening, seed in cases]
    shared = longest_shared([sample.ids for sample in samples], training)
    quoted = repr(lm.tokenizer.decode(shared))
    print(f"longest span that the 20 samples below share with the training text: {len(shared)} tokens, {quoted}")

    for number, ((opening, seed), sample) in enumerate(zip(cases, samples, strict=True), 1):
        print(f"\n--- {number}. seed {seed}; {', '.join(f'{name} {value}' for name, value in STORY.items())}")
        print(opening + sample.text)
    return all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, metavar="TEXT", help="the text that the model was trained on")
    parser.add_argument("-m", "--model", default="demo", help="what to evaluate (default: the bundled model)")
    options = parser.parse_args()
    try:
        return 0 if evaluate(options.model, options.text) else 1
    except MiniGPTError as error:
        print(f"evaluate_demo.py: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
