"""Files from hostile hands: whatever they hold, loading and using them gives a result or a MiniGPTError.

A few hundred cases by default; --fuzz-cases 5000 runs that many. Each runs in a process of its own kind
(fuzz_worker.py), where a crash, a hang of a minute, more than 1 GiB of memory and anything written are seen.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import SPECIAL, Worker, damaged, edited, fuzz, odd_values, to_json
from hypothesis import strategies as st
from official import SPELLING

from minigpt import GPT2, GPT2Config, save

pytestmark = pytest.mark.slow
MERGES = ["Ġ t", "h e", "Ġt he", "a a", "aa aa"]
PROMPTS = ["the aaaa", "", [0, 5, 256], [10**4000], [-1, 2**63], "\ud800\0 é" * 3]
DTYPES = ["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "f32", "", None, 5]
SIDE_FILES: dict[str, Any] = {
    "generation_config.json": {"eos_token_id": [261, 0], "bos_token_id": 261},
    "tokenizer_config.json": {"add_prefix_space": False, "tokenizer_class": "GPT2Tokenizer",
                              "eos_token": "<|endoftext|>",
                              "added_tokens_decoder": {"261": {"content": "<|endoftext|>", "special": True}}},
    "special_tokens_map.json": {"eos_token": {"content": "<|endoftext|>"}, "additional_special_tokens": ["the"]},
    "added_tokens.json": {"<pad>": 262},
}  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small model with a vocabulary of its own."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good")
    ids = {"bos_token_id": 261, "eos_token_id": 261}
    save(GPT2(GPT2Config(vocab_size=263, n_positions=16, n_embd=4, n_head=2, n_layer=1, **ids)), folder)
    vocab = {
        token: id
        for id, token in enumerate([*SPELLING.values(), *(m.replace(" ", "") for m in MERGES), "<|endoftext|>"])
    }
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["vocab.json"], files["merges.txt"] = (
        json.dumps(vocab).encode(),
        "\n".join(["#version: 0.2", *MERGES]).encode(),
    )
    return files


def pipeline(good: dict[str, bytes]) -> dict[str, Any]:
    """The vocabulary as a tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    model = {"type": "BPE", "vocab": json.loads(good["vocab.json"]), "merges": [line.split(" ") for line in MERGES]}
    added = [{"id": 261, "content": "<|endoftext|>", "special": True, "lstrip": False}]
    return {"model": model, "pre_tokenizer": byte_level, "decoder": byte_level, "added_tokens": added}


@pytest.fixture
def attempt(worker: Worker, tmp_path: Path) -> Any:
    """attempt(files): what comes of a folder with these files, which is as it was afterwards."""

    def attempt(files: dict[str, bytes | str]) -> str:
        folder = tmp_path / "case"
        folder.mkdir()
        for name, content in files.items():
            if isinstance(content, str):
                SPECIAL[content](folder / name)
            else:
                (folder / name).write_bytes(content)
        try:
            end = worker.run(folder=str(folder), prompts=PROMPTS)
            assert "\n" not in end and {path.name for path in folder.iterdir()} == set(files)
        finally:
            shutil.rmtree(folder)
        return end

    return attempt


def test_the_good_files_load(attempt: Any, good: dict[str, bytes]) -> None:
    expected = "result; result; result; PromptError: token id"
    assert attempt(good).startswith(expected)
    rest = {name: data for name, data in good.items() if name not in ("vocab.json", "merges.txt")}
    assert attempt({**rest, "tokenizer.json": to_json(pipeline(good))}).startswith(expected)


def test_weights_cut_at_every_byte(attempt: Any, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=1, n_positions=1, n_embd=1, n_head=1, n_layer=1, bos_token_id=0)
    save(GPT2(config), tmp_path / "small")
    files = {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()}
    whole = files["model.safetensors"]
    for size in range(len(whole)):
        assert attempt({**files, "model.safetensors": whole[:size]}).startswith("CheckpointError")


def split(weights: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", weights[:8])[0]
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def joined(header: bytes, body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


@st.composite
def hostile_weights(draw: st.DrawFn, weights: bytes) -> bytes:
    header, body = split(weights)
    kind = draw(st.sampled_from(["bytes", "json", "entry", "duplicate", "length", "body", "empty"]))
    if kind == "bytes":
        return draw(damaged(weights))
    if kind == "json":
        return joined(draw(edited(header, ("__metadata__", "h.0.attn.bias", "wte.weight", "lm_head.weight"))), body)
    if kind == "length":
        return joined(
            to_json(header), body, draw(st.sampled_from([0, 1, 7, 2**20, 10**8, 10**8 + 1, 2**63, 2**64 - 1]))
        )
    if kind == "body":
        value = draw(st.sampled_from([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\x01\0\0\0"]))
        return joined(to_json(header), draw(st.sampled_from([value * (len(body) // 4), body + value, body[:-1], b""])))
    name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    if kind == "duplicate":
        other = draw(edited(header[name]))
        return joined(to_json(header)[:-1] + b"," + json.dumps(name).encode() + b":" + other + b"}", body)
    if kind == "empty":
        shape = draw(st.sampled_from([[], [0], [0, 2**63], [2**32, 2**32], [2**62, 4, 0], [1] * 1000]))
        new = draw(st.sampled_from([name, "h.0.attn.bias", "h.0.attn.masked_bias", "x", "lm_head.weight", "h.\ud800"]))
        header[new] = {"dtype": draw(st.sampled_from(DTYPES)), "shape": shape, "data_offsets": [len(body), len(body)]}
        return joined(to_json(header), body)
    field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    numbers = st.lists(st.sampled_from([0, 1, 4, 12, 2**31, 2**62, 2**63, 2**64 - 1, len(body), -1]), max_size=3)
    header[name][field] = draw(st.sampled_from(DTYPES) if field == "dtype" else numbers)
    return joined(to_json(header), body)


def hostile_folder(good: dict[str, bytes], kind: str) -> st.SearchStrategy[dict[str, bytes | str]]:
    """Folders with one kind of file damaged."""
    weights = good["model.safetensors"]

    def put(name: str, content: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, bytes | str]]:
        return content.map(lambda data: {**good, name: data})

    def json_of(value: Any, *keys: str) -> st.SearchStrategy[bytes]:
        return edited(value, keys) | damaged(to_json(value))

    if kind == "weights":
        return put("model.safetensors", hostile_weights(weights))
    if kind == "config":
        names = ("hidden_size", "num_hidden_layers", "n_inner", "pruned_heads", "quantization_config", "n_ctx")
        return put("config.json", json_of(json.loads(good["config.json"]), *names))
    if kind == "vocabulary":
        vocab = put("vocab.json", json_of(json.loads(good["vocab.json"]), "the", "\ud800", "", "aaa"))
        lines = st.lists(
            st.sampled_from([*MERGES, "a  a", "a", "", "Ġ Ġ", "aa a", "\ufeff", "é é", "#version"]), max_size=7
        )
        merges = put("merges.txt", damaged(good["merges.txt"]) | lines.map(lambda lines: "\n".join(lines).encode()))
        rest = {name: data for name, data in good.items() if name not in ("vocab.json", "merges.txt")}
        single = json_of(pipeline(good), "normalizer", "post_processor", "truncation")
        return vocab | merges | single.map(lambda data: {**rest, "tokenizer.json": data})
    if kind == "side files":
        return st.sampled_from(sorted(SIDE_FILES)).flatmap(lambda name: put(name, json_of(SIDE_FILES[name])))
    del (sharded := dict(good))["model.safetensors"]
    names = [
        "a.safetensors",
        "../a.safetensors",
        "/etc/passwd",
        "/dev/zero",
        "b/a.safetensors",
        "\0",
        "\ud800.safetensors",
    ]
    names += ["..", "", "x" * 5000 + ".safetensors", "index.safetensors", "C:\\a.safetensors", "config.json"]
    place = st.dictionaries(st.sampled_from(["wte.weight", "x"]), st.sampled_from(names) | odd_values, max_size=2)
    index = st.fixed_dictionaries({"weight_map": place | odd_values}).map(to_json) | damaged(
        to_json({"metadata": {"total_size": 1}, "weight_map": {"wte.weight": "a.safetensors"}})
    )
    return index.map(lambda data: {**sharded, "a.safetensors": weights, "model.safetensors.index.json": data})


@pytest.mark.parametrize("kind", ["weights", "config", "vocabulary", "side files", "index"])
def test_damaged(kind: str, attempt: Any, good: dict[str, bytes], fuzz_cases: int) -> None:
    fuzz(hostile_folder(good, kind), lambda files: attempt(files) and None, fuzz_cases // 5)


def test_the_longest_context_a_token_of_a_megabyte_and_many_added_tokens(attempt: Any, good: dict[str, bytes]) -> None:
    header, body = split(good["model.safetensors"])
    config = json.loads(good["config.json"])
    for positions in (2**14, 2**15):  # the mask alone would take 1 GiB
        rows = bytes(positions * 4 * 4)
        start, end = len(body), len(body) + len(rows)
        mended = {**header, "x": header["wpe.weight"]}
        mended["wpe.weight"] = {"dtype": "F32", "shape": [positions, 4], "data_offsets": [start, end]}
        mended["h.0.attn.bias"] = mended.pop("x")
        files = {**good, "model.safetensors": joined(to_json(mended), body + rows)}
        files["config.json"] = to_json({**config, "n_positions": positions})
        assert attempt(files).startswith("result" if positions == 2**14 else "CheckpointError: ")
    runs = [2**n for n in range(1, 20)]
    vocab = {**json.loads(good["vocab.json"]), **{"a" * run: 262 + n for n, run in enumerate(runs)}}
    lines = [f"{'a' * (run // 2)} {'a' * (run // 2)}" for run in runs]
    long = {**good, "vocab.json": to_json(vocab), "merges.txt": "\n".join([*MERGES[:3], *lines]).encode()}
    assert attempt(long).startswith("TokenizerError")  # more ids than the model's, found in time
    many = to_json({f"<extra {n}>": 263 + n for n in range(30_000)} | {"a" * n: -1 for n in range(3, 300)})
    assert attempt({**good, "added_tokens.json": many}).startswith("TokenizerError")


@pytest.mark.parametrize("what", SPECIAL)
def test_not_a_file_or_far_too_large(what: str, attempt: Any, good: dict[str, bytes]) -> None:
    for name in ("config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer.json", *SIDE_FILES):
        end = attempt({**good, name: what})
        ours = name in ("config.json", "model.safetensors", "generation_config.json")
        assert end.startswith("CheckpointError: " if ours else "TokenizerError: "), (name, end)
