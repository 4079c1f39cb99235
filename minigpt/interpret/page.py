"""What heads.py finds as one page for a browser. Shapes are named as there."""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minigpt.errors import PromptError
from minigpt.files.reading import shipped

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer

PAGE_LIMIT = 50 * 10**6  # bytes: browsers open more, but no longer at once
_STEPS = 65535  # a weight is a 16-bit number in the page: off by at most 0.5 / 65535 = 7.6e-6


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
        if bool(mark) == len(found) % 2:
            found.append("")
        found[-1] += mark or character
    return found


def _rounded(grid: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(score) else round(score, 4) for score in row] for row in grid.tolist()]


def check_page(n_tokens: int, n_patterns: int) -> None:
    """PromptError if a page with this many patterns of this many tokens would pass PAGE_LIMIT."""
    size = n_patterns * n_tokens * (n_tokens + 1) // 2 * 2 * 4 // 3  # 16 bits each, in base 64
    if size > PAGE_LIMIT:
        found = f"the page for {n_tokens} tokens and {n_patterns} heads would take {size / 10**6:.0f} MB"
        cure = "shorten the text, or choose one --layer or a few --head"
        raise PromptError(f"{found}, more than {PAGE_LIMIT // 10**6}: {cure}")


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
    rows, columns = torch.tril_indices(T, T, device=weights.device)
    encoded = []
    for layer in layers:
        # (heads, T, T) -> the lower triangles, row by row, as little-endian 16-bit numbers
        values = array("H", (weights[layer, list(heads)][:, rows, columns] * _STEPS).round().int().flatten().tolist())
        encoded.append(base64.b64encode(values.tobytes()).decode())
    maps = [
        {"about": about, "scores": {role: _rounded(grid) for role, grid in scores.items()}} for about, scores in roles
    ]
    tokens = [pieces(tokenizer, id) for id in ids]
    data = {"model": model, "tokens": tokens, "layers": list(layers), "heads": list(heads), "maps": maps}
    text = json.dumps({**data, "ablated": list(ablated), "weights": encoded})
    # Inside <script>, the only thing that can end or change the data is a "<".
    return shipped("attention.html").decode().replace("__DATA__", text.replace("<", "\\u003c"))
