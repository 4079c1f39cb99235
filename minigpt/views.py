"""What minigpt.attention finds, made visible: lines for a terminal, records for programs, one page for a browser.

Everything here returns text, but for `report`, the `attention` command: it also writes the page that --html asks for,
and shows a bar on stderr while it ranks. Tensors are named and shaped as in attention.py.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from minigpt import attention
from minigpt.attention import Lens
from minigpt.errors import PromptError

if TYPE_CHECKING:
    import argparse

    from minigpt.generation import LanguageModel
    from minigpt.tokenizer import Tokenizer

PAGE_LIMIT = 50 * 10**6  # bytes: browsers open more, but no longer at once
_STEPS = 65535  # a weight is a 16-bit number in the page: off by at most 0.5 / 65535 = 7.6e-6
_SHADES = {True: " ░▒▓█", False: " .:*#"}
_RAMP = (235, 53, 89, 125, 161, 167, 203, 209, 215, 222, 230)  # of the 256-colour palette, dark to bright


@dataclass(frozen=True)
class Screen:
    """What the output can show. width: columns; colour: ANSI sequences; blocks: characters beyond ASCII."""

    width: int = 80
    colour: bool = False
    blocks: bool = True

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """What `stream` can show: colour only if it is a terminal, and not where NO_COLOR is set."""
        colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        try:
            blocks = _SHADES[True].encode(stream.encoding or "ascii") != b""
        except (UnicodeEncodeError, LookupError):
            blocks = False
        return cls(shutil.get_terminal_size().columns, colour, blocks)


def label(tokenizer: Tokenizer | None, id: int) -> str:
    """A token on a line of its own: a quoted string, or quoted bytes if it is part of a character, or #id."""
    if tokenizer is None or id not in tokenizer:
        return f"#{id}"
    data = tokenizer.token_bytes(id)
    try:
        return repr(data.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(data)


def pieces(tokenizer: Tokenizer | None, id: int) -> list[str]:
    """A token for the page: text and marks by turns. A mark stands for what does not show, such as ␣, ⏎ or \\xf0."""
    if tokenizer is None or id not in tokenizer:
        return ["", f"#{id}"]
    found = [""]
    for character in tokenizer.token_bytes(id).decode("utf-8", "surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:  # a byte that is no character
            mark = f"\\x{code - 0xDC00:02x}"
        elif character in " \n\t":
            mark = {" ": "␣", "\n": "⏎", "\t": "⇥"}[character]
        else:
            mark = "" if character.isprintable() else repr(character)[1:-1]
        if bool(mark) == (len(found) % 2 == 1):
            found.append("")
        found[-1] += mark or character
    return found


def chosen(what: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    """The layers or heads asked for, all of them for None; ValueError for one that the model does not have."""
    for number in numbers or ():
        if not 0 <= number < count:
            raise ValueError(f"--{what} {number} is out of range: the model's {what}s are 0 to {count - 1}")
    return list(range(count)) if numbers is None else list(dict.fromkeys(numbers))


def layer_lines(weights: Tensor, labels: Sequence[str], layer: int, screen: Screen) -> Iterator[str]:
    """One line a head: what the last token attends to, as a shaded strip and the three largest weights.

    The strip is left out, for the whole layer, where a line with it would not fit the screen.
    """
    T = len(labels)
    headings = (
        f"layer {layer}: what the last of {T} tokens, {labels[-1]}, attends to",
        f"layer {layer}: what {labels[-1]} attends to",
        f"layer {layer}",
    )
    yield next((heading for heading in headings if len(heading) <= screen.width), headings[-1])
    last = weights[layer, :, -1]  # (H, T)
    found = last.topk(min(3, T))
    tops = [
        ", ".join(f"{labels[at]} {value:.3f}" for value, at in zip(*row, strict=True))
        for row in zip(found.values.tolist(), found.indices.tolist(), strict=True)
    ]
    fits = len("  head 00    ") + T + max(map(len, tops)) <= screen.width
    for head, (row, top) in enumerate(zip(last.tolist(), tops, strict=True)):
        strip = f"{_cells(row, screen, 1)}  " if fits else ""
        yield f"  head {head:<2}  {strip}{top}"


def head_lines(weights: Tensor, labels: Sequence[str], layer: int, head: int, screen: Screen) -> Iterator[str]:
    """One head: the last token's weight on every token, and the whole matrix where the screen has room for it."""
    pattern = weights[layer, head]
    last = pattern[-1]
    top = int(last.argmax())
    yield f"layer {layer} head {head}: {labels[-1]} attends most to {labels[top]} (position {top}), {last[top]:.3f}"
    wide = max(len(text) for text in labels)
    fits = wide + 2 * len(labels) + 24 <= screen.width
    yield f"  position  {'token':<{wide}}  weight{'  every row: what that token attends to' if fits else ''}"
    for at, text in enumerate(labels):
        row = "  " + _cells(pattern[at, : at + 1].tolist(), screen, 2).rstrip() if fits else ""
        yield f"  {at:>8}  {text:<{wide}}  {last[at]:>6.3f}{row}".rstrip()


def _cells(row: Sequence[float], screen: Screen, wide: int) -> str:
    """A row of weights as shaded cells of `wide` characters; the shade is that of the weight's square root."""
    if screen.colour:
        colours = [_RAMP[min(int(math.sqrt(weight) * len(_RAMP)), len(_RAMP) - 1)] for weight in row]
        return "".join(f"\x1b[48;5;{colour}m{' ' * wide}" for colour in colours) + "\x1b[0m"
    shades = _SHADES[screen.blocks]
    return "".join(shades[min(int(math.sqrt(weight) * len(shades)), len(shades) - 1)] * wide for weight in row)


def head_records(
    weights: Tensor, ids: Sequence[int], labels: Sequence[str], layers: Sequence[int], heads: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One record a head: the token that the last one attends to most, and the matrix."""
    for layer in layers:
        for head in heads:
            pattern = weights[layer, head]
            at = int(pattern[-1].argmax())
            top = {"position": at, "token": labels[at], "weight": float(pattern[-1, at])}
            record = {"layer": layer, "head": head, "ids": list(ids), "tokens": list(labels), "top": top}
            yield {**record, "weights": pattern.tolist()}


def role_records(roles: Mapping[str, Tensor], pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """One record for each (layer, head) with its score for every role; None where the text could not tell."""
    found = []
    for layer, head in pairs:
        scores = {role: float(values[layer, head]) for role, values in roles.items()}
        found.append({"layer": layer, "head": head, **{k: None if math.isnan(v) else v for k, v in scores.items()}})
    return found


def role_lines(roles: Mapping[str, Tensor], pairs: Sequence[tuple[int, int]], about: str) -> Iterator[str]:
    """The strongest heads for each role, then the table of all."""
    records = role_records(roles, pairs)
    yield f"head roles on {about}, from 0 to 1"
    for role in roles:
        best = sorted((r for r in records if r[role] is not None), key=lambda r: -r[role])[:5]
        strongest = "  ".join(f"{r['layer']}.{r['head']} {r[role]:.3f}" for r in best)
        yield f"  {role:<10} {strongest or '- (no row to judge it by)'}"
    yield ""
    yield "  head " + "".join(f"{role:>11}" for role in roles)
    for record in records:
        scores = ("-" if record[role] is None else f"{record[role]:.3f}" for role in roles)
        yield f"  {record['layer']:>2}.{record['head']:<2}" + "".join(f"{score:>11}" for score in scores)


def lens_records(found: Lens, tokenizer: Tokenizer | None, top: int = 5) -> Iterator[dict[str, Any]]:
    """One record a stage: the residual's norm at every position, and the tokens that it predicts after the last."""
    probabilities = found.logits.softmax(-1)
    values, ids = probabilities.topk(min(top, probabilities.shape[-1]))
    for stage, norms in enumerate(found.norms.tolist()):
        predicted = [
            {"id": id, "token": label(tokenizer, id), "probability": value, "logit": float(found.logits[stage, id])}
            for value, id in zip(values[stage].tolist(), ids[stage].tolist(), strict=True)
        ]
        yield {"stage": f"block {stage - 1}" if stage else "embeddings", "norms": norms, "top": predicted}


def lens_lines(found: Lens, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A line a stage: the norm at the first position (often a sink) and at the last, and the likeliest next tokens."""
    yield f"  {'after':<10}  {'norm at 0':>9}  {'at the last':>11}  predicts"
    for record in lens_records(found, tokenizer):
        best = "  ".join(f"{one['token']} {one['probability']:.3f}" for one in record["top"])
        yield f"  {record['stage']:<10}  {record['norms'][0]:>9.1f}  {record['norms'][-1]:>11.1f}  {best}"


def loss_lines(losses: Sequence[tuple[int, int, float]]) -> Iterator[str]:
    """Heads by what the text's mean loss rises by without them, in the order given."""
    yield "  head   loss without it, in nats a token"
    for layer, head, increase in losses:
        yield f"  {layer:>2}.{head:<2}  {increase:>+15.4f}"


def check_page(n_tokens: int, n_patterns: int) -> None:
    """PromptError if a page with this many patterns of this many tokens would pass PAGE_LIMIT."""
    size = n_patterns * n_tokens * (n_tokens + 1) // 2 * 2 * 4 // 3  # 16 bits each, in base 64
    if size > PAGE_LIMIT:
        raise PromptError(
            f"the page for {n_tokens} tokens and {n_patterns} heads would take {size / 10**6:.0f} MB, more than "
            f"{PAGE_LIMIT // 10**6}: shorten the text, or choose one --layer or a few --head"
        )


def page(
    weights: Tensor,
    ids: Sequence[int],
    tokenizer: Tokenizer | None,
    *,
    model: str = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    roles: Sequence[tuple[str, Mapping[str, Tensor]]] = (),
    ablated: Sequence[str] = (),
) -> str:
    """A self-contained HTML page of the patterns [L,H,T,T]; it needs no network, and all text in it is escaped.

    model: a name for the heading.        layers, heads: which to show, all where not given.
    roles: maps of head roles to show, as (what they were measured on, {role: [L,H]}).
    ablated: the heads that were switched off, as "layer.head".
    Raises PromptError if the page would be larger than PAGE_LIMIT.
    """
    L, H, T, _ = weights.shape
    layers = range(L) if layers is None else layers
    heads = range(H) if heads is None else heads
    check_page(T, len(layers) * len(heads))
    rows, columns = torch.tril_indices(T, T)
    encoded = []
    for layer in layers:
        # (heads, T, T) -> the lower triangles, row by row, as little-endian 16-bit numbers
        values = array("H", (weights[layer, list(heads)][:, rows, columns] * _STEPS).round().int().flatten().tolist())
        if sys.byteorder == "big":
            values.byteswap()
        encoded.append(base64.b64encode(values.tobytes()).decode())
    maps = []
    for about, scores in roles:
        grids = {
            role: [[None if math.isnan(score) else round(score, 4) for score in row] for row in grid.tolist()]
            for role, grid in scores.items()
        }
        maps.append({"about": about, "scores": grids})
    tokens = [pieces(tokenizer, id) for id in ids]
    data = {"model": model, "tokens": tokens, "layers": list(layers), "heads": list(heads), "maps": maps}
    text = json.dumps({**data, "ablated": list(ablated), "weights": encoded})
    # Inside <script>, the only thing that can end or change the data is a "<".
    template = (files("minigpt") / "data" / "attention.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text.replace("<", "\\u003c"))


def report(lm: LanguageModel, ids: list[int] | None, args: argparse.Namespace, screen: Screen) -> Iterator[str]:
    """The lines that the `attention` command prints for its arguments; with --html, it writes the page first.

    ids: the text, checked; None, with --roles: random tokens that come twice.
    Raises what attention.py raises, ValueError for heads that do not exist, PromptError for too large a page.
    """
    config = lm.config
    layers = chosen("layer", args.layer, config.n_layer)
    heads = chosen("head", args.head, config.n_head)
    off = attention.named_heads(config, args.ablate)
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
        found = attention.lens(lm.model, ids, off)
        yield from map(json.dumps, lens_records(found, lm.tokenizer)) if args.json else lens_lines(found, lm.tokenizer)
        return
    pairs = [(layer, head) for layer in layers for head in heads]
    if args.rank:
        yield from _rank(lm, ids, pairs, off, args.json)
        return
    weights = attention.patterns(lm.model, ids, off)
    labels = [label(lm.tokenizer, id) for id in ids]
    if args.roles:
        roles = attention.head_roles(weights, ids)
        yield from map(json.dumps, role_records(roles, pairs)) if args.json else role_lines(roles, pairs, about)
    elif args.json:
        yield from map(json.dumps, head_records(weights, ids, labels, layers, heads))
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
    return attention.repeated_random(candidates, lm.config.n_positions)


def _write_page(
    lm: LanguageModel, ids: list[int], args: argparse.Namespace, layers: list[int], heads: list[int]
) -> str:
    """Write the page to args.html, with the roles on this text and, with --roles, on random tokens; a line about it."""
    check_page(len(ids), len(layers) * len(heads))
    weights = lm.attention(ids, ablate=args.ablate)
    roles = [("this text", attention.head_roles(weights, ids))]
    if args.roles:
        again = _random_ids(lm)
        scores = attention.head_roles(lm.attention(again, ablate=args.ablate), again)
        roles.append((f"{len(again) // 2} random tokens that come twice", scores))
    made = page(
        weights, ids, lm.tokenizer, model=args.model, layers=layers, heads=heads, roles=roles, ablated=args.ablate
    )
    data = made.encode()
    Path(args.html).write_bytes(data)
    return f"{args.html}: {len(layers)} x {len(heads)} heads, {len(ids)} tokens, {len(data) // 1000:,} KB"


def _rank(
    lm: LanguageModel, ids: list[int], pairs: list[tuple[int, int]], off: list[tuple[int, int]], as_json: bool
) -> Iterator[str]:
    """The ranking, most needed head first, with a bar on stderr meanwhile if that is a terminal."""
    losses = []
    for done, one in enumerate(attention.ablation_losses(lm.model, ids, pairs, off), 1):
        losses.append(one)
        if sys.stderr.isatty():
            bar = "#" * (40 * done // len(pairs))
            print(f"\r[{bar:<40}] {done}/{len(pairs)} heads", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(f"\r{'':70}\r", end="", file=sys.stderr, flush=True)
    losses.sort(key=lambda one: -one[2])
    if as_json:
        yield from (json.dumps({"layer": layer, "head": head, "increase": rise}) for layer, head, rise in losses)
    else:
        yield from loss_lines(losses)
