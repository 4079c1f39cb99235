"""Vocabulary files: read, check, and turn into what the BPE needs; or GPT-2's own, shipped in data/.

data/gpt2.tokens.z holds GPT-2's tokens 256 to 50255 in id order, joined by 0xFF, which none contains, and deflated. The
tests rebuild the official vocab.json and merges.txt from it, byte for byte. Nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import TokenizerError
from minigpt.files import reading
from minigpt.files.reading import cure

END_OF_TEXT = "<|endoftext|>"


# How files spell a byte: itself if printable, else the next character from U+0100. The order is that of GPT-2's ids.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))


_ALPHABET = {chr(byte): byte for byte in _PRINTABLE}


_ALPHABET |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


_BYTES = [bytes([byte]) for byte in _ALPHABET.values()]


# sha256 of the files in OpenAI's checkpoints, the same in every size: they hold the vocabulary shipped here.
_OFFICIAL = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "tokenizer.json": "8414cab924d8b9b33013f0d221c5862f365ee9be39c5c2bfae8a5a9e970478a6",
}


# What a tokenizer.json may say, by part and setting (absent is None): the byte-level BPE of GPT-2 and nothing else.
_OFF = (None, False, "")


_PIPELINE: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "type": (None, "BPE"),
        "dropout": _OFF,
        "continuing_subword_prefix": _OFF,
        "end_of_word_suffix": _OFF,
        "byte_fallback": _OFF,
        "ignore_merges": _OFF,
    },
    "normalizer": {"type": (None,)},
    "pre_tokenizer": {"type": ("ByteLevel",), "add_prefix_space": _OFF, "use_regex": (None, True)},
    "post_processor": {"type": (None, "ByteLevel", "TemplateProcessing"), "special_tokens": (None, {})},
    "decoder": {"type": ("ByteLevel",)},
}


class Vocabulary(NamedTuple):
    """What BPE needs. A token's rank is its place in `tokens`: the 256 bytes, then what each merge makes, in order."""

    tokens: Sequence[bytes]
    ids: Sequence[int]  # by rank; -1 for a byte that the vocabulary lacks
    others: Mapping[str, int]  # tokens that no merge makes


class Added(NamedTuple):
    """An added token: looked for in the text before BPE, a special one only on request."""

    id: int
    special: bool
    normalized: bool  # these are looked for last; as no normalizer is supported, it means nothing else


def gpt2_vocabulary() -> Vocabulary:
    """The vocabulary of OpenAI's GPT-2, from this package."""
    data = files("minigpt").joinpath("data", "gpt2.tokens.z").read_bytes()
    tokens = _BYTES + zlib.decompress(data).split(b"\xff")
    return Vocabulary(tokens, range(len(tokens)), {END_OF_TEXT: len(tokens)})


def read_vocabulary(folder: Path, vocab_size: int) -> tuple[Vocabulary, dict[str, Added]] | None:
    """What vocab.json + merges.txt, else tokenizer.json, in `folder` hold, and its added tokens.

    Without them it is GPT-2's vocabulary if vocab_size allows, else None.

    Raises TokenizerError, naming the file and the cure, if it is damaged or is not GPT-2's kind of tokenizer.
    """
    config_path, pipeline_path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config = read_json(config_path)
    for name in ("add_prefix_space", "add_bos_token", "add_eos_token"):
        if config.get(name):
            raise TokenizerError(f"{config_path}: {name} is not supported")
    pipeline = _read_pipeline(pipeline_path)
    vocab_path, merges_path = folder / "vocab.json", folder / "merges.txt"
    has_vocab, has_merges = _is_file(vocab_path), _is_file(merges_path)
    if has_vocab and has_merges:
        if _is_official(vocab_path) and _is_official(merges_path):
            vocabulary = gpt2_vocabulary()
        else:
            vocabulary = _build(vocab_path, read_json(vocab_path), merges_path, _read_merges(merges_path))
    elif pipeline:
        merges_path, model = pipeline_path, pipeline["model"]
        vocabulary = _build(pipeline_path, model.get("vocab"), pipeline_path, model.get("merges"))
    elif has_vocab or has_merges:
        raise TokenizerError(f"{folder} has only one of vocab.json and merges.txt: copy the other one beside it")
    elif _is_file(pipeline_path) or (vocab_size >= 50257 and "GPT2" in str(config.get("tokenizer_class", "GPT2"))):
        vocabulary = gpt2_vocabulary()
    else:
        return None
    try:
        added = _added_tokens(folder, pipeline, config, vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{folder}: its added tokens are damaged ({error!r}): download it again") from None
    for token in vocabulary.others:
        if token not in added and _is_word(token):
            raise TokenizerError(f"{merges_path} is incomplete, no merge makes {token!r}: {cure(merges_path)}")
    return vocabulary, added


def _build(vocab_path: Path, vocab: Any, merges_path: Path, merges: Any) -> Vocabulary:
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
    saved = {"vocab.json": json.dumps(vocab), "merges.txt": "\n".join(["#version: 0.2", *lines, ""])}
    if all(_digest(text) == _OFFICIAL[name] for name, text in saved.items()):
        return gpt2_vocabulary()  # saved in another form: saves a second of checks
    tokens, ids = list(_BYTES), [vocab.get(char, -1) for char in _ALPHABET]
    others = {spelling: id for spelling, id in vocab.items() if spelling not in _ALPHABET}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for number, line in enumerate(lines, 1):
        where, parts = f"{merges_path}, merge {number}, {line!r}", line.split(" ")
        if len(parts) != 2 or any(part not in vocab for part in (*parts, "".join(parts))):
            raise TokenizerError(
                f"{where}: not two tokens that make a third one: {cure(merges_path)}, and {vocab_path.name}"
            )
        try:
            left, right = map(_to_bytes, parts)
        except KeyError:
            raise TokenizerError(f"{where}: not in GPT-2's spelling of bytes, the only one supported") from None
        if _apply(ranks, left + right) != [left, right]:
            raise TokenizerError(f"{where}: does not follow from the merges before it: {cure(merges_path)}")
        ranks[left + right] = len(tokens)
        tokens.append(left + right)
        ids.append(others.pop("".join(parts)))
    return Vocabulary(tokens, ids, others)


def _apply(ranks: Mapping[bytes, int], token: bytes) -> list[bytes]:
    """BPE by its definition: the parts that the merges in `ranks` leave of `token`.

    A queue of the joins that are possible, the best first, so that a token of a million bytes takes no hours.
    """
    ends = [*range(1, len(token) + 1), 0]  # where the part ends that begins here; 0: none begins here
    starts = [*range(-1, len(token))]  # where the part begins that ends before this
    queue: list[tuple[int, int, int, int]] = []

    def push(start: int, middle: int) -> None:
        if start >= 0 and (end := ends[middle]) and (rank := ranks.get(token[start:end])) is not None:
            heapq.heappush(queue, (rank, start, middle, end))

    for start in range(len(token) - 1):
        push(start, start + 1)
    while queue:
        _, start, middle, end = heapq.heappop(queue)
        if ends[start] == middle and ends[middle] == end:
            ends[start], ends[middle], starts[end] = end, 0, start
            push(starts[start], start)
            push(start, end)
    return [token[start:end] for start, end in enumerate(ends) if end]


def _to_bytes(spelling: str) -> bytes:
    """Raises KeyError for what is not a byte-level token."""
    return bytes([_ALPHABET[char] for char in spelling])


def text_bytes(spelling: str) -> bytes:
    try:
        return _to_bytes(spelling)
    except KeyError:
        return spelling.encode(errors="replace")


def _is_word(spelling: str) -> bool:
    """Whether merges must have made this token: the pattern would not cut it (nearly), as it would <pad> or [PAD]."""
    text = text_bytes(spelling).decode(errors="replace").strip()
    return len({unicodedata.category(char)[0].strip("MPSCZ") for char in text}) < 2  # letters, numbers, all others


def _added_tokens(folder: Path, pipeline: Any, config: Any, vocabulary: Vocabulary) -> dict[str, Added]:
    """Every added token that the folder's files list. Special are those marked so, and those that have a role."""
    ranks = {token: rank for rank, token in enumerate(vocabulary.tokens)}

    def find(spelling: str) -> int | None:
        """The id of a token, spelled as in the file."""
        if spelling in vocabulary.others:
            return vocabulary.others[spelling]
        try:
            id = vocabulary.ids[ranks[_to_bytes(spelling)]]
        except KeyError:
            return None
        return None if id < 0 else id

    roles: dict[str, Any] = {END_OF_TEXT: {}}
    for key, value in (read_json(folder / "special_tokens_map.json") | config).items():
        if key.endswith(("_token", "special_tokens")):  # bos_token: one; additional_special_tokens: many, even by name
            named = isinstance(value, dict) and "content" not in value
            for item in value.values() if named else value if isinstance(value, list) else [value]:
                if isinstance(item, (str, dict)):
                    roles |= {item: {}} if isinstance(item, str) else {item["content"]: item}
    found = [(folder / "tokenizer.json", item) for item in pipeline.get("added_tokens") or ()]
    path = folder / "tokenizer_config.json"
    found += [(path, {**item, "id": int(id)}) for id, item in config.get("added_tokens_decoder", {}).items()]
    path = folder / "added_tokens.json"
    found += [(path, {"content": text, "id": id}) for text, id in read_json(path).items()]
    # A role's token without an id is one that this vocabulary lacks.
    ids = {text: find(text) for text in roles}
    found += [(folder, {**roles[text], "content": text, "id": id}) for text, id in ids.items() if id is not None]
    added: dict[str, Added] = {}
    taken = {*vocabulary.ids, *vocabulary.others.values()}
    for path, item in found:
        text, id = item["content"], item["id"]
        for flag in ("single_word", "lstrip", "rstrip"):
            if item.get(flag):
                raise TokenizerError(f"{path}: the added token {text!r} has {flag} set, which is not supported")
        known = added[text].id if text in added else find(text)
        if not text or type(id) is not int or id < 0 or (id != known and (known is not None or id in taken)):
            raise TokenizerError(f"{path}: the added token {text!r} has an id, {id!r}, that contradicts the rest")
        taken.add(id)
        special = text in roles or bool(item.get("special"))
        added.setdefault(text, Added(id, special, bool(item.get("normalized", not special))))
    return added


def _read_pipeline(path: Path) -> dict[str, Any]:
    """The contents of a tokenizer.json; {} if there is none, or if it is GPT-2's own.

    Raises TokenizerError, naming the setting, if it does anything that GPT-2's does not.
    """
    if not _is_file(path) or _is_official(path):
        return {}
    pipeline = read_json(path)
    for name, settings in _PIPELINE.items():
        part = pipeline.get(name) or {}
        if not isinstance(part, dict) or (name == "model" and not part):
            raise TokenizerError(f"{path} is damaged, its {name} is {part!r}: {cure(path)}")
        for setting, supported in settings.items():
            if part.get(setting) not in supported:
                raise TokenizerError(f"{path}: {name} with {setting} = {part.get(setting)!r} is not supported")
    return pipeline


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    return reading.read_json(path, TokenizerError) if _is_file(path) else {}


def _is_file(path: Path) -> bool:
    return reading.is_file(path, TokenizerError)


def _read_merges(path: Path) -> list[str]:
    return [line for line in reading.read_text(path, TokenizerError).splitlines() if not line.startswith("#version")]


def _is_official(path: Path) -> bool:
    return _digest(reading.read_text(path, TokenizerError)) == _OFFICIAL[path.name]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
