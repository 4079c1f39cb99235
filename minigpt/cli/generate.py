"""TODO."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from minigpt.cli.machine import note
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.records import as_record

if TYPE_CHECKING:
    from minigpt.decoding.sequence import Completion, Step
    from minigpt.language_model import LanguageModel
from minigpt.cli.jobs import _run_job
from minigpt.cli.machine import _load, _on_signal, _print_json, _print_machine, _print_rate, _raise_stopped, _Stopped
from minigpt.cli.prompt import _echo, _params, _parse_ids, _prompt


def run(args: argparse.Namespace) -> None:
    if args.input is not None:
        _run_job(args)
        return
    for name in ("output", "batch_size", "resume"):
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} needs --input")
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs needs --json")
    params = _params(args)
    text = _prompt(args)
    ids = _parse_ids(text) if args.ids else None
    started = time.perf_counter()
    lm = _load(args)
    if args.verbose:
        size = sum(parameter.numel() for parameter in lm.model.parameters())
        seconds = time.perf_counter() - started
        import torch

        from minigpt.network.linear import describe

        loaded = f"{size:,} parameters on {lm.device}, {lm.dtype}, loaded in {seconds:.2f} s"
        products = describe(lm.model.output)
        note(f"{args.model}: {loaded}, {torch.get_num_threads()} threads, matrix products by {products}")
    if ids is None and lm.tokenizer is not None:
        ids = lm.tokenizer.encode(text, special=args.special)
    prompt = text if ids is None else ids  # text without a tokenizer: the library says what to do
    with _on_signal(_raise_stopped):
        _print_completions(args, lm, text, prompt, params)


def _print_completions(
    args: argparse.Namespace, lm: LanguageModel, text: str, prompt: str | list[int], params: SamplingParams
) -> None:
    """Generate and print: one completion as it is drawn, several or JSON records as each is done."""
    started = time.perf_counter()
    if params.samples == 1 and not args.json:
        _print_stream(args, lm, text, prompt, params, started)
        return
    completions = []
    for sample, completion in enumerate(lm.generate_many([prompt], params, ablate=args.ablate)):
        completions.append(completion)
        if args.json:
            _print_json(as_record(0, sample, None if args.ids else text, completion, args.model))
        else:
            shown = " ".join(map(str, completion.ids)) if args.ids else completion.text
            print("---\n" * (sample > 0) + _echo(args, text) + shown, flush=True)
    if args.stats:
        _print_stats(lm, completions, time.perf_counter() - started)


def _print_stream(
    args: argparse.Namespace,
    lm: LanguageModel,
    text: str,
    prompt: str | list[int],
    params: SamplingParams,
    started: float,
) -> None:
    """Print one completion as it is drawn."""
    steps: list[Step] = []
    stream = lm.stream(prompt, params, ablate=args.ablate)
    first = started
    try:
        print(_echo(args, text), end="", flush=True)
        for step in stream:
            if not steps:
                first = time.perf_counter()
            shown = (" " if steps else "") + str(step.id) if args.ids else step.text
            steps.append(step)
            if shown:
                print(shown, end="", flush=True)
    except (_Stopped, MiniGPTError):
        if steps or args.echo:
            print(flush=True)  # end the line that was cut short
        raise
    print(flush=True)
    if args.stats:
        reason = steps[-1].finish_reason if steps else "length"
        _print_rate("prompt", len(prompt) or 1, first - started)
        _print_rate("generation", len(steps) - 1 if steps else 0, time.perf_counter() - first)
        note(f"seed: {params.seed}\nfinish reason: {reason}")
        _print_machine(lm)


def _print_stats(lm: LanguageModel, completions: list[Completion], seconds: float) -> None:
    _print_rate("generation", sum(len(completion.ids) for completion in completions), seconds)
    note("seed: " + ", ".join(str(completion.seed) for completion in completions))
    note("finish reason: " + ", ".join(completion.finish_reason for completion in completions))
    _print_machine(lm)
