"""What the command line accepts: every command with its options, defaults and help. No torch here: --help is quick."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from dataclasses import fields
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
    close = [f": did you mean {one}?" for one in difflib.get_close_matches(name, vars(args), n=1)]
    meant = did_you_mean(name) if args.command == "generate" else ""
    return (meant or "".join(close)).replace("_", "-").replace("mean ", "mean --")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="minigpt", description="GPT-2: generate text, and look at what it does.")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    _add_generate(commands)
    _add_score(commands)
    tokenize = _command(commands, "tokenize", "show a text's tokens")
    tokenize.add_argument("--json", action="store_true", help='{"id": ..., "token": ..., "bytes": [...]} a line')
    _add_attention(commands)
    _add_parity(commands)
    info = _command(commands, "info", "show a model's configuration, size and files", prompt=False)
    info.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _command(commands: Any, name: str, about: str, more: str = "", prompt: bool = True) -> Any:
    """A command that takes a model and, if `prompt`, a prompt."""
    description = f"{about[0].upper()}{about[1:]}{more}."
    # no abbreviations: --n would be --no-repeat-ngram-size
    parser = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
    if prompt:
        add = parser.add_argument_group("prompt (one of)").add_argument
        add("text", nargs="?", metavar="PROMPT", help="the text; - reads it from standard input")
        add("-p", "--prompt", metavar="TEXT", help="the text (write --prompt=TEXT if it begins with a dash)")
        add("-f", "--file", metavar="FILE", help="a UTF-8 file; its final newline is dropped")
        add("--special", action="store_true", help="read special tokens, such as <|endoftext|>, as such")
    add = parser.add_argument_group("model").add_argument
    help = "demo; gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2; a folder (./name); or a hub id (default: gpt2)"
    add("-m", "--model", default="gpt2", help=help)
    add("--revision", help="a branch, tag or commit on the hub")
    add("--offline", action="store_true", help="use no network, only files that are already here")
    return parser


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "continue a prompt", ". Greedy unless --temperature is above 0")
    parser.add_argument("--version", action="version", version=f"minigpt {__version__}")
    add = parser.add_argument_group("decoding (defaults in brackets)").add_argument
    meanings = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)\.$", SamplingParams.__doc__ or "", re.MULTILINE))
    for each in fields(SamplingParams):
        if kind := _KINDS.get(str(each.type).partition(" |")[0]):  # the others are the library's alone
            names = [*["-n"][: each.name == "max_new_tokens"], "--" + each.name.replace("_", "-")]
            more = "(repeatable)" if "action" in kind else "" if each.default is None else f"[{each.default}]"
            help = " ".join([*meanings.get(each.name, "").split(), more])
            add(*names, help=help, **kind)  # without a default: None says that it is not given
    add("--ignore-eos", action="store_true", help="do not stop at the end token")
    add("--use-model-defaults", action="store_true", help="for the rest, use the model's generation_config.json")
    _add_ablate(add)
    add = parser.add_argument_group("output").add_argument
    add("--ids", action="store_true", help="token ids in (as the prompt) and out, instead of text")
    add("--echo", action="store_true", help="print the prompt before its continuation")
    add("--json", action="store_true", help="one JSON object a line for each completion")
    add("--stats", action="store_true", help="on stderr: speed, memory, seed, and what was loaded")
    add = parser.add_argument_group("many prompts").add_argument
    help = '{"prompt": "Once"} or {"ids": [7454]} a line, with any of "id", "special" and SamplingParams; - is stdin'
    add("--input", metavar="FILE", help=help)
    add("--output", metavar="FILE", help="where the records go, one a line [standard output]")
    add("--batch-size", type=int, metavar="N", help="prompts that are continued at a time [8]")
    add("--resume", action="store_true", help="go on with an --output that is not complete")
    help = "guess tokens, to verify several at once: lookup (of repeated text), off, int8, or a smaller model [lookup]"
    _add_machine(parser).add_argument("--draft", metavar="MODEL", default="lookup", help=help)


def _add_score(commands: Any) -> None:
    about = "how likely the model finds a text: log-probabilities, perplexity, bits per byte"
    parser = _command(commands, "score", about)
    add = parser.add_argument_group("scoring").add_argument
    add("--context", metavar="TEXT", help="score the text as the continuation of this one")
    help = "for a text of any length: windows of a full context, each N tokens further; tokens are not listed then"
    add("--stride", type=int, metavar="N", help=help)
    add("--bos", action="store_true", help="put the beginning-of-text token first, to score the next")
    add("--ids", action="store_true", help="the text is given as token ids")
    add("--json", action="store_true", help="one JSON object, with every token's log-probability")
    help = 'many texts: {"text": "a time"} a line, with any of "context", "id" and "special"; - is stdin'
    add("--input", metavar="FILE", help=help)
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
    group = parser.add_argument_group("what to show")
    add = group.add_argument
    add("--layer", type=int, nargs="+", metavar="N", help="layers [0; with --html, --json, --roles or --rank all]")
    add("--head", type=int, nargs="+", metavar="N", help="heads, with weights and matrix [all]")
    _add_ablate(add)
    add("--ids", action="store_true", help="the prompt is token ids instead of text")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--roles", action="store_true", help="each head's kind; without PROMPT, on random tokens")
    kind.add_argument("--rank", action="store_true", help="heads by how much the loss rises without them")
    kind.add_argument("--lens", action="store_true", help="what each block's output predicts after the last token")
    add = parser.add_argument_group("output").add_argument
    add("--html", metavar="FILE", help="write a page for a browser, complete in one file")
    add("--json", action="store_true", help="one JSON object a line, with all numbers")
    _add_machine(parser)


def _add_ablate(add: Any) -> None:
    help = "switch these heads off (after the prompt, or repeatable)"
    add("--ablate", type=_head, nargs="+", action="extend", default=[], metavar="LAYER.HEAD", help=help)


def _head(text: str) -> str:
    """--ablate LAYER.HEAD. Whether the model has it, the model says."""
    if re.fullmatch(r"[0-9]+\.[0-9]+", text):
        return text
    raise argparse.ArgumentTypeError(f"write heads as LAYER.HEAD, and the prompt before --ablate, not {text!r}")


def _add_parity(commands: Any) -> None:
    about = "prove on this machine that a model gives the numbers published for it, and what transformers gives"
    parser = _command(commands, "parity", about, prompt=False)
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
    return {"true": True, "false": False}.get(text.lower(), text)


def _bias(text: str) -> tuple[int, float]:
    """--logit-bias ID=X."""
    try:
        id, value = text.split("=")
        return int(id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"write it as ID=X with numbers, not {text!r}") from None


_KINDS: dict[str, dict[str, Any]] = {  # by the type of a field of SamplingParams
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str": {"metavar": "WORD"},
    "bool": {"type": _when, "metavar": "B"},
    "tuple[str, ...]": {"action": "append", "metavar": "TEXT"},
    "Mapping[int, float]": {"type": _bias, "action": "append", "metavar": "ID=X"},
}
