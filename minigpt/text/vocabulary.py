"""A vocabulary: read from a checkpoint's files, checked, and turned into what the BPE needs; or GPT-2's own.

data/gpt2.tokens.z holds GPT-2's tokens 256 to 50255 in id order, joined by 0xFF, which none contains, and deflated.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import TokenizerError
from minigpt.files.reading import cure, shipped

END_OF_TEXT = "<|endoftext|>"

# How files spell a byte: itself if printable, else the next character from U+0100. The order is that of GPT-2's ids.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
ALPHABET = {chr(byte): byte for byte in _PRINTABLE}
ALPHABET |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}
_SPELLING = {byte: char for char, byte in ALPHABET.items()}
_BYTES = [bytes([byte]) for byte in ALPHABET.values()]
_LONGEST = 10_000  # bytes of a token: the time to check one grows with the square

# sha256 of the files in OpenAI's checkpoints, the same in every size: they hold the vocabulary shipped here.
_OFFICIAL = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "tokenizer.json": "8414cab924d8b9b33013f0d221c5862f365ee9be39c5c2bfae8a5a9e970478a6",
}


class Vocabulary(NamedTuple):
    """What BPE needs. A token's rank is its place in `tokens`: the 256 bytes, then what each merge makes, in order."""

    tokens: Sequence[bytes]
    ids: Sequence[int]  # by rank; -1 for a byte that the vocabulary lacks
    others: Mapping[str, int]  # tokens that no merge makes


def gpt2_vocabulary() -> Vocabulary:
    """The vocabulary of OpenAI's GPT-2, from this package. Raises MiniGPTError where the package lacks its data."""
    tokens = _BYTES + zlib.decompress(shipped("gpt2.tokens.z")).split(b"\xff")
    return Vocabulary(tokens, range(len(tokens)), {END_OF_TEXT: len(tokens)})


def official_files() -> dict[str, bytes]:
    """OpenAI's vocab.json and merges.txt, byte for byte, made from the vocabulary in this package."""
    tokens, _, others = gpt2_vocabulary()
    ranks = {token: rank for rank, token in enumerate(tokens)}
    spelled = {token: "".join(_SPELLING[byte] for byte in token) for token in tokens}
    merges = [" ".join(spelled[part] for part in _apply(ranks, token, ranks[token])) for token in tokens[256:]]
    return _saved({spelled[token]: rank for token, rank in ranks.items()} | dict(others), merges)


def _saved(vocab: Mapping[str, int], merges: Sequence[str]) -> dict[str, bytes]:
    texts = {"vocab.json": json.dumps(vocab), "merges.txt": "\n".join(["#version: 0.2", *merges, ""])}
    return {name: text.encode(errors="replace") for name, text in texts.items()}


def is_official(name: str, data: bytes) -> bool:
    """Whether this file is the one in OpenAI's checkpoints."""
    return hashlib.sha256(data).hexdigest() == _OFFICIAL[name]


def build(vocab_path: Path, vocab: Any, merges_path: Path, merges: Any) -> Vocabulary:
    """The vocabulary that {token: id} and a list of merges, "left right" or [left, right], stand for.

    tiktoken joins any neighbours that make a token, the lowest rank first; Hugging Face only the listed pairs. It comes
    to the same if each merge joins just what the merges before it leave of the token that it makes: then that token can
    come up in no other way. Training gives such lists, so any other is taken for damage.
    """
    if not isinstance(vocab, dict) or not vocab or any(type(id) is not int or id < 0 for id in vocab.values()):
        raise TokenizerError(f"{vocab_path} is not a map from tokens to ids: {cure(vocab_path)}")
    if len(set(vocab.values())) < len(vocab):
        raise TokenizerError(f"{vocab_path} gives one id to two tokens: {cure(vocab_path)}")
    try:
        lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    except TypeError:
        raise TokenizerError(f"{merges_path} holds no list of merges: {cure(merges_path)}") from None
    if all(is_official(name, data) for name, data in _saved(vocab, lines).items()):
        return gpt2_vocabulary()  # saved in another form: saves a second of checks
    tokens, ids = list(_BYTES), [vocab.get(char, -1) for char in ALPHABET]
    others = {spelling: id for spelling, id in vocab.items() if spelling not in ALPHABET}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for number, line in enumerate(lines, 1):
        where, parts = f"{merges_path}, merge {number}, {line[:200]!r}", line.split(" ")
        if len(parts) != 2 or any(part not in vocab for part in (*parts, "".join(parts))):
            remedy = f"{cure(merges_path)}, and {vocab_path.name}"
            raise TokenizerError(f"{where}: not two tokens that make a third one: {remedy}")
        try:
            left, right = map(to_bytes, parts)
        except KeyError:
            raise TokenizerError(f"{where}: not in GPT-2's spelling of bytes, the only one supported") from None
        if len(left + right) > _LONGEST:
            raise TokenizerError(f"{where}: a token of more than {_LONGEST} bytes is not supported")
        if _apply(ranks, left + right) != [left, right]:
            raise TokenizerError(f"{where}: does not follow from the merges before it: {cure(merges_path)}")
        ranks[left + right] = len(tokens)
        tokens.append(left + right)
        ids.append(others.pop("".join(parts)))
    return Vocabulary(tokens, ids, others)


def _apply(ranks: Mapping[bytes, int], token: bytes, below: float = math.inf) -> list[bytes]:
    """BPE by its definition, with the ranks under `below`: join the neighbours of the lowest rank, again and again."""

    def rank(pair: tuple[bytes, bytes]) -> float:
        found = ranks.get(pair[0] + pair[1], math.inf)
        return found if found < below else math.inf

    parts = [token[at : at + 1] for at in range(len(token))]
    joins = [*map(rank, pairwise(parts))]
    while joins and (lowest := min(joins)) < math.inf:
        at = joins.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        joins[max(at - 1, 0) : at + 2] = map(rank, pairwise(parts[max(at - 1, 0) : at + 2]))
    return parts


def to_bytes(spelling: str) -> bytes:
    """The bytes of a token. Raises KeyError for what is not spelled as byte-level tokens are."""
    return bytes([ALPHABET[char] for char in spelling])


def text_bytes(spelling: str) -> bytes:
    """The bytes of any token: of one that is not byte-level, those of its text."""
    try:
        return to_bytes(spelling)
    except KeyError:
        return spelling.encode(errors="replace")
