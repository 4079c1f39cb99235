"""Ctrl-C and SIGTERM at random moments of real processes, from the interpreter's start to its end.

A few signals for each command by default; with --soak fifty.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny import gpt2_folder

import minigpt
from minigpt import GPT2, GPT2Config

pytestmark = pytest.mark.slow
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt2_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes a while to load (90 MB, to be converted) and to fill with a prompt of 2000 tokens."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "large"
    minigpt.save(GPT2(GPT2Config(n_embd=512, n_head=8, n_layer=6, n_positions=2048)), path, torch.float16)
    return path


def start(*args: str) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "minigpt", *args], **pipes)


def alone(*args: str) -> tuple[float, bytes]:
    """The seconds that the command takes undisturbed, and what it prints."""
    started = time.monotonic()
    running = start(*args)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err.decode()
    return time.monotonic() - started, out


def stop(running: subprocess.Popen[bytes], number: int, delay: float) -> tuple[int, bytes]:
    """Send a signal after `delay` seconds; gives the exit code and stdout, and checks what must hold for any command.

    Only Python's own start, before a line of this package runs, is not in our hands: code -`number`.
    """
    try:
        running.wait(delay)  # a pipe holds what comes meanwhile
    except subprocess.TimeoutExpired:
        running.send_signal(number)
    out, err = running.communicate(timeout=120)
    code, text = running.returncode, err.decode()
    out.decode()
    if code == -number or "KeyboardInterrupt" in text:
        code = -number
        assert out == b"" and "minigpt" not in text, text
    else:
        assert code in (0, CODES[number]), (code, text)
        assert "Traceback" not in text and "rror" not in text and "xception" not in text, text
    return code, out


def delays(count: int, seconds: float) -> list[float]:
    """One in each part of the time, and a little after its end."""
    return [(part + random.random()) * seconds * 1.05 / count for part in range(count)]


@pytest.mark.parametrize("command", ["stream", "load", "score", "json"])
def test_a_signal_at_any_moment_ends_a_command_quietly(command: str, tiny: Path, large: Path, soak: bool) -> None:
    random.seed(command)
    sampled = ["--temperature", "1", "--seed", "1", "--ignore-eos"]
    args = {
        "stream": ["generate", "Hello", "-m", str(tiny), "-n", "600", "--overflow", "slide", *sampled],
        "load": ["generate", "word " * 2000, "-m", str(large), "-n", "10", *sampled],
        "score": ["score", "word " * 20_000, "-m", str(tiny), "--stride", "8"],
        "json": ["generate", "Hello", "-m", str(tiny), "-n", "60", "--json", "--samples", "9", *sampled],
    }[command] + ["--offline", "--device", "cpu", "--threads", "1"]
    seconds, whole = alone(*args)
    codes: Counter[int] = Counter()
    for delay in delays(50 if soak else 3, seconds):
        code, out = stop(start(*args), random.choice(list(CODES)), delay)
        codes[code] += 1
        assert out[-1:] in (b"", b"\n") and whole.startswith(out[:-1])
        assert command != "json" or whole.startswith(out)  # whole records
        assert code != 0 or out == whole
    print(f"{command}: {seconds:.2f} s alone; exit codes {dict(codes)}")


def test_a_signal_at_any_moment_leaves_a_job_that_can_go_on(tiny: Path, tmp_path: Path, soak: bool) -> None:
    random.seed(0)
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{n}", "samples": 1 + n % 3}) + "\n" for n in range(60)))
    args = ["generate", "--offline", "--device", "cpu", "--threads", "1", "-m", str(tiny), "--input", str(source)]
    args += ["-n", "40", "--temperature", "1", "--seed", "1", "--resume", "--output"]
    seconds, _ = alone(*args, str(whole))
    codes: Counter[int] = Counter()
    for delay in delays(50 if soak else 4, seconds):
        code, out = stop(start(*args, str(target)), random.choice(list(CODES)), delay)
        codes[code] += 1
        data = target.read_bytes() if target.exists() else b""
        assert out == b"" and whole.read_bytes().startswith(data) and data[-1:] in (b"", b"\n")
        assert code != 0 or data == whole.read_bytes()
        if data == whole.read_bytes():
            target.unlink()
    alone(*args, str(target))
    assert target.read_bytes() == whole.read_bytes()
    print(f"job: {seconds:.2f} s alone; exit codes {dict(codes)}")
