"""`minigpt attention`: what each head attends to, on the terminal, as JSON, or as a page for a browser."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel
    from minigpt.network.model import GPT2
from minigpt.cli.machine import _load, _on_signal, _raise_stopped
from minigpt.cli.prompt import _parse_ids, _prompt
from minigpt.interpret import heads as inside
from minigpt.interpret.page import check_page, page
from minigpt.interpret.terminal import (
    Screen,
    head_lines,
    head_records,
    label,
    layer_lines,
    lens_lines,
    lens_records,
    loss_lines,
    role_lines,
    role_records,
)


def chosen(what: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    """The layers or heads asked for, all of them for None; ValueError for one that the model does not have."""
    for number in numbers or ():
        if not 0 <= number < count:
            raise ValueError(f"--{what} {number} is out of range: the model's {what}s are 0 to {count - 1}")
    return list(range(count)) if numbers is None else list(dict.fromkeys(numbers))


def report(lm: LanguageModel, ids: list[int] | None, args: argparse.Namespace, screen: Screen) -> Iterator[str]:
    """The lines that the `attention` command prints for its arguments; with --html, it writes the page first.

    ids: the text, checked; None, with --roles: random tokens that come twice.
    Raises what heads.py raises, ValueError for heads that do not exist, PromptError for too large a page.
    """
    config = lm.config
    layers = chosen("layer", args.layer, config.n_layer)
    heads = chosen("head", args.head, config.n_head)
    model = inside.without_heads(lm.model, inside.named_heads(config, args.ablate))
    if args.lens and args.html is None and (args.layer, args.head) != (None, None):
        raise ValueError("--lens shows every block as a whole: it takes no --layer or --head")
    about = "this text"
    if ids is None:
        ids = _random_ids(lm)
        about = f"{len(ids) // 2} random tokens that come twice"
    if args.html is not None:
        written = _write_page(lm, ids, args, layers, heads)
        if not args.json:  # then all that is printed is JSON
            yield written
        if not (args.json or args.roles or args.lens or args.rank):
            return
    if args.lens:
        found = inside.lens(model, ids)
        yield from map(json.dumps, lens_records(found, lm.tokenizer)) if args.json else lens_lines(found, lm.tokenizer)
        return
    pairs = [(layer, head) for layer in layers for head in heads]
    if args.rank:
        yield from _rank(model, ids, pairs, args.json)
        return
    weights = inside.patterns(model, ids)
    labels = [label(lm.tokenizer, id) for id in ids]
    if args.roles:
        roles = inside.head_roles(weights, ids)
        yield from map(json.dumps, role_records(roles, pairs)) if args.json else role_lines(roles, pairs, about)
    elif args.json:
        yield from map(json.dumps, head_records(weights, ids, lm.tokenizer, pairs))
    else:
        for layer in layers if args.layer else layers[:1]:
            if args.head is None:
                yield from layer_lines(weights, labels, layer, screen)
            for head in heads if args.head else ():
                yield from head_lines(weights, labels, layer, head, screen)


def _random_ids(lm: LanguageModel) -> list[int]:
    """Random ids that come twice, of the tokens that ordinary text can have."""
    missing = {*lm.missing_ids, *lm.end_ids, *(lm.tokenizer.special_tokens.values() if lm.tokenizer else ())}
    candidates = [id for id in range(lm.config.vocab_size) if id not in missing]
    return inside.repeated_random(candidates, lm.config.n_positions)


def _write_page(
    lm: LanguageModel, ids: list[int], args: argparse.Namespace, layers: list[int], heads: list[int]
) -> str:
    """Write the page to args.html, with the roles on this text and, with --roles, on random tokens; a line about it."""
    check_page(len(ids), len(layers) * len(heads))
    weights = lm.attention(ids, ablate=args.ablate)
    roles = [("this text", inside.head_roles(weights, ids))]
    if args.roles:
        again = _random_ids(lm)
        scores = inside.head_roles(lm.attention(again, ablate=args.ablate), again)
        roles.append((f"{len(again) // 2} random tokens that come twice", scores))
    made = page(
        weights, ids, lm.tokenizer, model=args.model, layers=layers, heads=heads, roles=roles, ablated=args.ablate
    )
    data = made.encode()
    Path(args.html).write_bytes(data)
    return f"{args.html}: {len(layers)} x {len(heads)} heads, {len(ids)} tokens, {len(data) // 1000:,} KB"


def _rank(model: GPT2, ids: list[int], pairs: list[tuple[int, int]], as_json: bool) -> Iterator[str]:
    """The ranking, most needed head first."""
    losses = list(inside.ablation_losses(model, ids, pairs))
    losses.sort(key=lambda one: -one[2])
    if as_json:
        yield from (json.dumps({"layer": layer, "head": head, "increase": rise}) for layer, head, rise in losses)
    else:
        yield from loss_lines(losses)


def run(args: argparse.Namespace) -> None:
    if args.html == "":
        raise ValueError("--html needs the name of a file to write")
    given = (args.text, args.prompt, args.file) != (None, None, None)
    text = _prompt(args) if given or not args.roles or args.html is not None else None
    ids = _parse_ids(text) if text is not None and args.ids else None
    lm = _load(args)

    from minigpt.decoding.sequence import encode
    from minigpt.interpret import terminal

    if text is not None:
        if ids is None and lm.tokenizer is not None:
            ids = lm.tokenizer.encode(text, special=args.special)
        ids = encode(lm, text if ids is None else ids)  # checked; text without a tokenizer: it says what to do
    with _on_signal(_raise_stopped):
        for line in report(lm, ids, args, terminal.Screen.of(sys.stdout)):
            print(line, flush=True)
