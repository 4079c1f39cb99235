"""What heads.py finds as lines for a terminal and records for programs. Shapes are named as there."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import Tensor

    from minigpt.interpret.heads import Lens
    from minigpt.text.tokenizer import Tokenizer

_SHADES = " .:*#"
_RAMP = (235, 53, 89, 125, 161, 167, 203, 209, 215, 222, 230)  # of the 256-colour palette, dark to bright


@dataclass(frozen=True)
class Screen:
    """What the output can show. width: columns; colour: ANSI sequences."""

    width: int = 80
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """What `stream` can show: colour only if it is a terminal, and not where NO_COLOR is set."""
        colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(shutil.get_terminal_size().columns, colour)


def label(tokenizer: Tokenizer | None, id: int) -> str:
    """A token for the eye: a quoted string, quoted bytes if it is part of a character, or #id."""
    if tokenizer is None or id not in tokenizer:
        return f"#{id}"
    data = tokenizer.token_bytes(id)
    text = data.decode("utf-8", "replace")
    return repr(text if text.encode() == data else data)


def token_record(tokenizer: Tokenizer | None, id: int) -> dict[str, Any]:
    """A token as JSON: id, text (U+FFFD for what is no character) and bytes; None for an unknown one's."""
    if tokenizer is None or id not in tokenizer:
        return {"id": id, "token": None, "bytes": None}
    data = tokenizer.token_bytes(id)
    return {"id": id, "token": data.decode("utf-8", "replace"), "bytes": list(data)}


def layer_lines(weights: Tensor, labels: Sequence[str], layer: int, screen: Screen) -> Iterator[str]:
    """One line a head: what the last token attends to, as a strip of shades (if all fit) and the three largest."""
    T = len(labels)
    yield f"layer {layer}: what the last of {T} tokens, {labels[-1]}, attends to"[: screen.width]
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
    """One head: the last token's weight on every token, and the whole matrix where the screen has room."""
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
    cells = [f"\x1b[48;5;{colour}m{' ' * wide}" for colour in _RAMP] if screen.colour else [s * wide for s in _SHADES]
    shown = (cells[min(int(math.sqrt(weight) * len(cells)), len(cells) - 1)] for weight in row)
    return "".join(shown) + "\x1b[0m" * screen.colour


def head_records(
    weights: Tensor, ids: Sequence[int], tokenizer: Tokenizer | None, pairs: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """One record for each (layer, head): the token that the last one attends to most, and the matrix."""
    tokens = [token_record(tokenizer, id) for id in ids]
    for layer, head in pairs:
        pattern = weights[layer, head]
        at = int(pattern[-1].argmax())
        top = {"position": at, **tokens[at], "weight": float(pattern[-1, at])}
        record = {"layer": layer, "head": head, "ids": list(ids), "tokens": tokens, "top": top}
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
            {**token_record(tokenizer, id), "probability": value, "logit": float(found.logits[stage, id])}
            for value, id in zip(values[stage].tolist(), ids[stage].tolist(), strict=True)
        ]
        yield {"stage": f"block {stage - 1}" if stage else "embeddings", "norms": norms, "top": predicted}


def lens_lines(found: Lens, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A line a stage: the norm at the first position (often a sink) and at the last, and the likeliest next tokens."""
    yield f"  {'after':<10}  {'norm at 0':>9}  {'at the last':>11}  predicts"
    for record in lens_records(found, tokenizer):
        best = "  ".join(f"{label(tokenizer, one['id'])} {one['probability']:.3f}" for one in record["top"])
        yield f"  {record['stage']:<10}  {record['norms'][0]:>9.1f}  {record['norms'][-1]:>11.1f}  {best}"


def loss_lines(losses: Sequence[tuple[int, int, float]]) -> Iterator[str]:
    """Heads, in the order given, with the rise of the text's mean loss without them."""
    yield "  head   loss without it, in nats a token"
    for layer, head, increase in losses:
        yield f"  {layer:>2}.{head:<2}  {increase:>+15.4f}"
