"""What the command line accepts: every command with its options, defaults and help. No torch here: --help is quick."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from minigpt import __version__
from minigpt.cli.machine import one_line
from minigpt.decoding.params import SamplingParams
from minigpt.options import did_you_mean


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # older versions of argparse make --option=-- an empty list
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments; `command` is the command's name. Without any, the help is printed and SystemExit raised."""
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    args, rest = parser.parse_known_args(argv or ["--help"])
    if rest:
        word = next((word for word in rest if word.startswith("-")), rest[0])
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_meant(args, word)}")
    return args


def _meant(args: argparse.Namespace, word: str) -> str:
    """What to say of an argument that nobody knows: the option that was meant, or that a prompt needs quotes."""
    if not word.startswith("-"):
        return ' (put a prompt of several words into quotes: "Once upon a time")' if "text" in args else ""
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    close = difflib.get_close_matches(name, vars(args), n=1)
    meant = did_you_mean(name) if args.command == "generate" and name not in args else ""
    meant = meant or (f": did you mean {close[0]}?" if close else "")
    return meant.replace("_", "-").replace("mean ", "mean --")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line. What it parses names its command in `command`."""
    parser = _Parser(prog="minigpt", description="GPT-2: generate text, and look at what it does.")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    _add_generate(commands)
    _add_score(commands)
    tokenize = _command(commands, "tokenize", "show a text's tokens")
    _add_prompt(tokenize)
    _add_model(tokenize)
    tokenize.add_argument("--json", action="store_true", help='{"id": ..., "token": ..., "bytes": [...]} a line')
    _add_attention(commands)
    _add_parity(commands)
    info = _command(commands, "info", "show a model's configuration, size and files")
    _add_model(info)
    info.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _command(commands: Any, name: str, about: str, more: str = "") -> Any:
    description = f"{about[0].upper()}{about[1:]}{more}."
    # no abbreviations: --n would be --no-repeat-ngram-size
    return commands.add_parser(name, help=about, description=description, allow_abbrev=False)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    help = "demo; gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2; a folder (./name); or a hub id (default: gpt2)"
    group.add_argument("-m", "--model", default="gpt2", help=help)
    group.add_argument("--revision", help="a branch, tag or commit on the hub")
    group.add_argument("--offline", action="store_true", help="use no network, only files that are already here")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt (one of)")
    group.add_argument("text", nargs="?", metavar="PROMPT", help="the text; - reads it from standard input")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the text (write --prompt=TEXT if it begins with a dash)")
    group.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file; its final newline is dropped")
    group.add_argument("--special", action="store_true", help="read special tokens, such as <|endoftext|>, as such")


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "continue a prompt", ". Greedy unless --temperature is above 0")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
    _add_prompt(parser)
    _add_model(parser)
    group = parser.add_argument_group("decoding (defaults in brackets)")

    def option(name: str, type: Callable[[str], Any], help: str, *short: str, **more: Any) -> None:
        default = getattr(SamplingParams, name)  # shown only: None says that the option is not given
        shown = "" if default is None else f" [{default}]"
        group.add_argument(*short, "--" + name.replace("_", "-"), type=type, help=help + shown, **more)

    option("max_new_tokens", int, "the most tokens to draw", "-n", metavar="N")
    option("min_new_tokens", int, "no end token before this many", metavar="N")
    option("temperature", float, "0 is greedy; above 0 samples", metavar="T")
    option("top_k", int, "sample from the K most likely tokens; 0 from all", metavar="K")
    option("top_p", float, "sample from the smallest set that reaches probability P", metavar="P")
    option("min_p", float, "drop tokens less likely than P times the likeliest", metavar="P")
    option("typical_p", float, "sample from the tokens of typical surprise that reach probability P", metavar="P")
    option("epsilon_cutoff", float, "drop tokens less likely than P; 0 is off", metavar="P")
    option("eta_cutoff", float, "the same, with less than P where the choice is wide; 0 is off", metavar="P")
    option("num_beams", int, "above 1, search for the likeliest text along N ways", metavar="N")
    option("length_penalty", float, "of such a search: above 0 favours long texts", metavar="X")
    option(
        "early_stopping", _when, "it ends with N texts complete: true, false (none gets better) or never", metavar="B"
    )
    option("repetition_penalty", float, "above 1 discourages tokens already used", metavar="R")
    option("no_repeat_ngram_size", int, "no run of N tokens twice; 0 is off", metavar="N")
    option("seed", int, "makes sampling repeatable (on one kind of device) [a fresh one]", metavar="N")
    option("samples", int, "completions to give; sample J uses seed + J", metavar="N")
    option("max_seconds", float, "draw no further token after this long [no limit]", metavar="S")
    option("overflow", str, "at the context limit: stop, or slide and go on", choices=("stop", "slide"))
    group.add_argument("--logit-bias", type=_bias, action="append", metavar="ID=V", help="add V to a logit")
    group.add_argument("--bad-words", action="append", metavar="S", help="never write this text (repeatable)")
    group.add_argument("--stop", action="append", metavar="S", help="stop before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the end token")
    help = "what is not given here comes from the model's generation_config.json"
    group.add_argument("--use-model-defaults", action="store_true", help=help)
    _add_ablate(group)

    _add_output(parser)
    help = "guess tokens, to verify several at once: lookup (of repeated text), off, int8, or a smaller model [lookup]"
    _add_machine(parser).add_argument("--draft", metavar="MODEL", default="lookup", help=help)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--ids", action="store_true", help="token ids in (as the prompt) and out, instead of text")
    group.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each completion")
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities, also the K best's: a table, or JSON"
    )
    group.add_argument("--stats", action="store_true", help="on stderr: speed, memory, seed, and what was loaded")

    group = parser.add_argument_group("many prompts")
    help = '{"prompt": "Once"} or {"ids": [7454]} a line, with any of "id", "special" and SamplingParams; - is stdin'
    group.add_argument("--input", metavar="FILE", help=help)
    group.add_argument("--output", metavar="FILE", help="where the records go, one a line [standard output]")
    group.add_argument("--batch-size", type=int, metavar="N", help="prompts that are continued at a time [8]")
    group.add_argument("--resume", action="store_true", help="go on with an --output that is not complete")


def _add_score(commands: Any) -> None:
    about = "how likely the model finds a text: log-probabilities, perplexity, bits per byte"
    parser = _command(commands, "score", about)
    _add_prompt(parser)
    _add_model(parser)
    group = parser.add_argument_group("scoring")
    group.add_argument("--context", metavar="TEXT", help="score the text as the continuation of this one")
    help = "for a text of any length: windows of a full context, each N tokens further; tokens are not listed then"
    group.add_argument("--stride", type=int, metavar="N", help=help)
    group.add_argument("--bos", action="store_true", help="put the beginning-of-text token first, to score the next")
    group.add_argument("--ids", action="store_true", help="the text is given as token ids")
    group.add_argument("--json", action="store_true", help="one JSON object, with every token's log-probability")
    help = 'many texts: {"text": "a time"} a line, with any of "context", "id" and "special"; - is stdin'
    group.add_argument("--input", metavar="FILE", help=help)
    _add_machine(parser)


def _add_machine(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    help = "float32, float16; on a CPU also int8, on CUDA bfloat16 [float32]"
    group.add_argument("--dtype", default="float32", help=help)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads [all CPUs that it may use]")
    return group


def _add_attention(commands: Any) -> None:
    about = "show what each attention head attends to"
    parser = _command(commands, "attention", about, ": by default, one line for each head of a layer")
    _add_prompt(parser)
    _add_model(parser)
    group = parser.add_argument_group("what to show")
    help = "layers [0; with --html, --json, --roles or --rank all]"
    group.add_argument("--layer", type=_number, nargs="+", metavar="N", help=help)
    group.add_argument("--head", type=_number, nargs="+", metavar="N", help="heads, with weights and matrix [all]")
    _add_ablate(group)
    group.add_argument("--ids", action="store_true", help="the prompt is token ids instead of text")
    kind = group.add_mutually_exclusive_group()
    help = "what kind each head is; without PROMPT, on random tokens that come twice"
    kind.add_argument("--roles", action="store_true", help=help)
    kind.add_argument("--rank", action="store_true", help="heads by how much the loss rises without them")
    kind.add_argument("--lens", action="store_true", help="what each block's output predicts after the last token")
    group = parser.add_argument_group("output")
    group.add_argument("--html", metavar="FILE", help="write a page for a browser, complete in one file")
    group.add_argument("--json", action="store_true", help="one JSON object a line, with all numbers")
    _add_machine(parser)


def _add_ablate(group: Any) -> None:
    help = "switch these heads off (after the prompt, or repeatable)"
    group.add_argument("--ablate", type=_head, nargs="+", action="extend", default=[], metavar="LAYER.HEAD", help=help)


def _number(text: str) -> int:
    """--layer N, --head N. Whether the model has it, the model says; so for _head."""
    if re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"write numbers, and the prompt before them, not {text!r}")


def _head(text: str) -> str:
    """--ablate LAYER.HEAD."""
    if re.fullmatch(r"[0-9]+\.[0-9]+", text):
        return text
    raise argparse.ArgumentTypeError(f"write heads as LAYER.HEAD, and the prompt before --ablate, not {text!r}")


def _add_parity(commands: Any) -> None:
    about = "prove on this machine that a model gives the numbers published for it, and what transformers gives"
    parser = _command(commands, "parity", about)
    _add_model(parser)
    group = parser.add_argument_group("comparison")
    help = "compare on this text too (repeatable)"
    group.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help=help)
    help = "and on the text of this UTF-8 file (repeatable)"
    group.add_argument("-f", "--file", action="append", default=[], metavar="FILE", help=help)
    help = 'and on each line of this file, {"prompt": "Once"} or {"ids": [7454]} (repeatable)'
    group.add_argument("--input", action="append", default=[], metavar="FILE", help=help)
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    help = "one or several formats, each checked: float32, float16; on a CPU int8, on CUDA bfloat16 [float32]"
    group.add_argument("--dtype", nargs="+", action="extend", help=help)
    group.add_argument("--json", action="store_true", help="one JSON object with every check")
    group = parser.add_argument_group("a record of the model's numbers")
    kind = group.add_mutually_exclusive_group()
    help = "compare nothing, but write this file: what the model gives on the prompts, as numbers (JSON)"
    kind.add_argument("--record", metavar="FILE", help=help)
    kind.add_argument("--against", metavar="FILE", help="compare with such a file too, made by any device or engine")
    group = parser.add_argument_group("what is enough (besides no failure) [one comparison with others' numbers]")
    group.add_argument("--strict", action="store_true", help="every comparison that applies to this model")
    kinds = ("transformers", "published", "recorded")
    group.add_argument("--require", nargs="+", action="extend", default=[], choices=kinds, help="this one")


def _when(text: str) -> bool | str:
    """--early-stopping."""
    return {"true": True, "false": False}.get(text, text)


def _bias(text: str) -> tuple[int, float]:
    """--logit-bias ID=V."""
    try:
        id, value = text.split("=")
        return int(id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"write it as ID=VALUE with numbers, not {text!r}") from None
