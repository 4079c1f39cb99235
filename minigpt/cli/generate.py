"""`minigpt generate`: continue one prompt, as it is drawn, or those of a file."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from minigpt.cli import jobs
from minigpt.cli.machine import load, note, say, say_machine, say_rate
from minigpt.cli.main import Unwinding
from minigpt.cli.prompt import decoding, options, read_prompt
from minigpt.cli.tokenize import note_special
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.records import as_record

if TYPE_CHECKING:
    from minigpt.decoding.sequence import Completion
    from minigpt.language_model import LanguageModel


def run(args: argparse.Namespace) -> None:
    if args.input is not None:
        jobs.run(args)
        return
    for name in ("output", "batch_size", "resume"):
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} needs --input")
    given = options(args)
    SamplingParams(**given)  # a bad one is refused before the model is loaded
    prompt = read_prompt(args)
    lm = load(args).without(args.ablate)
    params = decoding(lm, given, args.use_model_defaults)
    ids = lm.encode(prompt, special=args.special)
    note_special(lm.limits.tokenizer, prompt, ids)
    before = ""
    if args.echo:
        before = prompt if isinstance(prompt, str) else "".join(f"{id} " for id in prompt)
    with Unwinding():
        if params.samples == params.num_beams == 1 and not args.json:
            completions = [_stream(args, lm, ids, params, before)]
        else:
            completions = _one_by_one(args, lm, prompt, ids, params, before)
    if args.stats:
        seeds = [str(completion.seed) for completion in completions if completion.seed is not None]
        if seeds:
            say(f"seed: {', '.join(seeds)}")
        if passes := sum(completion.passes for completion in completions):
            drawn = sum(len(completion.ids) - 1 for completion in completions)
            say(f"draft: {args.draft}, {drawn / passes:.2f} tokens per pass of the model")
        say("finish reason: " + ", ".join(completion.finish_reason or "none" for completion in completions))
        say_machine(args, lm)
    if any(completion.finish_reason == "context" for completion in completions):
        note(f"the text ends at the context of {lm.config.n_positions} tokens: --overflow slide goes on")


def _stream(
    args: argparse.Namespace, lm: LanguageModel, ids: list[int], params: SamplingParams, before: str
) -> Completion:
    """Print one completion as it is drawn."""
    started = first = time.perf_counter()
    count = 0
    with lm.stream(ids, params) as stream:
        try:
            print(before, end="", flush=True)
            for count, step in enumerate(stream, 1):
                if count == 1:
                    first = time.perf_counter()
                shown = " " * (count > 1) + str(step.id) if args.ids else step.text
                if shown:
                    print(shown, end="", flush=True)
        except (KeyboardInterrupt, MiniGPTError):
            if count or args.echo:
                print(flush=True)  # end the line that was cut short
            raise
    print(flush=True)
    done = stream.completion
    _print_logprobs(lm, done)
    if args.stats:
        say_rate("prompt", len(done.prompt_ids), first - started)
        say_rate("generation", max(count - 1, 0), time.perf_counter() - first)
    return done


def _one_by_one(
    args: argparse.Namespace,
    lm: LanguageModel,
    prompt: str | list[int],
    ids: list[int],
    params: SamplingParams,
    before: str,
) -> list[Completion]:
    """Print each completion, or its record, as soon as it is done."""
    started = time.perf_counter()
    completions: list[Completion] = []
    for sample, completion in enumerate(lm.generate_many([ids], params)):
        completions.append(completion)
        if args.json:
            record = as_record(0, sample, prompt if isinstance(prompt, str) else None, completion, args.model)
            print(json.dumps(record), flush=True)  # ASCII: whatever the terminal's encoding, and no odd line breaks
            continue
        shown = " ".join(map(str, completion.ids)) if args.ids else completion.text
        print("---\n" * (sample > 0) + before + shown, flush=True)
        _print_logprobs(lm, completion)
    if args.stats:
        say_rate("generation", sum(len(one.ids) for one in completions), time.perf_counter() - started)
    return completions


def _print_logprobs(lm: LanguageModel, completion: Completion) -> None:
    """After an empty line, a line a token: id, log-probability and token, then the best ones with theirs."""
    from minigpt.interpret.terminal import label

    for number, entry in enumerate(completion.logprobs or ()):
        best = "".join(f"\t{label(lm.limits.tokenizer, id)} {logprob:.4f}" for id, logprob in entry.top)
        line = f"{entry.id}\t{entry.logprob:.4f}\t{label(lm.limits.tokenizer, entry.id)}{best}"
        print("\n" * (not number) + line, flush=True)
