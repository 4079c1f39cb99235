"""`minigpt attention`: what each head attends to, on the terminal, as JSON, or as a page for a browser."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.cli.machine import load
from minigpt.cli.prompt import note_special, read_prompt

if TYPE_CHECKING:
    from minigpt.language_model import LanguageModel


def run(args: argparse.Namespace) -> None:
    if args.html == "":
        raise ValueError("--html needs the name of a file to write")
    if args.lens and args.html is None and (args.layer, args.head) != (None, None):
        raise ValueError("--lens shows every block as a whole: it takes no --layer or --head")
    given = (args.text, args.prompt, args.file) != (None, None, None)
    prompt = read_prompt(args) if given or not args.roles or args.html is not None else None
    lm = load(args).without(args.ablate)
    ids, about = _random_ids(lm) if prompt is None else (lm.encode(prompt, special=args.special), "this text")
    note_special(lm.limits.tokenizer, prompt, ids)
    layers = _chosen("layer", args.layer, lm.config.n_layer)
    heads = _chosen("head", args.head, lm.config.n_head)
    if args.html is not None:
        _write_page(lm, ids, args, layers, heads)
    if args.html is None or args.json or args.roles or args.lens or args.rank:
        for line in _lines(lm, ids, about, args, layers, heads):
            print(line, flush=True)


def _chosen(what: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    """The layers or heads asked for, all of them for None; ValueError for one that the model does not have."""
    for number in numbers or ():
        if not 0 <= number < count:
            raise ValueError(f"--{what} {number} is out of range: the model's {what}s are 0 to {count - 1}")
    return list(range(count)) if numbers is None else list(dict.fromkeys(numbers))


def _random_ids(lm: LanguageModel) -> tuple[list[int], str]:
    """Random tokens that come twice, of those that ordinary text can have, and what to call them."""
    from minigpt.interpret.heads import repeated_random

    limits, special = lm.limits, lm.limits.tokenizer.special_tokens if lm.limits.tokenizer else {}
    odd = {*limits.undecodable_ids, *limits.end_ids, *special.values()}
    ids = repeated_random([id for id in range(limits.vocab_size) if id not in odd], limits.n_positions)
    return ids, f"{len(ids) // 2} random tokens that come twice"


def _lines(
    lm: LanguageModel, ids: list[int], about: str, args: argparse.Namespace, layers: list[int], heads: list[int]
) -> Iterator[str]:
    """The lines that the arguments ask for: of --lens, --rank, --roles or the patterns."""
    from minigpt.interpret import heads as inside
    from minigpt.interpret import terminal as show

    tokenizer, pairs = lm.limits.tokenizer, [(layer, head) for layer in layers for head in heads]
    records: Iterable[Any]
    if args.lens:
        found = inside.lens(lm.model, ids)
        records, lines = show.lens_records(found, tokenizer), show.lens_lines(found, tokenizer)
    elif args.rank:
        losses = sorted(inside.ablation_losses(lm.model, ids, pairs), key=lambda one: -one[2])
        records = ({"layer": layer, "head": head, "increase": rise} for layer, head, rise in losses)
        lines = show.loss_lines(losses)
    elif args.roles:
        roles = inside.head_roles(inside.patterns(lm.model, ids), ids)
        records, lines = show.role_records(roles, pairs), show.role_lines(roles, pairs, about)
    else:
        weights = inside.patterns(lm.model, ids)
        records = show.head_records(weights, ids, tokenizer, pairs)
        labels, screen = [show.label(tokenizer, id) for id in ids], show.Screen.of(sys.stdout)
        shown = layers if args.layer else layers[:1]
        whole = (show.layer_lines(weights, labels, layer, screen) for layer in shown)
        single = (show.head_lines(weights, labels, layer, head, screen) for layer in shown for head in heads)
        lines = chain.from_iterable(whole if args.head is None else single)
    yield from map(json.dumps, records) if args.json else lines


def _write_page(
    lm: LanguageModel, ids: list[int], args: argparse.Namespace, layers: list[int], heads: list[int]
) -> None:
    """Write the page to args.html, with the roles on this text and, with --roles, on random tokens."""
    from minigpt.interpret import heads as inside
    from minigpt.interpret.page import check_page, page

    check_page(len(ids), len(layers) * len(heads))
    weights = inside.patterns(lm.model, ids)
    roles = [("this text", inside.head_roles(weights, ids))]
    if args.roles:
        again, about = _random_ids(lm)
        roles.append((about, inside.head_roles(inside.patterns(lm.model, again), again)))
    shown: Any = {"model": args.model, "layers": layers, "heads": heads, "roles": roles, "ablated": args.ablate}
    data = page(weights, ids, lm.limits.tokenizer, **shown).encode()
    Path(args.html).write_bytes(data)
    if not args.json:  # else all that is printed is JSON
        size = f"{len(layers)} x {len(heads)} heads, {len(ids)} tokens, {len(data) // 1000:,} KB"
        print(f"{args.html}: {size}", flush=True)
