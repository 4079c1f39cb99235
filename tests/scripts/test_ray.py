"""The job on Ray Data: the records of the single process, with two workers. Needs the extra `ray`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from tiny import gpt2_folder

from minigpt.cli.main import main

pytest.importorskip("ray", reason='needs pip install -e ".[ray]"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2_folder(tmp_path_factory.mktemp("model") / "tiny")


def ray(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "ray_generate.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_two_workers_give_the_records_of_the_single_process(folder: Path, tmp_path: Path) -> None:
    source, single, many = tmp_path / "in.jsonl", tmp_path / "single.jsonl", tmp_path / "many.jsonl"
    lines = [json.dumps({"prompt": f"Prompt {n}", "max_new_tokens": 1 + n * 7 % 20}) for n in range(60)]
    lines[3] = json.dumps({"prompt": "three", "samples": 3, "id": "three", "logprobs": 1})
    lines[10] = "nonsense"
    lines[11] = json.dumps({"prompt": "again", "id": "three"})
    lines[12] = json.dumps({"prompt": "x " * 70})
    lines[13] = ""
    lines[14] = json.dumps({"ids": [464, 50256], "logit_bias": {"5": 3.5}, "stop": ["a"], "stop_ids": [1], "seed": 4})
    lines[15] = json.dumps({"prompt": "\ud83d \u2028"})
    source.write_text("\n".join(lines))
    args = ["--offline", "-m", str(folder), "--input", str(source), "--output", str(single), "--temperature", "1"]
    assert main(["generate", *args, "-n", "9", "--seed", "5"]) == 1
    options = json.dumps({"temperature": 1, "max_new_tokens": 9, "seed": 5})
    done = ray("--input", str(source), "--output", str(many), "-m", str(folder), "--params", options, "--workers", "2")
    assert done.returncode == 1, done.stderr[-3000:]
    assert f"ray_generate: error: 2 of 61 records are errors: see {many}" in done.stderr
    assert many.read_text() == single.read_text()
    # What a killed Ray job left can be finished by either.
    many.write_bytes(single.read_bytes()[:5000])
    done = ray("--input", str(source), "--output", str(many), "-m", str(folder), "--params", options, "--resume")
    assert done.returncode == 1 and many.read_text() == single.read_text()
    many.write_bytes(single.read_bytes()[:3000])
    args[args.index(str(single))] = str(many)
    assert main(["generate", *args, "-n", "9", "--seed", "5", "--resume"]) == 1
    assert many.read_text() == single.read_text()


def test_bad_input_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    source, there = tmp_path / "in.jsonl", tmp_path / "there.jsonl"
    source.write_text('{"prompt": "a"}\n')
    there.write_text("precious\n")
    for options, code, message in [
        (["--input", "/nowhere", "--output", "x"], 1, "cannot read /nowhere: No such file or directory"),
        (["--input", str(source), "--output", str(source)], 2, "is also the input"),
        (["--input", str(source), "--output", str(there)], 1, "is there already"),
        (["--input", str(source), "--output", "x", "--workers", "0"], 2, "--workers must be at least 1, not 0"),
        (["--input", str(source), "--output", "x", "--params", '{"top_p": 2}'], 2, "top_p must be"),
        (["--input", str(source), "--output", "x", "--device", "tpu"], 2, "invalid choice: 'tpu'"),
    ]:
        done = ray("-m", str(folder), *options)
        assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert there.read_text() == "precious\n"


def test_a_model_that_cannot_be_loaded_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    source, broken = tmp_path / "in.jsonl", tmp_path / "broken"
    source.write_text('{"prompt": "a"}\n')
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    no_text = gpt2_folder(tmp_path / "no_text")
    for name in ("vocab.json", "merges.txt"):
        (no_text / name).write_text("{")
    args = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    for options in (
        ["-m", str(tmp_path / "nowhere")],
        ["-m", str(broken)],
        ["-m", str(no_text)],
        ["-m", str(folder), "--dtype", "bfloat16"],  # which a CPU has not
    ):
        done = ray(*args, *options)
        assert done.returncode == 1 and done.stderr.startswith("ray_generate: error: "), done.stderr
        assert len(done.stderr.splitlines()) == 1
        (tmp_path / "out.jsonl.job").unlink()
