"""scripts/bench.py on a tiny model, minigpt and transformers alone: the figures' shape, and faults of an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from tiny import gpt2_folder

import minigpt


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, bench.__file__, *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
def test_it_measures_minigpt_beside_transformers(folder: Path, tmp_path: Path) -> None:
    """With one round, the bytes of a process were once given as its seconds."""
    output = tmp_path / "out.json"
    what = ("--model", folder, "--engines", "minigpt,transformers", "--dtypes", "float32", "--rounds", 1)
    done = run(*what, "--threads", 1, "--work", tmp_path / "work", "--json", output)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    found = result["seconds"]
    decoding = {"decode, prompt 16", "decode, batch 8", "decode, batch 32"}  # what fits in 64 positions
    others = {"search, 4 beams", "look-up, a loop", "--help", "start to first token", "peak memory"}
    assert found.keys() == decoding | others
    assert result["limits"].keys() == decoding and found.pop("--help").keys() == {"minigpt float32"}
    for work, engines in found.items():
        assert engines.keys() == {"minigpt float32", "transformers float32"}, work
        assert all(len(values) == 1 for values in engines.values())
        assert f"| {work} | transformers float32 | " in done.stdout
    assert all(0.1 < values[0] < 300 for values in found["start to first token"].values())
    assert all(50 < values[0] < 5000 for values in found["peak memory"].values())  # MB
    assert result["bandwidth"] > 1e8 and result["versions"]["transformers"] and result["threads"] == 1
    assert result["versions"]["minigpt"] == minigpt.__version__  # once null in a checkout that is not installed


def test_what_is_made_from_a_model_is_of_that_model(folder: Path, tmp_path: Path) -> None:
    """Two folders of one name once shared what was made from the first."""
    other = gpt2_folder(tmp_path / "tiny")
    assert bench.fingerprint(other) != bench.fingerprint(folder) == bench.fingerprint(folder)


def test_an_interrupted_conversion_is_made_again(tmp_path: Path) -> None:
    def fails(part: Path) -> None:
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.made(tmp_path / "model.gguf", fails)
    path = bench.made(tmp_path / "model.gguf", lambda part: part.write_text("whole"))
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_the_table_compares_a_step_at_1000_tokens_with_one_at_32() -> None:
    results = {
        "decode, prompt 16": {"minigpt float32": [0.010, 0.010, 0.900], "minigpt int8": [0.004]},
        "decode, prompt 984": {"minigpt float32": [0.012], "minigpt int8": [0.005]},
    }
    lines = bench.table(bench.WORKS, results, dict.fromkeys(results, 0.009)).splitlines()
    assert lines[-1] == "| a step at 1000 tokens | minigpt float32 | 1.20 x its step at 32 | |"
    assert "90% of the memory limit" in lines[2] and "limit" not in lines[3]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_is_one_sentence(folder: Path) -> None:
    done = run("--model", folder, "--device", "cuda")
    assert done.returncode == 2 and done.stderr.endswith("error: torch sees no CUDA device here\n")


class Ends(bench.Engine):
    """Gives too few tokens, raises, or ends its process, as the batch says."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        if len(prompts) == 1:
            return [[0]]
        if len(prompts) == 2:
            raise ValueError("no")
        sys.exit(9)


@pytest.mark.slow
def test_an_engine_that_fails_is_named_with_the_reason() -> None:
    """It once took the results of all the others with it."""
    process = bench.Process("ends", "float32", Ends, ())
    assert process.answer() is None
    reasons = {1: r"gave \[1\] tokens in 0 steps instead of 4", 2: "ValueError: no", 3: "exit code 9"}
    for batch, reason in reasons.items():
        with pytest.raises(RuntimeError, match=reason):
            process.measure(8, batch, 4, 50, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--works decod3", "no work has 'decod3' in its name"),
        ("--rounds 0", "must be at least 1"),
        ("--dtypes flaot32", "unknown dtype 'flaot32' on cpu"),
        ("--model nowhere", "nowhere holds no config.json"),
        ("--engines vllm", "unknown engine 'vllm'"),
    ],
)
def test_a_refused_option_is_exit_code_2(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments.split()])
    with pytest.raises(SystemExit) as error:
        bench.main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err
