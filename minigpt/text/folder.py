"""Which tokenizer a checkpoint's folder has: its files, read once; its own vocabulary, GPT-2's, or a sentence why none.

Another vocabulary than the model's own gives wrong ids without a word, so whatever speaks against GPT-2's is heeded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import TokenizerError
from minigpt.files.reading import OTHER_TOKENIZERS, TOKENIZER_FILES, as_json, cure, is_file, read_bytes
from minigpt.text.added import Added, read_added, unmade_words
from minigpt.text.vocabulary import Vocabulary, from_pair, from_pipeline, gpt2_vocabulary, is_official

_ANY_CLASS = ("GPT2", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # the last ones say nothing
_PADDED = {-(-50257 // step) * step for step in (1, 8, 64, 128, 256, 512)}  # sizes of GPT-2's vocabulary with more rows


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
    listed: list[Any] = []
    source = "vocab.json and merges.txt"
    last = paths["merges.txt"]
    if "tokenizer.json" in data:
        source, last = "tokenizer.json", paths["tokenizer.json"]
        vocabulary, listed = from_pipeline(last, data["tokenizer.json"])
    elif why := _other_class(folder, sides["tokenizer_config.json"], config):
        raise TokenizerError(why)
    elif "vocab.json" in data and "merges.txt" in data:
        vocabulary = from_pair(paths["vocab.json"], data["vocab.json"], last, data["merges.txt"])
    elif "vocab.json" in data or "merges.txt" in data:
        raise TokenizerError(f"{folder} has only one of vocab.json and merges.txt: copy the other one beside it")
    elif why := _other_files(folder):
        raise TokenizerError(why)
    elif vocab_size >= 50257:
        source, vocabulary = "", gpt2_vocabulary()
        if not data and not config.get("tokenizer_class"):
            _warn_if_unlike_gpt2(folder, vocab_size, config)
    else:
        return None
    added = read_added(folder, listed, sides, vocabulary)
    for token in unmade_words(vocabulary, added):
        raise TokenizerError(f"{last} is incomplete, no merge makes {token!r}: {cure(last)}")
    return Found(vocabulary, added, source, data)


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
            stacklevel=4,
        )
