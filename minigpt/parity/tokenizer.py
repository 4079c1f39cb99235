"""The tokenizer: against the vectors published for GPT-2's, and against AutoTokenizer of the folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from minigpt.errors import PromptError, TokenizerError
from minigpt.files.reading import TOKENIZER_FILES
from minigpt.language_model import LanguageModel
from minigpt.parity.check import Check, one_line, parting, shown
from minigpt.parity.reference import quietly
from minigpt.text.tokenizer import Tokenizer


def check_tokenizer(folder: Path, lm: LanguageModel, vectors: list[dict[str, Any]], known: bool) -> Iterator[Check]:
    """The published vectors, where the vocabulary is GPT-2's and no guess; then transformers' tokenizer of the folder.

    known: the weights are official ones, so that GPT-2's vocabulary is right for a folder without one.
    """
    own = any((folder / name).exists() for name in TOKENIZER_FILES)
    check = partial(Check, "tokenizer", passed=None)
    try:
        tokenizer = lm.tokenizer
    except TokenizerError as error:
        yield check(name="all", detail=str(error), applies=own)
        return
    if own or known:
        yield check_vectors(tokenizer, vectors)
    else:
        yield check(name="vectors", detail="the folder has no vocabulary, GPT-2's was only assumed", applies=False)
    if own:
        yield compare_tokenizer(folder, tokenizer, [vector["text"] for vector in vectors])
    else:
        yield check(name="AutoTokenizer", detail="the folder has no tokenizer", applies=False)


def check_vectors(tokenizer: Tokenizer, vectors: list[dict[str, Any]]) -> Check:
    """Encode and decode each text. Not applicable where the vocabulary is not GPT-2's."""
    gpt2 = Tokenizer.gpt2()
    ids = range(gpt2.n_vocab)
    if not all(id in tokenizer and tokenizer.token_bytes(id) == gpt2.token_bytes(id) for id in ids):
        return Check("tokenizer", "vectors", None, "the model's vocabulary is not GPT-2's", applies=False)
    wrong = [
        vector["text"]
        for vector in vectors
        if tokenizer.encode(vector["text"], special=vector.get("special", False)) != vector["ids"]
        or tokenizer.decode(vector["ids"]) != vector["text"]
    ]
    detail = f"{len(vectors) - len(wrong)} of {len(vectors)} texts encode and decode as published"
    return Check("tokenizer", "vectors", not wrong, f"{detail}; not {wrong[0]!r}" if wrong else detail)


def compare_tokenizer(folder: Path, ours: Tokenizer, texts: Iterable[str]) -> Check:
    """Encode `texts`, every token's own text and every special token, decode every id, as AutoTokenizer does."""
    skipped = partial(Check, "tokenizer", "AutoTokenizer", None)
    try:
        with quietly() as transformers:
            theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        return skipped(one_line(error))
    except Exception as error:  # whatever transformers does not read, minigpt has no reference for
        return skipped(f"transformers has no tokenizer here: {one_line(error)}")
    ids, special = [id for id in range(ours.n_vocab) if id in ours], ours.special_tokens
    around = [f"a{text}b {text}\n" for text in special]
    texts = list(dict.fromkeys([*texts, *around, *map(ours.decode, zip(ids, strict=True))]))
    wrong, compared = [], 0
    for split in (True, False):
        encoded = theirs(texts, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        for text, expected in zip(texts, encoded, strict=True):
            if (found := _encoded(ours, text, not split)) is not None:
                compared += 1
                if found != expected:
                    wrong.append(f"{text!r} is {found[:8]}, not {expected[:8]}")
    added = theirs.get_added_vocab()
    wrong += [f"{text!r} is {id}, not {added.get(text)}" for text, id in special.items() if id != added.get(text)]
    plain = [id for id in ids if id not in added.values()]  # transformers garbles added ones beyond ASCII
    decoded = theirs.batch_decode([[id] for id in plain], clean_up_tokenization_spaces=False)
    pairs = zip(plain, map(ours.decode, zip(plain, strict=True)), decoded, strict=True)
    wrong += [f"id {id} is {text!r}, not {expected!r}" for id, text, expected in pairs if text != expected]
    detail = f"{compared} encodings, {len(ids)} ids and {len(special)} special tokens"
    detail += f"; {len(wrong)} differ: {wrong[0]}" if wrong else ""
    return Check("tokenizer", "AutoTokenizer", not wrong, detail)


def misfits(tokenizer: Tokenizer) -> list[int]:
    """The ids whose own text does not encode to that id alone: parts of characters, and tokens that no merge makes."""
    ids = (id for id in range(tokenizer.n_vocab) if id in tokenizer)
    return [id for id in ids if _encoded(tokenizer, tokenizer.decode([id]), True) != [id]]


def changed_texts(lm: LanguageModel, prompts: list[dict[str, Any]], tokens: list[int]) -> list[str]:
    """What a record's texts and tokens encode to that they did not; or why they do not any more."""
    wrong, size = [], lm.limits.n_positions
    try:
        for prompt in (prompt for prompt in prompts if prompt["text"]):
            ours, theirs = lm.encode(prompt["text"])[:size], prompt["ids"]
            if (at := parting(ours, theirs)) is not None:
                text = shown(prompt["text"])
                wrong.append(f"token {at + 1} of {text} is {ours[at : at + 1]}, not {theirs[at : at + 1]}")
        changed = sorted({*misfits(lm.tokenizer)} ^ {*tokens})
    except (TokenizerError, PromptError) as error:
        return [str(error)]
    return wrong + [f"the text of id {id} encodes to other ids" for id in changed]


def _encoded(tokenizer: Tokenizer, text: str, special: bool) -> list[int] | None:
    """The ids; None where a pruned vocabulary lacks a byte of the text, which transformers leaves out."""
    try:
        return tokenizer.encode(text, special=special)
    except PromptError:
        return None
