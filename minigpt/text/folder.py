"""Which tokenizer a checkpoint's folder has: its own vocabulary and added tokens, GPT-2's, or a sentence why none.

Another vocabulary than the model's own gives wrong ids without a word, so whatever speaks against GPT-2's is heeded.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import TokenizerError
from minigpt.files.reading import OTHER_TOKENIZERS, SIDES, TOKENIZER_FILES, as_json, as_text, cure, is_file, read_bytes
from minigpt.text.vocabulary import END_OF_TEXT, Vocabulary, build, gpt2_vocabulary, is_official, text_bytes, to_bytes

_ANY_CLASS = ("GPT2", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # the last ones say nothing
_PADDED = {-(-50257 // step) * step for step in (1, 8, 64, 128, 256, 512)}  # sizes of GPT-2's vocabulary with more rows
_IDS_ONLY = "which is not supported: give token ids, made with transformers"

# What a tokenizer.json may say, by part and setting (absent is None): the byte-level BPE of GPT-2 and nothing else.
_OFF = (None, False, "")
_EXTRAS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
_PIPELINE: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {"type": (None, "BPE"), **dict.fromkeys(_EXTRAS, _OFF)},
    "normalizer": {"type": (None,)},
    "pre_tokenizer": {"type": ("ByteLevel",), "add_prefix_space": _OFF, "use_regex": (None, True)},
    "post_processor": {"type": (None, "ByteLevel", "TemplateProcessing"), "special_tokens": (None, {})},
    "decoder": {"type": ("ByteLevel",)},
}


class Added(NamedTuple):
    """A token that files list beside the vocabulary: looked for in the text before BPE, a special one on request."""

    id: int
    special: bool
    normalized: bool  # these are looked for last; as no normalizer is supported, it means nothing else


class Found(NamedTuple):
    """What a folder has."""

    vocabulary: Vocabulary
    added: dict[str, Added]
    source: str  # the file(s) that the vocabulary is from; "" for the package
    files: dict[str, bytes]  # all tokenizer files, as they are


def read_folder(folder: Path, vocab_size: int, config: Mapping[str, Any]) -> Found | None:
    """What Tokenizer.from_folder reads. Raises CheckpointError for a file that cannot be read, else TokenizerError."""
    files = {name: read_bytes(folder / name) for name in TOKENIZER_FILES if is_file(folder / name)}
    sides = {name: as_json(folder / name, files[name]) if name in files else {} for name in SIDES}
    for name in ("add_prefix_space", "add_bos_token", "add_eos_token"):
        if sides["tokenizer_config.json"].get(name):
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: {name} is not supported")
    chosen = _choose(folder, files, sides["tokenizer_config.json"], vocab_size, config)
    if chosen is None:
        return None
    vocabulary, listed, source = chosen
    try:
        added = _read_added(folder, listed, sides, vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{folder}: its added tokens are damaged ({error!r}): download it again") from None
    plain = [token for token in vocabulary.others if token not in added]
    if unmade := [token for token in plain if _is_word(token)]:
        path = folder / (source.rpartition(" ")[2] or "vocab.json")
        raise TokenizerError(f"{path} is incomplete, no merge makes {unmade[0]!r}: {cure(path)}")
    # Added tokens may lie beyond it: fine-tunes often add one for padding that the model has no row for.
    highest = max(*vocabulary.ids, *(vocabulary.others[token] for token in plain))
    if highest >= vocab_size:
        raise TokenizerError(
            f"{folder}: the tokenizer has a token with id {highest}, but the model's vocab_size is {vocab_size}: "
            "use the tokenizer files that belong to this model"
        )
    return Found(vocabulary, added, source, files)


def _choose(
    folder: Path, files: Mapping[str, bytes], settings: Mapping[str, Any], vocab_size: int, config: Mapping[str, Any]
) -> tuple[Vocabulary, list[Any], str] | None:
    """The vocabulary, the added tokens that its file lists, and the name of that file."""
    if "tokenizer.json" in files:  # before the pair where a folder has both, as in transformers 5
        return *_from_pipeline(folder / "tokenizer.json", files["tokenizer.json"]), "tokenizer.json"
    _refuse_other_class(folder, settings, config)
    if "vocab.json" in files and "merges.txt" in files:
        return _from_pair(folder, files), [], "vocab.json and merges.txt"
    if "vocab.json" in files or "merges.txt" in files:
        raise TokenizerError(f"{folder} has only one of vocab.json and merges.txt: copy the other one beside it")
    _refuse_other_files(folder)
    if vocab_size < 50257:
        return None
    if not files and not config.get("tokenizer_class"):
        _warn_if_unlike_gpt2(folder, vocab_size, config)
    return gpt2_vocabulary(), [], ""


def _from_pair(folder: Path, files: Mapping[str, bytes]) -> Vocabulary:
    """The vocabulary that vocab.json and merges.txt stand for."""
    if all(is_official(name, files[name]) for name in ("vocab.json", "merges.txt")):
        return gpt2_vocabulary()
    path, merges = folder / "vocab.json", folder / "merges.txt"
    lines = [line for line in as_text(merges, files[merges.name]).splitlines() if not line.startswith("#version")]
    return build(path, as_json(path, files[path.name]), merges, lines)


def _from_pipeline(path: Path, data: bytes) -> tuple[Vocabulary, list[Any]]:
    """The vocabulary and the added tokens of a tokenizer.json, which may do nothing that GPT-2's does not."""
    if is_official("tokenizer.json", data):
        return gpt2_vocabulary(), []
    pipeline = as_json(path, data)
    for name, settings in _PIPELINE.items():
        part = pipeline.get(name) or {}
        if not isinstance(part, dict) or (name == "model" and not part):
            raise TokenizerError(f"{path} is damaged, its {name} is {part!r}: {cure(path)}")
        for setting, supported in settings.items():
            if part.get(setting) not in supported:
                raise TokenizerError(f"{path}: {name} with {setting} = {part.get(setting)!r} is not supported")
    model = pipeline["model"]
    return build(path, model.get("vocab"), path, model.get("merges")), pipeline.get("added_tokens") or []


def _refuse_other_class(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise where the first class that the files name is not GPT-2's kind of tokenizer."""
    for name, source in (("tokenizer_config.json", settings), ("config.json", config)):
        if kind := str(source.get("tokenizer_class") or ""):
            if any(known in kind for known in _ANY_CLASS):
                return
            raise TokenizerError(f"{folder / name}: the model's tokenizer is a {kind[:100]}, {_IDS_ONLY}")


def _refuse_other_files(folder: Path) -> None:
    """Raise where there is a file of another tokenizer. Under OpenAI's older names, GPT-2's own may be there."""
    for path in (path for pattern in OTHER_TOKENIZERS for path in sorted(folder.glob(pattern))):
        name = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.get(path.name)
        if name is None or not is_official(name, read_bytes(path)):
            raise TokenizerError(f"{path} is of another kind of tokenizer, {_IDS_ONLY}")


def _warn_if_unlike_gpt2(folder: Path, vocab_size: int, config: Mapping[str, Any]) -> None:
    said = [] if vocab_size in _PADDED else [f"vocab_size is {vocab_size}"]
    for name in ("bos_token_id", "eos_token_id"):
        ids = config.get(name)
        if ids is not None and 50256 not in (ids if isinstance(ids, list) else [ids]):
            said.append(f"{name} is {ids}")
    if said:
        warnings.warn(
            f"{folder} says nothing of its tokenizer, and is not GPT-2's own size or has other end ids "
            f"({', '.join(said)}): GPT-2's vocabulary is used; if that is wrong, put the model's tokenizer files there",
            stacklevel=5,
        )


def _read_added(
    folder: Path, listed: list[Any], sides: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary
) -> dict[str, Added]:
    """Those `listed` in tokenizer.json, and those of the other JSON files. Special: marked so, or with a role."""
    ids = {token: id for token, id in zip(vocabulary.tokens, vocabulary.ids, strict=True) if id >= 0}

    def find(spelling: str) -> int | None:
        """The id of a token, spelled as in the file."""
        try:
            return vocabulary.others[spelling] if spelling in vocabulary.others else ids[to_bytes(spelling)]
        except KeyError:
            return None

    config, extra = sides["tokenizer_config.json"], sides["added_tokens.json"]
    roles = _roles({**sides["special_tokens_map.json"], **config})
    found = [("tokenizer.json", item) for item in listed]
    decoder = config.get("added_tokens_decoder", {})
    found += [("tokenizer_config.json", {**item, "id": int(id)}) for id, item in decoder.items()]
    found += [("added_tokens.json", {"content": text, "id": id}) for text, id in extra.items()]
    # A role's token without an id is one that this vocabulary lacks.
    with_role = [{**flags, "content": text, "id": find(text)} for text, flags in roles.items()]
    found += [("", item) for item in with_role if item["id"] is not None]
    added: dict[str, Added] = {}
    taken = {*vocabulary.ids, *vocabulary.others.values()}
    for name, item in found:
        text, id, path = item["content"], item["id"], folder / name
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


def _is_word(token: str) -> bool:
    """Whether the pattern would leave a token in one piece, as it would not <pad>: then merges must have made it."""
    text = text_bytes(token).decode(errors="replace").strip()
    # Letters, numbers, all others: one kind at most.
    return len({unicodedata.category(char)[0].strip("MPSCZ") for char in text}) < 2
