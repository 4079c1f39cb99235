"""What the command line accepts: every command with its options, defaults and help. No torch here: --help is quick."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from minigpt import __version__
from minigpt.cli.machine import one_line
from minigpt.decoding.params import SamplingParams


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # older versions of argparse make --option=-- an empty list
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line. What it parses names its command in `command`."""
    parser = _Parser(prog="minigpt", description="GPT-2: generate text, and look at what it does.")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_score(commands)
    tokenize = commands.add_parser("tokenize", help="show a text's tokens", description="Show a text's tokens.")
    _add_prompt(tokenize)
    _add_model(tokenize)
    tokenize.add_argument("--json", action="store_true", help='one object a line: {"id": ..., "token": ...}')
    tokenize.set_defaults(command="tokenize")
    _add_attention(commands)
    _add_parity(commands)
    about = "show a model's configuration, size and files"
    info = commands.add_parser("info", help=about, description=about.capitalize() + ".")
    _add_model(info)
    info.add_argument("--json", action="store_true", help="one JSON object")
    info.set_defaults(command="info")
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
    parser.set_defaults(command="generate")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
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
    _add_ablate(group)

    _add_output(parser)
    _add_machine(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--ids", action="store_true", help="token ids in (as the prompt) and out, instead of text")
    group.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each completion")
    group.add_argument("--logprobs", type=int, metavar="K", help="with --json: log-probabilities, also of the K best")
    group.add_argument("--stats", action="store_true", help="speed, memory and seed on stderr")
    group.add_argument("-v", "--verbose", action="store_true", help="what was loaded, on stderr")

    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--input",
        metavar="FILE",
        help='a JSON object a line: "prompt" or "ids", with an "id" and any field of SamplingParams, if wanted',
    )
    group.add_argument("--output", metavar="FILE", help="where the records go, one a line [standard output]")
    group.add_argument("--batch-size", type=int, metavar="N", help="prompts that are continued at a time [8]")
    group.add_argument("--resume", action="store_true", help="go on with an --output that is not complete")


def _add_score(commands: Any) -> None:
    about = "how likely the model finds a text: log-probabilities, perplexity, bits per byte"
    parser: argparse.ArgumentParser = commands.add_parser("score", help=about, description=about.capitalize() + ".")
    parser.set_defaults(command="score", verbose=False)
    _add_prompt(parser)
    _add_model(parser)
    group = parser.add_argument_group("scoring")
    group.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="for a text of any length: windows of a full context, each N tokens further; tokens are not listed then",
    )
    group.add_argument(
        "--bos", action="store_true", help="put the beginning-of-text token first, to score the first one"
    )
    group.add_argument("--ids", action="store_true", help="the text is given as token ids")
    group.add_argument("--json", action="store_true", help="one JSON object, with every token's log-probability")
    _add_machine(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    group.add_argument(
        "--dtype", default="float32", help="float32, float16; on a CPU also int8, on CUDA bfloat16 [float32]"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads [all CPUs that it may use]")


def _add_attention(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "attention",
        help="show what each head attends to",
        description="Show what each attention head attends to: by default, one line for each head of a layer.",
    )
    parser.set_defaults(command="attention")
    _add_prompt(parser)
    _add_model(parser)
    group = parser.add_argument_group("what to show")
    group.add_argument(
        "--layer",
        type=_number,
        nargs="+",
        metavar="N",
        help="layers [0; with --html, --json, --roles or --rank all]",
    )
    group.add_argument("--head", type=_number, nargs="+", metavar="N", help="heads, with weights and matrix [all]")
    _add_ablate(group)
    group.add_argument("--ids", action="store_true", help="the prompt is token ids instead of text")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--roles", action="store_true", help="what kind each head is; without PROMPT, on random tokens that come twice"
    )
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
    """--layer N, --head N: whether the model has it, the model says."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"write numbers, and the prompt before them, not {text!r}")
    return int(text)


def _head(text: str) -> str:
    """--ablate LAYER.HEAD: whether the model has it, the model says."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+", text):
        raise argparse.ArgumentTypeError(f"write heads as LAYER.HEAD, and the prompt before --ablate, not {text!r}")
    return text


def _add_parity(commands: Any) -> None:
    about = "prove on this machine that a model gives the numbers published for it, and what transformers gives"
    parser: argparse.ArgumentParser = commands.add_parser("parity", help=about, description=f"{about.capitalize()}.")
    parser.set_defaults(command="parity")
    _add_model(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "-p", "--prompt", action="append", default=[], metavar="TEXT", help="compare on this text too (repeatable)"
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    group.add_argument(
        "--dtype",
        nargs="+",
        action="extend",
        help="one or several formats, each checked: float32, float16; on a CPU int8, on CUDA bfloat16 [float32]",
    )
    group.add_argument("--json", action="store_true", help="one JSON object with every check")


def _bias(text: str) -> tuple[int, float]:
    """--logit-bias ID=V."""
    id, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"write it as ID=VALUE, not {text!r}")
    try:
        return int(id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"write it as ID=VALUE with numbers, not {text!r}") from None
