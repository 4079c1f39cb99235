"""TODO."""

from __future__ import annotations

import argparse
import math
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from minigpt.checks import integer
from minigpt.cli.machine import Progress
from minigpt.errors import PromptError

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel
    from minigpt.scoring import Score
from minigpt.cli.machine import _load, _on_signal, _print_json, _raise_stopped
from minigpt.cli.prompt import _parse_ids, _prompt
from minigpt.cli.tokenize import _shown


def run(args: argparse.Namespace) -> None:
    text = _prompt(args)
    given = _parse_ids(text) if args.ids else None
    if args.stride is not None:
        integer("--stride", args.stride, 1)
    lm = _load(args)

    from minigpt import scoring
    from minigpt.decoding.sequence import encode

    stride, size = args.stride, lm.config.n_positions
    if stride is not None:
        integer("--stride", stride, 1, size)
    if given is None and lm.tokenizer is not None:
        ids: Sequence[int] = lm.tokenizer.encode_long(text, special=args.special)
    else:
        ids = encode(lm, text if given is None else given)
    if args.bos:
        ids = array("i", [lm.bos_id(), *ids])
    if len(ids) < 2:
        raise PromptError("there is nothing to score: that takes two tokens, or one and --bos")
    if stride is None and len(ids) > size:
        raise PromptError(
            f"the text has {len(ids)} tokens, but the model's context is {size}: add --stride {size // 2}"
        )
    keep = args.json or stride is None
    with _on_signal(_raise_stopped), Progress(len(ids), "tokens") if len(ids) > size else nullcontext() as bar:

        def show(done: int) -> None:
            if bar:
                bar.update(done, done)

        score = scoring.evaluate(lm.model, lm.tokenizer, ids, stride, keep=keep, progress=show)
    if args.json:
        figures = asdict(score)
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                figures[name] = None  # JSON has no NaN and no infinity
        _print_json({**figures, "model": args.model, "stride": stride})
    else:
        _print_score(lm, ids, score, tokens=stride is None)


def _print_score(lm: LanguageModel, ids: Sequence[int], score: Score, tokens: bool) -> None:
    """The tokens, one a line with the log-probability, if wanted; then the figures."""
    if tokens:
        for id, logprob in zip(ids, [None, *score.logprobs], strict=True):
            shown = f"\t{_shown(lm.tokenizer, id)}" if lm.tokenizer else ""
            print(f"{id}\t{'-' if logprob is None else format(logprob, '.4f')}{shown}")
        print()
    print(f"tokens         {len(ids)}\ntotal          {score.total:.4f}\nmean           {score.mean:.6f}")
    print(f"perplexity     {score.perplexity:.6g}")
    if score.bits_per_byte is not None:
        print(f"bits per byte  {score.bits_per_byte:.6f}")
