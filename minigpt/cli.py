"""The command line: arguments in, text or JSON lines out. Everything else lives in the library.

Exit codes: 0; 1 a problem with the model, the prompt, a file or the device; 2 usage, or a parameter that is refused;
130 Ctrl-C; 143 SIGTERM. A reader that closes the pipe ends the run quietly.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt import __version__
from minigpt.config import SamplingParams
from minigpt.errors import MiniGPTError, PromptError

if TYPE_CHECKING:
    from minigpt.generation import LanguageModel
    from minigpt.sequence import Completion, Step


class _Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived while text was coming: unwinds, so that what was written so far is kept."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises, but for argparse's SystemExit on usage and --help."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" in its place
    args = _parser().parse_args(argv)
    try:
        with _on_signal(lambda number, _: os._exit(128 + number)):  # while loading there is nothing to keep
            args.run(args)
            sys.stdout.flush()
        return 0
    except _Stopped as stopped:
        with suppress(OSError):
            print(flush=True)  # end the line that was cut short
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
    except OSError as error:
        return _fail(1, f"{error.filename or 'output'}: {error.strerror or error}")
    except RuntimeError as error:
        if "memory" not in str(error):  # PyTorch has no class of its own for a failed allocation on the CPU
            raise
        return _fail(1, "out of memory: use a smaller model or a smaller batch")


def _fail(code: int, message: str) -> int:
    print("minigpt: error:", " ".join(message.split("\n")), file=sys.stderr)
    return code


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
    before = {number: signal.signal(number, action) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minigpt", description="GPT-2: generate text, and look at what it does.")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    tokenize = commands.add_parser("tokenize", help="show a text's tokens", description="Show a text's tokens.")
    _add_prompt(tokenize)
    _add_model(tokenize)
    tokenize.add_argument("--json", action="store_true", help='one object a line: {"id": ..., "token": ...}')
    tokenize.set_defaults(run=_tokenize)
    about = "show a model's configuration, size and files"
    info = commands.add_parser("info", help=about, description=about.capitalize() + ".")
    _add_model(info)
    info.add_argument("--json", action="store_true", help="one JSON object")
    info.set_defaults(run=_info)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        default="gpt2",
        help="demo; gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2; a folder (./name); or a hub id (default: gpt2)",
    )
    group.add_argument("--revision", help="a branch, tag or commit on the hub")
    group.add_argument("--offline", action="store_true", help="use no network, only files that are already here")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt (one of)")
    group.add_argument("text", nargs="?", metavar="PROMPT", help="the text; - reads it from standard input")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the text (write --prompt=TEXT if it begins with a dash)")
    group.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file; its final newline is dropped")
    group.add_argument("--special", action="store_true", help="read <|endoftext|> in the text as the special token")


def _add_generate(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate", help="continue a prompt", description="Continue a prompt. Greedy unless --temperature is above 0."
    )
    parser.set_defaults(run=_generate)
    _add_prompt(parser)
    _add_model(parser)
    fields = SamplingParams()
    group = parser.add_argument_group("decoding (defaults in brackets)")

    def option(name: str, type: type, help: str, *short: str, **more: Any) -> None:
        default = getattr(fields, name)
        shown = "" if default is None else f" [{default}]"
        flag = "--" + name.replace("_", "-")
        group.add_argument(*short, flag, type=type, default=default, help=help + shown, **more)

    option("max_new_tokens", int, "the most tokens to draw", "-n", metavar="N")
    option("min_new_tokens", int, "no end token before this many", metavar="N")
    option("temperature", float, "0 is greedy; above 0 samples", metavar="T")
    option("top_k", int, "sample from the K most likely tokens; 0 from all", metavar="K")
    option("top_p", float, "sample from the smallest set that reaches probability P", metavar="P")
    option("min_p", float, "drop tokens less likely than P times the likeliest", metavar="P")
    option("repetition_penalty", float, "above 1 discourages tokens already used", metavar="R")
    option("no_repeat_ngram_size", int, "no run of N tokens twice; 0 is off", metavar="N")
    option("seed", int, "makes sampling repeatable (on one kind of device) [a fresh one]", metavar="N")
    option("samples", int, "completions to give; sample J uses seed + J", metavar="N")
    option("overflow", str, "at the context limit: stop, or slide and go on", choices=("stop", "slide"))
    group.add_argument("--logit-bias", type=_bias, action="append", default=[], metavar="ID=V", help="add V to a logit")
    group.add_argument("--stop", action="append", default=[], metavar="S", help="stop before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the end token")

    group = parser.add_argument_group("output")
    group.add_argument("--ids", action="store_true", help="token ids in (as the prompt) and out, instead of text")
    group.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each completion")
    group.add_argument("--logprobs", type=int, metavar="K", help="with --json: log-probabilities, also of the K best")
    group.add_argument("--stats", action="store_true", help="speed, memory and seed on stderr")
    group.add_argument("-v", "--verbose", action="store_true", help="what was loaded, on stderr")

    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    group.add_argument("--dtype", default="float32", help="float32; on CUDA also float16, bfloat16 [float32]")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads [PyTorch's choice]")


def _bias(text: str) -> tuple[int, float]:
    """--logit-bias ID=V."""
    id, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"write it as ID=VALUE, not {text!r}")
    try:
        return int(id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"write it as ID=VALUE with numbers, not {text!r}") from None


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text, from wherever the arguments say; PromptError if it is given twice, or a file is not UTF-8."""
    given = [value for value in (args.text, args.prompt, args.file) if value is not None]
    if len(given) != 1:
        what = "the prompt is given twice" if given else "no prompt"
        raise ValueError(f"{what}: give one of PROMPT, --prompt TEXT, --file FILE, or - for standard input")
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is None and args.text != "-":
        return str(args.text)
    if args.file in (None, "-"):
        name, data = "standard input", sys.stdin.buffer.read()
    else:
        name = args.file
        try:
            data = Path(name).read_bytes()
        except OSError as error:
            raise PromptError(f"prompt file {name}: {error.strerror}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
    text = text.removeprefix("\ufeff")
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _generate(args: argparse.Namespace) -> None:
    params = _params(args)
    text = _prompt(args)
    ids = _parse_ids(text) if args.ids else None
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, not {args.threads}")

    import torch  # takes a second: not before the arguments are known to be good

    from minigpt.generation import load

    started = time.perf_counter()
    if args.threads:
        torch.set_num_threads(args.threads)
    lm = load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        revision=args.revision,
        offline=args.offline,
        progress=True,
    )
    if args.verbose:
        size = sum(parameter.numel() for parameter in lm.model.parameters())
        seconds = time.perf_counter() - started
        loaded = f"{size:,} parameters on {lm.device}, {lm.dtype}, loaded in {seconds:.2f} s"
        print(f"{args.model}: {loaded}, {torch.get_num_threads()} threads", file=sys.stderr)
    if ids is None and lm.tokenizer is not None:
        ids = lm.tokenizer.encode(text, special=args.special)
    prompt = text if ids is None else ids  # text without a tokenizer: the library says what to do
    with _on_signal(_raise_stopped):
        if args.echo and not args.json:
            print(text, end=" " if args.ids and text else "", flush=True)
        _print_completions(args, lm, text, prompt, params)


def _print_completions(
    args: argparse.Namespace, lm: LanguageModel, text: str, prompt: str | list[int], params: SamplingParams
) -> None:
    """Generate and print: one completion as it is drawn, several or JSON records as each is done."""
    started = time.perf_counter()
    if params.samples == 1 and not args.json:
        _print_stream(args, lm, prompt, params, started)
        return
    completions = []
    for sample, completion in enumerate(lm.generate_many([prompt], params)):
        completions.append(completion)
        if args.json:
            _print_json(_record(args, text, sample, completion))
        else:
            print("---\n" * (sample > 0) + _shown(args, completion), flush=True)
    if args.stats:
        _print_stats(lm, completions, time.perf_counter() - started)


def _params(args: argparse.Namespace) -> SamplingParams:
    """The decoding options as SamplingParams."""
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs needs --json")
    if args.seed is None and args.temperature > 0:
        args.seed = secrets.randbits(32)  # chosen here, so that --stats can name it
    names = "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size"
    return SamplingParams(
        **{name: getattr(args, name) for name in f"{names} seed samples logprobs overflow".split()},
        logit_bias=dict(args.logit_bias),
        stop=tuple(args.stop),
        stop_ids=() if args.ignore_eos else None,
    )


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        wanted = "with --ids the prompt is token ids separated by spaces or commas"
        raise PromptError(f"{wanted}, not {text[:50]!r}") from None


def _shown(args: argparse.Namespace, completion: Completion) -> str:
    return " ".join(map(str, completion.ids)) if args.ids else completion.text


def _print_stream(
    args: argparse.Namespace, lm: LanguageModel, prompt: str | list[int], params: SamplingParams, started: float
) -> None:
    """Print one completion as it is drawn."""
    steps: list[Step] = []
    first = started
    for step in lm.stream(prompt, params):
        if not steps:
            first = time.perf_counter()
        text = (" " if steps else "") + str(step.id) if args.ids else step.text
        steps.append(step)
        if text:
            print(text, end="", flush=True)
    print(flush=True)
    if args.stats:
        n_prompt = len(prompt) or 1
        reason = steps[-1].finish_reason if steps else "length"
        _print_rate("prompt", n_prompt, first - started)
        _print_rate("generation", len(steps) - 1 if steps else 0, time.perf_counter() - first)
        print(f"seed: {params.seed}\nfinish reason: {reason}", file=sys.stderr)
        _print_machine(lm)


def _print_stats(lm: LanguageModel, completions: list[Completion], seconds: float) -> None:
    _print_rate("generation", sum(len(completion.ids) for completion in completions), seconds)
    print("seed:", ", ".join(str(completion.seed) for completion in completions), file=sys.stderr)
    print("finish reason:", ", ".join(completion.finish_reason for completion in completions), file=sys.stderr)
    _print_machine(lm)


def _print_rate(what: str, tokens: int, seconds: float) -> None:
    rate = tokens / seconds if seconds > 0 else 0.0
    print(f"{what}: {tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens per second", file=sys.stderr)


def _print_machine(lm: LanguageModel) -> None:
    import torch

    if lm.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(lm.device)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory: {peak / 2**20:.0f} MiB\ndevice: {lm.device}, {lm.dtype}", file=sys.stderr)


def _record(args: argparse.Namespace, text: str, sample: int, completion: Completion) -> dict[str, Any]:
    """A completion as a JSON record."""
    return {
        "id": 0,
        "sample": sample,
        "prompt": None if args.ids else text,
        **{key: value for key, value in asdict(completion).items() if key != "logprobs"},
        "logprobs": None if completion.logprobs is None else [asdict(item) for item in completion.logprobs],
        "model": args.model,
    }


def _print_json(record: dict[str, Any]) -> None:
    # Escapes only where the terminal could not show the character.
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    print(json.dumps(record, ensure_ascii=not utf8), flush=True)


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
        data = tokenizer.token_bytes(id)
        try:
            token = repr(data.decode("utf-8"))
        except UnicodeDecodeError:  # part of a character
            token = repr(data)
        if args.json:
            _print_json({"id": id, "token": token})
        else:
            print(f"{id}\t{token}")


def _info(args: argparse.Namespace) -> None:
    import torch

    from minigpt import checkpoint
    from minigpt.model import GPT2

    folder = checkpoint.locate(args.model, revision=args.revision, offline=args.offline, progress=True)
    config = checkpoint.read_config(folder)
    with torch.device("meta"):
        counts = GPT2(config).parameter_counts()
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
