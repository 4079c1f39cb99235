"""Which tokenizer a folder has: never GPT-2's in place of another one, and the one that transformers takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoTokenizer
from vocabularies import AB, END, PAIR, added, pipeline, small, write

import minigpt
from minigpt.errors import TokenizerError
from minigpt.loading import load_tokenizer
from minigpt.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = f"Hello<|user|>hi there{END}"


def model(path: Path, **config: Any) -> Path:
    """A small model without tokenizer files."""
    fields = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64, "initializer_range": 0.5}
    minigpt.save(minigpt.GPT2(minigpt.GPT2Config(**fields | config)), path)
    return path


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path, match: str) -> str:
    """The sentence that text gets. Ids work."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm = minigpt.load(folder, device="cpu")
    assert len(lm.generate([5, 6], max_new_tokens=3).ids) == 3
    with pytest.raises(TokenizerError, match=match) as caught:
        lm.generate("Hello")
    with pytest.raises(TokenizerError, match=match):
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Another tokenizer than GPT-2's


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model", "source.spm", "vocab.txt", "cl100k.tiktoken"])
def test_files_of_another_tokenizer(tmp_path: Path, name: str) -> None:
    """It took GPT-2's vocabulary: "Hello" became [15496] in a model that has another word there."""
    (model(tmp_path, vocab_size=51200) / name).write_bytes(b"\x00\xff")
    assert str(tmp_path / name) in refused(
        tmp_path, "another kind of tokenizer, which is not supported: give token ids"
    )


def test_openais_older_names(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "encoder.json").write_text("{}")
    assert "another kind of tokenizer" in refused(tmp_path, r"encoder\.json is of another kind of tokenizer")
    official = Tokenizer.gpt2().files()
    (tmp_path / "encoder.json").write_bytes(official["vocab.json"])
    (tmp_path / "vocab.bpe").write_bytes(official["merges.txt"])
    assert load_tokenizer(tmp_path).encode("Hello") == [15496]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_another_class(tmp_path: Path, name: str) -> None:
    model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for kind in ("T5Tokenizer", "RobertaTokenizerFast"):
        path = tmp_path / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": kind}))
        assert str(path) in refused(tmp_path, f"is a {kind}, which is not supported")
        write(tmp_path, vocab_json=AB, merges_txt=PAIR["merges_txt"])  # Qwen's look like this, with another pattern
        refused(tmp_path, f"is a {kind}")
        for other in ("vocab.json", "merges.txt"):
            (tmp_path / other).unlink()
    for kind in ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", None):
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": kind}))
        assert load_tokenizer(tmp_path).encode("Hello") == [15496]


def test_a_tokenizer_json_speaks_for_itself(tmp_path: Path) -> None:
    model(tmp_path, vocab_size=10)
    write(tmp_path, tokenizer_json=pipeline(AB, ["a b", "ab c"]))
    configure(tmp_path, tokenizer_class="T5Tokenizer")
    (tmp_path / "spiece.model").touch()
    assert load_tokenizer(tmp_path).encode("abc") == [9]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"vocab_size": 50304}, None),
        ({"bos_token_id": None, "eos_token_id": [0, 50256]}, None),
        ({"vocab_size": 51200}, "vocab_size is 51200"),
        ({"vocab_size": 50258}, "vocab_size is 50258"),
        ({"bos_token_id": 1, "eos_token_id": [2, 3]}, "bos_token_id is 1, eos_token_id is [2, 3]"),
    ],
)
def test_a_warning_where_nothing_is_said_and_the_model_is_not_gpt2s(
    tmp_path: Path, fields: dict[str, Any], said: str | None
) -> None:
    model(tmp_path)
    configure(tmp_path, **fields)

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vocab_size = fields.get("vocab_size", 50257)
            tokenizer = Tokenizer.from_folder(tmp_path, vocab_size, json.loads((tmp_path / "config.json").read_text()))
        assert tokenizer is not None and tokenizer.encode("Hello") == [15496]
        return [str(item.message) for item in caught]

    assert [said in text and str(tmp_path) in text for text in warned()] == ([True] if said else [])
    configure(tmp_path, tokenizer_class="GPT2Tokenizer")
    assert warned() == []


def test_origin(tmp_path: Path) -> None:
    assert Tokenizer.gpt2().origin == "GPT-2's own"
    assert load_tokenizer(model(tmp_path)).origin == "GPT-2's own: the folder has none"
    write(tmp_path, added_tokens_json={"<sep>": 50257})
    assert load_tokenizer(tmp_path).origin == "GPT-2's own, 50257 + 1 added"
    (tmp_path / "added_tokens.json").unlink()
    configure(tmp_path, vocab_size=20)
    write(tmp_path, **PAIR)
    assert load_tokenizer(tmp_path).origin == "vocab.json and merges.txt, 10 tokens"
    write(tmp_path, tokenizer_json=pipeline(AB, ["a b", "ab c"], [added(10, "<x>"), added(11, "<y>")]))
    assert load_tokenizer(tmp_path).origin == "tokenizer.json, 10 + 2 added"


# Both layouts at once


def test_tokenizer_json_comes_first_as_in_transformers(tmp_path: Path) -> None:
    """The older pair won: a folder that an older tool left beside a newer tokenizer.json got other ids."""
    vocab = small(["b c", "a bc"])
    write(tmp_path, **PAIR, tokenizer_json=pipeline(vocab | {END: 10}, ["b c", "a bc"], [added(10, END, special=True)]))
    write(tmp_path, tokenizer_config_json={"tokenizer_class": "GPT2Tokenizer"})
    model(tmp_path, vocab_size=11)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("abc", "abcab bc", "ab", "bcabc"):
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("bc") == [8] and ours.origin.startswith("tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path).encode("bc") == [1, 2]


@pytest.mark.slow
def test_an_official_tokenizer_json_beside_another_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, **PAIR)
    theirs = AutoTokenizer.from_pretrained(_official(tmp_path / "official"))
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "saved" / "tokenizer.json").read_bytes())
    ours = Tokenizer.from_folder(tmp_path, 50257)
    assert ours is not None and ours.encode("Hello world") == theirs.encode("Hello world") == [15496, 995]


def _official(folder: Path) -> Path:
    folder.mkdir()
    for name, content in Tokenizer.gpt2().files().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


# Saving


def test_a_saved_model_keeps_its_tokenizer(tmp_path: Path) -> None:
    """The added token became four pieces."""
    theirs = AutoTokenizer.from_pretrained(_official(tmp_path / "official"))
    theirs.add_special_tokens({"pad_token": "[PAD]"})
    theirs.add_tokens(["<|user|>", "foo bar"])
    theirs.save_pretrained(model(tmp_path / "first", vocab_size=50264))
    lm = minigpt.load(tmp_path / "first", device="cpu")
    minigpt.save(lm, tmp_path / "second")
    again = minigpt.load(tmp_path / "second", device="cpu")
    for special in (True, False):
        ids = lm.tokenizer.encode(TEXT + "[PAD]", special=special)
        assert again.tokenizer.encode(TEXT + "[PAD]", special=special) == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "second").encode(TEXT) == lm.tokenizer.encode(TEXT, special=True)
    assert again.tokenizer.files() == lm.tokenizer.files() and again.tokenizer.origin == lm.tokenizer.origin
    read = [path for path in (tmp_path / "first").iterdir() if path.name in lm.tokenizer.files()]
    assert {path.name: path.read_bytes() for path in read} == lm.tokenizer.files() and len(read) == 2


def test_transformers_reads_a_saved_demo(tmp_path: Path) -> None:
    minigpt.save(minigpt.load("demo", device="cpu"), tmp_path / "demo")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "demo")
    ours = load_tokenizer(tmp_path / "demo")
    assert theirs.encode(TEXT) == ours.encode(TEXT, special=True)
    assert ours.origin == "vocab.json and merges.txt, 50257 tokens"


def test_gpt2s_vocabulary_with_added_tokens_is_saved_whole(tmp_path: Path) -> None:
    write(model(tmp_path / "first", vocab_size=50258), added_tokens_json={"<sep>": 50257})
    lm = minigpt.load(tmp_path / "first", device="cpu")
    minigpt.save(lm, tmp_path / "second")
    assert load_tokenizer(tmp_path / "second").encode("hello<sep>") == [31373, 50257]
    assert AutoTokenizer.from_pretrained(tmp_path / "second").encode("hello<sep>") == [31373, 50257]


@pytest.mark.slow
def test_no_tokenizer_is_written_over_another_one(tmp_path: Path) -> None:
    lm = minigpt.load(tiny.gpt2_folder(tmp_path / "gpt2"), device="cpu")
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        target = tmp_path / name.replace(".", "-")
        target.mkdir()
        (target / name).write_text("{}")
        with pytest.raises(minigpt.CheckpointError, match=re.escape(f"holds another tokenizer already ({name})")):
            minigpt.save(lm, target)
        assert [path.name for path in target.iterdir()] == [name]


# The package's data


@pytest.mark.slow
def test_from_a_zip_and_without_data(tmp_path: Path) -> None:
    """NotADirectoryError, and FileNotFoundError."""
    for name, leave_out in (("whole.zip", ()), ("bare.zip", ("gpt2.tokens.z",))):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path in (ROOT / "minigpt").rglob("*"):
                if path.is_file() and path.name not in leave_out and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(ROOT))
    code = "import minigpt; print(minigpt.Tokenizer.gpt2().encode('Once upon'))"
    assert run(tmp_path / "whole.zip", code) == run(ROOT, code) != ""
    code = "import minigpt; minigpt.Tokenizer.gpt2()"
    assert "MiniGPTError: this installation of minigpt lacks data/gpt2.tokens.z: install" in run(
        tmp_path / "bare.zip", code
    )
    code = "import minigpt; minigpt.load('demo', device='cpu')"
    assert "ModelNotFoundError: the demo model is not part of this installation" in run(tmp_path / "bare.zip", code)


def run(place: Path, code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(place)}, text=True,
                            capture_output=True, cwd=place.parent, timeout=120)  # fmt: skip
    return result.stdout or result.stderr
