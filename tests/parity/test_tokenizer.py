"""The tokenizer of a folder against AutoTokenizer of that folder, on its own vocabulary and special tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from official import write_official
from tiny import gpt2_folder, hf_model, save_hf

import minigpt
from minigpt import Tokenizer
from minigpt.parity import published
from minigpt.parity.check import Check
from minigpt.parity.tokenizer import check_tokenizer, compare_tokenizer, misfits

VECTORS = published.read()["tokenizer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With GPT-2's vocabulary and two tokens more, one of them special."""
    path = write_official(gpt2_folder(tmp_path_factory.mktemp("own") / "m"))
    added = {"50257": {"content": "<|user|>", "special": True}, "50258": {"content": "ölçü", "special": False}}
    settings = {"added_tokens_decoder": added, "additional_special_tokens": ["<|user|>"]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return path


def checks(folder: Path, known: bool = False) -> list[Check]:
    return list(check_tokenizer(folder, minigpt.load(folder, device="cpu"), VECTORS, known))


def test_a_folders_own_tokenizer_is_compared_on_all_its_tokens(folder: Path) -> None:
    vectors, own = checks(folder)
    assert vectors.passed and vectors.detail.startswith(f"{len(VECTORS)} of")
    assert own.passed and own.name == "AutoTokenizer" and "50259 ids and 2 special tokens" in own.detail, own.detail


def test_a_vocabulary_that_was_only_assumed_is_not_applicable(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "m")
    assert [(check.passed, check.applies) for check in checks(folder)] == [(None, False)] * 2
    vectors, own = checks(folder, known=True)  # the weights are official: it is known then
    assert vectors.passed and own.passed is None and not own.applies
    (none,) = checks(save_hf(hf_model(), tmp_path / "ids"))
    assert none.passed is None and not none.applies and "no tokenizer" in none.detail


def test_a_tokenizer_that_cannot_be_read_is_not_nothing_to_compare(folder: Path, tmp_path: Path) -> None:
    broken = gpt2_folder(tmp_path / "m")
    (broken / "tokenizer_config.json").write_text('{"add_prefix_space": true}', "utf-8")
    (check,) = checks(broken)
    assert check.passed is None and check.applies and "add_prefix_space is not supported" in check.detail


def test_it_can_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = minigpt.load(folder, device="cpu").tokenizer
    ours.n_vocab = 2000  # is enough here
    encode, decode, special = Tokenizer.encode, Tokenizer.decode, Tokenizer.special_tokens
    wrong = {
        "encode": lambda self, text, *, special=False: encode(self, text, special=True),
        "decode": lambda self, ids: decode(self, ids).replace(" the", " teh"),
        "special_tokens": property(lambda self: {**special.fget(self), "<|user|>": 50258}),  # type: ignore[attr-defined]
    }
    said = ["'a<|user|>b", "' teh'", "'<|user|>' is 50258, not 50257"]
    for (name, replacement), words in zip(wrong.items(), said, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, name, replacement)
            check = compare_tokenizer(folder, ours, [])
        assert check.passed is False and words in check.detail, check.detail
    assert compare_tokenizer(folder, ours, []).passed


def test_without_transformers_it_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, own = checks(folder)
    assert own.passed is None and own.applies and "not installed" in own.detail


def test_misfits_are_parts_of_characters(gpt2: Tokenizer) -> None:
    found = misfits(gpt2)
    assert len(found) == 344 and all("\ufffd" in gpt2.decode([id]) for id in found)
