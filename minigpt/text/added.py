"""Added tokens: those that a checkpoint's files list beside the vocabulary, and which of them are special."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import TokenizerError
from minigpt.text.vocabulary import END_OF_TEXT, Vocabulary, text_bytes, to_bytes


class Added(NamedTuple):
    """An added token: looked for in the text before BPE, a special one only on request."""

    id: int
    special: bool
    normalized: bool  # these are looked for last; as no normalizer is supported, it means nothing else


GPT2_ADDED = {END_OF_TEXT: Added(50256, special=True, normalized=False)}


def read_added(
    folder: Path, listed: list[Any], sides: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary
) -> dict[str, Added]:
    """Every added token. Special are those marked so, and those that have a role, such as bos_token.

    listed: "added_tokens" of tokenizer.json.   sides: the contents of the other JSON files, by their names.
    Raises TokenizerError if they contradict each other, or are damaged.
    """
    try:
        return _read_added(folder, listed, sides, vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{folder}: its added tokens are damaged ({error!r}): download it again") from None


def _read_added(
    folder: Path, listed: list[Any], sides: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary
) -> dict[str, Added]:
    ranks = {token: rank for rank, token in enumerate(vocabulary.tokens)}

    def find(spelling: str) -> int | None:
        """The id of a token, spelled as in the file."""
        if spelling in vocabulary.others:
            return vocabulary.others[spelling]
        try:
            id = vocabulary.ids[ranks[to_bytes(spelling)]]
        except KeyError:
            return None
        return None if id < 0 else id

    config = sides["tokenizer_config.json"]
    roles = _roles({**sides["special_tokens_map.json"], **config})
    found = [(folder / "tokenizer.json", item) for item in listed]
    path = folder / "tokenizer_config.json"
    found += [(path, {**item, "id": int(id)}) for id, item in config.get("added_tokens_decoder", {}).items()]
    path = folder / "added_tokens.json"
    found += [(path, {"content": text, "id": id}) for text, id in sides["added_tokens.json"].items()]
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


def _roles(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """{text: its flags} of the tokens that have a role: bos_token has one, additional_special_tokens many."""
    roles: dict[str, Mapping[str, Any]] = {END_OF_TEXT: {}}
    for key, value in settings.items():
        if key.endswith(("_token", "special_tokens")):
            named = isinstance(value, dict) and "content" not in value
            for item in value.values() if named else value if isinstance(value, list) else [value]:
                if isinstance(item, (str, dict)):
                    roles |= {item: {}} if isinstance(item, str) else {item["content"]: item}
    return roles


def unmade_words(vocabulary: Vocabulary, added: Mapping[str, Added]) -> Iterator[str]:
    """Tokens that merges must have made, and that none makes: the pattern would not cut them, as it would <pad>."""
    for token in vocabulary.others:
        if token not in added:
            text = text_bytes(token).decode(errors="replace").strip()
            # Letters, numbers, all others: one kind at most.
            if len({unicodedata.category(char)[0].strip("MPSCZ") for char in text}) < 2:
                yield token
