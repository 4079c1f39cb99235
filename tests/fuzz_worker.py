"""The process in which test_fuzz.py and test_fuzz_prompts.py let hostile input loose: one JSON line in, one out.

A case is {"folder": ..., "prompts": [...]}, a model to load and prompts for it, or {"argv": [...], "stdin": hex}, for
cli.main. The answer says what came of it, the processor time, the process's peak memory, and what it wrote or started.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import minigpt
from minigpt.cli.main import main

ACTIONS = ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate", "os.system", "os.exec")
seen: list[str] = []


def watch(event: str, args: tuple[Any, ...]) -> None:
    writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    writing = writing and args[0] != os.devnull
    if writing or event in ACTIONS or event.partition(".")[0] in ("subprocess", "pickle", "socket", "shutil"):
        seen.append(f"{event} {args[:1]!r}")


def load(folder: str, prompts: list[Any]) -> str:
    try:
        lm = minigpt.load(folder, device="cpu", offline=True)
    except minigpt.MiniGPTError as error:
        return f"{type(error).__name__}: {error}"
    ends = []
    for prompt in prompts:
        try:
            lm.generate(prompt, max_new_tokens=3)
            lm.generate(prompt, max_new_tokens=3, temperature=1.0, top_p=0.9, seed=1, logprobs=2)
            lm.score(prompt, bos=True)
            ends.append("result")
        except (minigpt.MiniGPTError, ValueError) as error:  # ValueError: a parameter; a prompt's errors are both
            if not isinstance(error, minigpt.MiniGPTError):
                raise
            ends.append(f"{type(error).__name__}: {error}")
    return "; ".join(ends) or "result"


def command(argv: list[str], stdin: str) -> str:
    """The exit code, and what is wrong with the output."""
    streams = sys.stdin, sys.stdout, sys.stderr
    out, err = io.BytesIO(), io.BytesIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(bytes.fromhex(stdin)))
    texts = [io.TextIOWrapper(stream, encoding="utf-8", write_through=True) for stream in (out, err)]
    sys.stdout, sys.stderr = texts
    try:
        code: Any = main(argv)
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
    shown, said = out.getvalue().decode(), err.getvalue().decode()
    assert code in (0, 1, 2), code
    assert "Traceback" not in said and bool(said) >= bool(code), said
    assert code == 2 or said.count("minigpt: error: ") == code, said
    return f"{code}: {said.strip() or shown[:50]}"


def peak_mib() -> float:
    """Of this process since it began: ru_maxrss starts from what the tests' own process had."""
    try:
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def answer(case: dict[str, Any]) -> dict[str, Any]:
    seen.clear()
    started = time.process_time()
    try:
        end, fault = command(**case) if "argv" in case else load(**case), ""
    except BaseException:
        end, fault = "fault", traceback.format_exc()
    seconds = time.process_time() - started
    return {"end": end, "fault": fault, "seconds": seconds, "peak_mib": peak_mib(), "seen": seen[:5]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is not an answer
    sys.addaudithook(watch)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
