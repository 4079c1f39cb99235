"""Which tokenizer a checkpoint's folder has: its files, read once; its own vocabulary, GPT-2's, or a sentence why none.

Another vocabulary than the model's own gives wrong ids without a word, so whatever speaks against GPT-2's is heeded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import TokenizerError
from minigpt.files.reading import OTHER_TOKENIZERS, TOKENIZER_FILES, as_json, as_text, cure, is_file, read_bytes
from minigpt.text.added import Added, read_added, unmade_words
from minigpt.text.vocabulary import Vocabulary, build, gpt2_vocabulary, is_official

_ANY_CLASS = ("GPT2", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # the last ones say nothing
_PADDED = {-(-50257 // step) * step for step in (1, 8, 64, 128, 256, 512)}  # sizes of GPT-2's vocabulary with more rows

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


class Found(NamedTuple):
    """What a folder has."""

    vocabulary: Vocabulary
    added: dict[str, Added]
    source: str  # the file(s) that the vocabulary is from; "" for the package
    files: dict[str, bytes]  # all tokenizer files, as they are


def read_folder(folder: Path, vocab_size: int, config: Mapping[str, Any]) -> Found | None:
    """The tokenizer in `folder`, or GPT-2's where nothing speaks against it and vocab_size allows, else None.

    config: the contents of config.json.
    tokenizer.json comes before vocab.json + merges.txt where a folder has both, as in transformers 5.
    Raises TokenizerError, naming the file and the cure, if it is damaged or is not GPT-2's kind of tokenizer.
    """
    paths = {name: folder / name for name in TOKENIZER_FILES}
    data = {name: read_bytes(path, TokenizerError) for name, path in paths.items() if is_file(path, TokenizerError)}
    sides = {
        name: as_json(paths[name], data[name], TokenizerError) if name in data else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    }
    for name in ("add_prefix_space", "add_bos_token", "add_eos_token"):
        if sides["tokenizer_config.json"].get(name):
            raise TokenizerError(f"{paths['tokenizer_config.json']}: {name} is not supported")
    chosen = _choose(folder, data, sides["tokenizer_config.json"], vocab_size, config)
    if chosen is None:
        return None
    vocabulary, listed, source = chosen
    added = read_added(folder, listed, sides, vocabulary)
    for token in unmade_words(vocabulary, added):
        path = folder / (source.rpartition(" ")[2] or "vocab.json")
        raise TokenizerError(f"{path} is incomplete, no merge makes {token!r}: {cure(path)}")
    # Added tokens may lie beyond it: fine-tunes often add one for padding that the model has no row for.
    highest = max(*vocabulary.ids, *(id for text, id in vocabulary.others.items() if text not in added))
    if highest >= vocab_size:
        raise TokenizerError(
            f"{folder}: the tokenizer has a token with id {highest}, but the model's vocab_size is {vocab_size}: "
            "use the tokenizer files that belong to this model"
        )
    return Found(vocabulary, added, source, data)


def _choose(
    folder: Path, data: Mapping[str, bytes], side: Mapping[str, Any], vocab_size: int, config: Mapping[str, Any]
) -> tuple[Vocabulary, list[Any], str] | None:
    """The vocabulary, the added tokens that its file lists, and the name of that file."""
    if "tokenizer.json" in data:
        return *_from_pipeline(folder / "tokenizer.json", data["tokenizer.json"]), "tokenizer.json"
    if why := _other_class(folder, side, config):
        raise TokenizerError(why)
    if "vocab.json" in data and "merges.txt" in data:
        pair = (folder / "vocab.json", data["vocab.json"], folder / "merges.txt", data["merges.txt"])
        return _from_pair(*pair), [], "vocab.json and merges.txt"
    if "vocab.json" in data or "merges.txt" in data:
        raise TokenizerError(f"{folder} has only one of vocab.json and merges.txt: copy the other one beside it")
    if why := _other_files(folder):
        raise TokenizerError(why)
    if vocab_size < 50257:
        return None
    if not data and not config.get("tokenizer_class"):
        _warn_if_unlike_gpt2(folder, vocab_size, config)
    return gpt2_vocabulary(), [], ""


def _from_pair(vocab_path: Path, vocab: bytes, merges_path: Path, merges: bytes) -> Vocabulary:
    """The vocabulary that vocab.json and merges.txt stand for. Raises TokenizerError."""
    if is_official("vocab.json", vocab) and is_official("merges.txt", merges):
        return gpt2_vocabulary()
    lines = as_text(merges_path, merges, TokenizerError).splitlines()
    listed = [line for line in lines if not line.startswith("#version")]
    return build(vocab_path, as_json(vocab_path, vocab, TokenizerError), merges_path, listed)


def _from_pipeline(path: Path, data: bytes) -> tuple[Vocabulary, list[Any]]:
    """The vocabulary and the added tokens of a tokenizer.json.

    Raises TokenizerError, naming the setting, if it does anything that GPT-2's does not.
    """
    if is_official("tokenizer.json", data):
        return gpt2_vocabulary(), []
    pipeline = as_json(path, data, TokenizerError)
    for name, settings in _PIPELINE.items():
        part = pipeline.get(name) or {}
        if not isinstance(part, dict) or (name == "model" and not part):
            raise TokenizerError(f"{path} is damaged, its {name} is {part!r}: {cure(path)}")
        for setting, supported in settings.items():
            if part.get(setting) not in supported:
                raise TokenizerError(f"{path}: {name} with {setting} = {part.get(setting)!r} is not supported")
    model = pipeline["model"]
    return build(path, model.get("vocab"), path, model.get("merges")), pipeline.get("added_tokens") or []


def _other_class(folder: Path, tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Why vocab.json and merges.txt, or their absence, do not mean GPT-2's kind of tokenizer; "" if they do."""
    for name, settings in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
        if kind := settings.get("tokenizer_class"):
            if any(known in str(kind) for known in _ANY_CLASS):
                return ""
            return (
                f"{folder / name}: the model's tokenizer is a {str(kind)[:100]}, which is not supported: give token "
                "ids, made with transformers"
            )
    return ""


def _other_files(folder: Path) -> str:
    """The same for files of another kind of tokenizer."""
    for pattern in OTHER_TOKENIZERS:
        for path in sorted(folder.glob(pattern)):
            if pattern in ("encoder.json", "vocab.bpe"):
                name = "vocab.json" if pattern == "encoder.json" else "merges.txt"
                if not is_official(name, read_bytes(path, TokenizerError)):
                    return f"{path} is a tokenizer's file under OpenAI's older name: copy it to {folder / name}"
            else:
                return (
                    f"{path} is of another kind of tokenizer, which is not supported: give token ids, made with "
                    "transformers"
                )
    return ""


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
