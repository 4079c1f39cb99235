"""OpenAI's vocab.json and merges.txt, rebuilt from the vocabulary in the package."""

from __future__ import annotations

import json
from pathlib import Path

from minigpt import Tokenizer

# How GPT-2's files spell bytes: printable ones as themselves, the others as the characters from 256 on.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
SPELLING = {byte: chr(byte) for byte in PRINTABLE}
SPELLING |= {byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}


def halves(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The two tokens whose merge makes `token`: what BPE leaves of its bytes with the merges before it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        _, at = min((ranks.get(parts[at] + parts[at + 1], len(ranks)), at) for at in range(len(parts) - 1))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def write_official(folder: Path) -> Path:
    """Writes both files, and gives the folder back."""

    def spell(token: bytes) -> str:
        return "".join(SPELLING[byte] for byte in token)

    gpt2 = Tokenizer.gpt2()
    tokens = [gpt2.token_bytes(id) for id in range(50256)]
    vocab = {spell(token): id for id, token in enumerate(tokens)} | {"<|endoftext|>": 50256}
    ranks = {token: rank for rank, token in enumerate(tokens[:256])}
    merges = ["#version: 0.2"]
    for token in tokens[256:]:
        merges.append(" ".join(map(spell, halves(ranks, token))))
        ranks[token] = len(ranks)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join([*merges, ""]), encoding="utf-8", newline="\n")
    return folder
