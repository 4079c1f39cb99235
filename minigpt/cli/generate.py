"""`minigpt generate`: continue one prompt, as it is drawn, or those of a file."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from typing import TYPE_CHECKING

from minigpt.checks import integer
from minigpt.cli.machine import load, progress, say, say_machine, say_rate
from minigpt.cli.prompt import given_options, note_context, note_defaults, note_special, read_prompt
from minigpt.decoding.params import SamplingParams
from minigpt.errors import MiniGPTError
from minigpt.jobs import Job, as_record, records
from minigpt.lines import Input

if TYPE_CHECKING:
    from minigpt.decoding.sequence import Completion
    from minigpt.language_model import LanguageModel


def run(args: argparse.Namespace) -> None:
    if args.input is not None:
        _run_job(args)
        return
    for name in ("output", "batch_size", "resume"):
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} needs --input")
    options = given_options(args)
    params = SamplingParams(**options)  # a bad one is refused before the model is loaded
    prompt = read_prompt(args)
    lm = load(args).without(args.ablate)
    if args.use_model_defaults:
        params = lm.defaults.over(options)
    else:
        note_defaults(lm, options)
    alone = params.samples == params.num_beams == 1 and not args.json
    before = prompt if isinstance(prompt, str) else "".join(f"{id} " for id in prompt)
    completions = (_stream if alone else _one_by_one)(args, lm, prompt, params, before * args.echo)
    if args.stats:
        if seeds := [str(completion.seed) for completion in completions if completion.seed is not None]:
            say(f"seed: {', '.join(seeds)}")
        if passes := sum(completion.passes for completion in completions):
            drawn = sum(len(completion.ids) - 1 for completion in completions)
            say(f"draft: {args.draft}, {drawn / passes:.2f} tokens per pass of the model")
        say("finish reason: " + ", ".join(completion.finish_reason or "none" for completion in completions))
        say_machine(args, lm)
    note_special(lm.limits.tokenizer, prompt, completions[0].prompt_ids)
    for completion in completions:
        note_context(lm, completion.finish_reason)


def _stream(
    args: argparse.Namespace, lm: LanguageModel, prompt: str | list[int], params: SamplingParams, before: str
) -> list[Completion]:
    """Print one completion as it is drawn."""
    started = first = time.perf_counter()
    count = 0
    with lm.stream(prompt, params, special=args.special) as stream:
        try:
            print(before, end="", flush=True)
            for count, step in enumerate(stream, 1):
                first = time.perf_counter() if count == 1 else first
                print(" " * (count > 1) + str(step.id) if args.ids else step.text, end="", flush=True)
        except (KeyboardInterrupt, MiniGPTError):
            if count or args.echo:
                print(flush=True)  # end the line that was cut short
            raise
    done = stream.completion
    print(flush=True)
    _print_logprobs(lm, done)
    if args.stats:
        say_rate("prompt", len(done.prompt_ids), first - started)
        say_rate("generation", max(count - 1, 0), time.perf_counter() - first)
    return [done]


def _one_by_one(
    args: argparse.Namespace, lm: LanguageModel, prompt: str | list[int], params: SamplingParams, before: str
) -> list[Completion]:
    """Print each completion, or its record, as soon as it is done."""
    started = time.perf_counter()
    completions: list[Completion] = []
    for sample, completion in enumerate(lm.generate_many([prompt], params, special=args.special)):
        completions.append(completion)
        if args.json:
            record = as_record(0, sample, prompt, completion, args.model)
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


def _run_job(args: argparse.Namespace) -> None:
    """`generate --input`: a record for each completion, to --output or standard output."""
    if (args.text, args.prompt, args.file) != (None, None, None):
        raise ValueError("the prompt is given twice: --input FILE holds the prompts")
    for name in ("ids", "echo", "ablate"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for one prompt, not for --input")
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output")
    size = integer("--batch-size", 8 if args.batch_size is None else args.batch_size, 1, 4096)
    options = given_options(args)
    params = SamplingParams(**options)
    lm = load(args) if args.use_model_defaults else None  # else the files are looked at before the model is loaded
    params = lm.defaults.over(options) if lm else params

    from minigpt.network.device import find_device

    settings = {"model": args.model, "revision": args.revision, "dtype": args.dtype, "special": args.special}
    settings["device"] = find_device(args.device).type  # it decides what sampling draws
    source = Input(args.input)
    job = Job(source, args.output, params, settings, args.resume)
    with closing(job):
        if lm is None:
            note_defaults(lm := load(args), options)
        started, tokens = time.perf_counter(), 0
        with progress(source.count, job.done) as bar:
            for found in records(lm, job.lines, model=args.model, batch_size=size, special=args.special):
                job.write(found)
                for record in found:
                    if args.output is None:
                        print(json.dumps(record), flush=True)
                    note_special(lm.limits.tokenizer, record.get("prompt"), record.get("prompt_ids", ()))
                    note_context(lm, record.get("finish_reason"))
                    tokens += len(record.get("ids", ()))
                speed = tokens / max(time.perf_counter() - started, 1e-9)
                bar.set_postfix_str(f"{speed:,.1f} tokens per second", refresh=False)
                bar.update()
    if args.stats:
        say_rate("generation", tokens, time.perf_counter() - started)
        say_machine(args, lm)
    if job.failed:
        where = args.output or "standard output"
        raise MiniGPTError(f"{job.failed} of {job.count} records are errors: see {where}")
