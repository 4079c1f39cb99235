"""The command line: arguments in, text or JSON lines out. Everything else lives in the library.

Exit codes: 0; 1 a problem with the model, the prompt, a file or the device; 2 usage, or a parameter that is refused;
130 Ctrl-C; 143 SIGTERM. A reader that closes the pipe ends the run quietly.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.arguments import make_parser
from minigpt.config import SamplingParams, integer, well_formed
from minigpt.errors import MiniGPTError, PromptError
from minigpt.progress import Progress, note, one_line
from minigpt.records import as_record

if TYPE_CHECKING:
    from minigpt.generation import LanguageModel
    from minigpt.scoring import Score
    from minigpt.sequence import Completion, Step
    from minigpt.tokenizer import Tokenizer


class _Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived while text was coming: unwinds, so that what was written so far is kept."""


class _Closed(io.TextIOBase):
    """Standard output where the caller closed it: what would be lost is an error."""

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "it is closed", "standard output")
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Usage errors and --help raise SystemExit, as argparse does."""
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:  # closed: print would take standard output for it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" in its place
    args = make_parser().parse_args(argv)
    # Nothing here needs numpy, and PyTorch warns where it is missing.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        with _on_signal(_leave):
            _COMMANDS[args.command](args)
            print(end="", flush=True)
        return 0
    except _Stopped as stopped:
        return 128 + int(stopped.args[0])
    except BrokenPipeError:
        # Python flushes stdout again at exit: give it somewhere to write.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MiniGPTError as error:
        return _fail(1, str(error))
    except ValueError as error:
        return _fail(2, str(error))
    except MemoryError:
        return _fail(1, "out of memory: use a smaller model or a smaller batch")
    except ImportError as error:
        return _fail(1, f"{error}: the installation is broken, or there is too little memory to load it")
    except OSError as error:
        return _fail(1, f"{error.filename or 'output'}: {error.strerror or error}")
    except RuntimeError as error:
        # PyTorch has no class of its own for a failed allocation on the CPU.
        if not re.search("out of memory|allocate memory|not enough memory", str(error)):
            raise
        return _fail(1, "out of memory: use a smaller model or a smaller batch")


def _fail(code: int, message: str) -> int:
    note(f"minigpt: error: {one_line(message)}")
    return code


def _leave(number: int, _: object) -> None:
    """While loading there is nothing to keep; but a download unwinds, so that it removes what has come so far."""
    hub = sys.modules.get("minigpt.hub")
    if hub is not None and hub.downloading:
        raise _Stopped(number)
    os._exit(128 + number)


def _raise_stopped(number: int, _: object) -> None:
    raise _Stopped(number)


@contextmanager
def _on_signal(action: Callable[[int, Any], None]) -> Iterator[None]:
    """Meanwhile, `action` answers SIGINT and SIGTERM (where signals can be handled: in the main thread).

    An exception raised by a handler can get lost in the imports of large libraries, so that is not how loading ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # nohup
    for number in before:
        signal.signal(number, action)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text, from wherever the arguments say; PromptError if it is given twice, or a file is not UTF-8."""
    given = [value for value in (args.text, args.prompt, args.file) if value is not None]
    if len(given) != 1:
        what = "the prompt is given twice" if given else "no prompt"
        raise ValueError(f"{what}: give one of PROMPT, --prompt TEXT, --file FILE, or - for standard input")
    if args.prompt is not None:
        return well_formed(args.prompt)
    if args.file is None and args.text != "-":
        return well_formed(args.text)
    name = "standard input" if args.file in (None, "-") else args.file
    try:
        if name == args.file:
            data = Path(name).read_bytes()
        elif sys.stdin is None:
            raise PromptError("standard input is closed")
        else:
            data = sys.stdin.buffer.read()
    except OSError as error:
        raise PromptError(f"cannot read the prompt from {name or repr(name)}: {error.strerror}") from None
    if data is None:
        raise PromptError("standard input has nothing to read yet, and is not one to wait for (it is non-blocking)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
    text = text.removeprefix("\ufeff")
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _generate(args: argparse.Namespace) -> None:
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

        from minigpt.linear import describe

        loaded = f"{size:,} parameters on {lm.device}, {lm.dtype}, loaded in {seconds:.2f} s"
        products = describe(lm.model.output)
        note(f"{args.model}: {loaded}, {torch.get_num_threads()} threads, matrix products by {products}")
    if ids is None and lm.tokenizer is not None:
        ids = lm.tokenizer.encode(text, special=args.special)
    prompt = text if ids is None else ids  # text without a tokenizer: the library says what to do
    with _on_signal(_raise_stopped):
        _print_completions(args, lm, text, prompt, params)


def _run_job(args: argparse.Namespace) -> None:
    """generate --input: a record for each completion, to --output or standard output."""
    from minigpt import jobs

    if any(value is not None for value in (args.text, args.prompt, args.file)):
        raise ValueError("the prompt is given twice: --input FILE holds the prompts")
    for name in ("ids", "echo", "ablate"):
        if getattr(args, name):
            raise ValueError(f"--{name} is for one prompt, not for --input")
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output")
    if args.batch_size is not None:
        integer("--batch-size", args.batch_size, 1, 4096)
    params = _params(args)

    from minigpt.generation import BATCH_SIZE, find_device

    settings = {"model": args.model, "revision": args.revision, "dtype": args.dtype, "special": args.special}
    settings["device"] = find_device(args.device).type  # it decides what sampling draws
    job = jobs.Job(args.input, args.output, params, settings, resume=args.resume)
    with closing(job.output) as output:
        lm = _load(args)
        started = time.perf_counter()
        with _on_signal(_raise_stopped), Progress(job.total, "lines", output.done) as progress:
            for record in job.records(
                lm, model=args.model, batch_size=args.batch_size or BATCH_SIZE, special=args.special
            ):
                if args.output is None:
                    _print_json(record)
                progress.update(output.done, job.tokens)
            progress.update(output.done, job.tokens)
    if args.stats:
        _print_rate("generation", job.tokens, time.perf_counter() - started)
        _print_machine(lm)
    if output.failed:
        where = args.output or "standard output"
        raise MiniGPTError(f"{output.failed} of {output.count} records are errors: see {where}")


def _load(args: argparse.Namespace) -> LanguageModel:
    """The model that the arguments name. This imports torch, which takes a second: check the arguments before."""
    if args.threads is not None:
        integer("--threads", args.threads, 1, 4096)
    import torch

    from minigpt.generation import load

    torch.set_num_threads(args.threads or _usable_threads())
    return load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        revision=args.revision,
        offline=args.offline,
        progress=True,
    )


def _usable_threads() -> int:
    """PyTorch's own choice, but no more than the container's CPUs."""
    import torch

    return min(torch.get_num_threads(), _container_cpus())


def _container_cpus(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many CPUs the process's container may keep busy: with more threads than that, all of them wait by turns.

    PyTorch knows the affinity of the process, not this limit: cpu.max of cgroup 2, two files of cgroup 1.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((groups / name).read_text() for name in names).split()
            if int(quota) > 0:
                return max(1, int(quota) // int(period))
        except (OSError, ValueError):  # no such file; "max": no limit
            continue
    return os.cpu_count() or 1


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


def _params(args: argparse.Namespace) -> SamplingParams:
    """The decoding options as SamplingParams."""
    if args.seed is None and args.temperature > 0 and args.input is None:
        args.seed = secrets.randbits(32)  # chosen here, so that --stats can name it
    given = {field.name: getattr(args, field.name) for field in fields(SamplingParams) if field.name in args}
    given |= {"logit_bias": dict(args.logit_bias), "stop_ids": () if args.ignore_eos else None}
    return SamplingParams(**given)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        wanted = "with --ids the prompt is token ids separated by spaces or commas"
        raise PromptError(f"{wanted}, not {text[:50]!r}") from None


def _echo(args: argparse.Namespace, text: str) -> str:
    """What to print before the continuation."""
    return text + " " * (args.ids and bool(text)) if args.echo else ""


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


def _print_rate(what: str, tokens: int, seconds: float) -> None:
    rate = tokens / seconds if seconds > 0 else 0.0
    note(f"{what}: {tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens per second")


def _print_machine(lm: LanguageModel) -> None:
    import torch

    if lm.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(lm.device)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    note(f"peak memory: {peak / 2**20:.0f} MiB\ndevice: {lm.device}, {lm.dtype}")


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)  # ASCII: whatever the terminal's encoding, and no odd line breaks


def _score(args: argparse.Namespace) -> None:
    text = _prompt(args)
    given = _parse_ids(text) if args.ids else None
    if args.stride is not None:
        integer("--stride", args.stride, 1)
    lm = _load(args)

    from minigpt import scoring
    from minigpt.sequence import encode

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


def _shown(tokenizer: Tokenizer, id: int) -> str:
    """A token as Python writes it: text, or bytes where it is part of a character."""
    data = tokenizer.token_bytes(id)
    try:
        return repr(data.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(data)


def _tokenize(args: argparse.Namespace) -> None:
    text = _prompt(args)

    from minigpt import checkpoint
    from minigpt.errors import TokenizerError
    from minigpt.tokenizer import Tokenizer

    folder = checkpoint.locate(args.model, revision=args.revision, offline=args.offline, progress=True)
    tokenizer = Tokenizer.from_folder(folder, checkpoint.read_config(folder).vocab_size)
    if tokenizer is None:
        raise TokenizerError(f"{args.model} has no tokenizer: it takes token ids only")
    for id in tokenizer.encode(text, special=args.special):
        token = _shown(tokenizer, id)
        if args.json:
            _print_json({"id": id, "token": token})
        else:
            print(f"{id}\t{token}")


def _attention(args: argparse.Namespace) -> None:
    if args.html == "":
        raise ValueError("--html needs the name of a file to write")
    given = (args.text, args.prompt, args.file) != (None, None, None)
    text = _prompt(args) if given or not args.roles or args.html is not None else None
    ids = _parse_ids(text) if text is not None and args.ids else None
    lm = _load(args)

    from minigpt import views
    from minigpt.sequence import encode

    if text is not None:
        if ids is None and lm.tokenizer is not None:
            ids = lm.tokenizer.encode(text, special=args.special)
        ids = encode(lm, text if ids is None else ids)  # checked; text without a tokenizer: it says what to do
    with _on_signal(_raise_stopped):
        for line in views.report(lm, ids, args, views.Screen.of(sys.stdout)):
            print(line, flush=True)


def _info(args: argparse.Namespace) -> None:
    from minigpt import checkpoint

    folder = checkpoint.locate(args.model, revision=args.revision, offline=args.offline, progress=True)
    config = checkpoint.read_config(folder)
    checkpoint.check(folder, config)
    counts = checkpoint.empty_model(config).parameter_counts()
    total = sum(counts.values())
    files = checkpoint.describe(folder)
    cache = 2 * 4 * config.n_layer * config.n_positions * config.n_embd  # keys and values in float32
    if args.json:
        record = {"model": args.model, "folder": str(folder), "config": config.to_dict(), "parameters": counts, **files}
        _print_json({**record, "bytes_full_context": cache})
        return
    print(f"model     {args.model}\nfolder    {folder}\n")
    for name, value in asdict(config).items():
        print(f"{name:32} {value}")
    print("\nparameters")
    for name, count in counts.items():
        tied = "  (tied to the embeddings)" if name == "head" and config.tie_word_embeddings else ""
        print(f"  {name:12} {count:>15,} {count / total:>7.1%}{tied}")
    print(f"  {'total':12} {total:>15,}")
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in files["dtypes"].items())
    print(f"\n{files['tensors']} tensors ({dtypes}), {files['bytes']:,} bytes")
    for file in files["files"]:
        print(f"  {file['name']}  {file['bytes']:,} bytes  sha256 {file['sha256']}")
    print(f"\nmemory in float32: {4 * total / 2**20:,.1f} MiB of weights, and")
    print(f"{cache / 2**20:,.1f} MiB of keys and values for a full context of {config.n_positions} tokens")


def _parity(args: argparse.Namespace) -> None:
    import torch

    from minigpt import parity
    from minigpt.published import row, to_json

    torch.set_num_threads(_usable_threads())
    checks = parity.run(
        args.model,
        prompts=[well_formed(text) for text in args.prompt],
        dtypes=args.dtype or ["float32"],
        device=args.device,
        revision=args.revision,
        offline=args.offline,
        progress=True,
    )
    done = []
    if not args.json:
        print(f"parity of {args.model}, torch {torch.__version__}")
    for check in checks:
        done.append(check)
        if not args.json:
            previous = done[-2] if len(done) > 1 else None
            print(row(check, previous), flush=True)
    passed, failed, skipped = (sum(check.passed is kind for check in done) for kind in (True, False, None))
    if args.json:
        record = {"model": args.model, "torch": torch.__version__, "passed": passed, "failed": failed}
        _print_json({**record, "skipped": skipped, "checks": [to_json(check) for check in done]})
    else:
        print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    if failed:
        names = [check.name for check in done if check.passed is False]
        more = f" and {failed - 3} more" if failed > 3 else ""
        raise MiniGPTError(f"parity fails for {args.model}: {'; '.join(names[:3])}{more}")


_COMMANDS = {
    "generate": _generate,
    "score": _score,
    "tokenize": _tokenize,
    "attention": _attention,
    "parity": _parity,
    "info": _info,
}
