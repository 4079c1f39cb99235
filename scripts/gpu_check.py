#!/usr/bin/env python3
"""The first five minutes on a GPU: does decoding on CUDA do what the simulated device showed, and how fast?

    python scripts/gpu_check.py --json gpu.json [--model gpt2] [--quick]

Runs the CUDA tests; one prompt at 20 lengths, with and without cuDNN's attention; counts a step's kernels with the
profiler; times three equal calls; a float16 model with damaged weights; two threads x 50 calls; then bench.py.
Each check that raises is written down with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel

ROOT = Path(__file__).resolve().parent.parent
GREEDY: dict[str, Any] = {"stop_ids": ()}
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "seed": 1,
    **GREEDY,
}
AIMS = {"GPT-2 124M, bfloat16": 0.35, "GPT-2 XL, bfloat16": 2.0}  # on an H200


def model_of(name: str | None, dtype: torch.dtype, device: str, tiny: bool = False) -> LanguageModel:
    """The checkpoint; without one, random weights in the layout of GPT-2 124M, or a tiny one."""
    if name:
        return minigpt.load(name, device=device, dtype=dtype)
    sizes = {"n_embd": 24, "n_head": 2, "n_layer": 2, "vocab_size": 131, "n_positions": 128} if tiny else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(GPT2(GPT2Config(**sizes)).requires_grad_(False).to(device, dtype))


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def machine() -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory": [free, total],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def tests() -> dict[str, Any]:
    """The CUDA tests of this checkout."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/decoding/test_cuda.py", "--slow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return {"passed": done.returncode == 0, "last": done.stdout[-3000:]}


def lengths(lm: LanguageModel) -> dict[str, Any]:
    """Seconds to the first token at 20 lengths: a plan of cuDNN's for each would be 0.1 s and more, each time."""
    most = lm.limits.n_positions - 4
    sizes = [max(1, most * (at + 1) // 21) for at in range(20)]
    return {"sizes": sizes, "seconds": [seconds(lambda n=n: lm.generate([5] * n, max_new_tokens=1)) for n in sizes]}


def lengths_without_cudnn(args: argparse.Namespace) -> Any:
    """The same in a process that is told to prefer other attention."""
    model = ["--model", args.model] if args.model else []
    command = [sys.executable, __file__, "--only", "lengths", "--json", "-", *model]
    environment = {**os.environ, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
    return json.loads(done.stdout)["lengths"] if done.returncode == 0 else done.stderr[-2000:]


def kernels(lm: LanguageModel) -> dict[str, int]:
    """What the GPU runs for a token, by the profiler: the difference that ten tokens more make."""
    counts = []
    for new in (6, 16, 6, 16):
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            lm.generate([5, 6], max_new_tokens=new, **GREEDY)
            torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages()))
    return {"a token": (counts[3] - counts[2]) // 10, "aim": 165 + 2}


def equal_calls(lm: LanguageModel, new: int = 64) -> dict[str, Any]:
    """Seconds of three equal calls: the first captures."""
    found = {}
    for name, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for rows in (1, 8, 32):
            call = lambda rows=rows, options=options: list(  # noqa: E731
                lm.generate_many([[5, 6, 7]] * rows, batch_size=rows, max_new_tokens=new, **options)
            )
            took = [seconds(call) for _ in range(3)]
            found[f"{name}, {rows} rows"] = {"seconds": took, "ms a step": 1000 * min(took) / new}
    return found


def damaged(device: str) -> str:
    """A float16 job whose weights are not finite ends in a sentence."""
    lm = model_of(None, torch.float16, device, tiny=True)
    lm.model.ln_f.weight.data[0] = float("nan")
    try:
        lm.generate([5, 6], max_new_tokens=20, **GREEDY)
    except minigpt.MiniGPTError as error:
        return str(error)
    raise AssertionError("damaged weights went unnoticed")


def threads(lm: LanguageModel, calls: int) -> dict[str, Any]:
    """Two threads at once give what one gives."""
    wanted, wrong = lm.generate([5, 6, 7], max_new_tokens=20, **SAMPLED).ids, []

    def work() -> None:
        for _ in range(calls):
            try:
                found = lm.generate([5, 6, 7], max_new_tokens=20, **SAMPLED).ids
                if found != wanted:
                    wrong.append(f"{found} for {wanted}")
            except Exception as error:
                wrong.append(repr(error))

    both = [threading.Thread(target=work) for _ in range(2)]
    took = seconds(lambda: [thread.start() for thread in both] + [thread.join() for thread in both])
    return {"calls": 2 * calls, "seconds": took, "wrong": wrong[:5]}


def bench(args: argparse.Namespace) -> Any:
    output = args.json.with_suffix(".bench.json")
    command = [sys.executable, "scripts/bench.py", "--device", "cuda", "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    return json.loads(output.read_text()) if done.returncode == 0 else done.stderr[-2000:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="[gpu_check.json]; -: on stdout")
    parser.add_argument("--model", metavar="NAME", help="[random weights in GPT-2 124M's layout]")
    parser.add_argument("--quick", action="store_true", help="a tiny model; neither bench.py nor other processes")
    parser.add_argument("--only", metavar="CHECK", help="one of the checks")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    kept: dict[torch.dtype, LanguageModel] = {}

    def lm(dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
        if dtype not in kept:
            kept[dtype] = model_of(args.model, dtype, "cuda", args.quick)
        return kept[dtype]

    checks: dict[str, Callable[[], Any]] = {
        "machine": machine,
        "tests": tests,
        "lengths": lambda: lengths(lm()),
        "lengths without cuDNN": lambda: lengths_without_cudnn(args),
        "kernels": lambda: kernels(lm()),
        "equal calls, bfloat16": lambda: equal_calls(lm(), 8 if args.quick else 64),
        "equal calls, float32": lambda: equal_calls(lm(torch.float32), 8 if args.quick else 64),
        "aims, ms a step of one row": lambda: AIMS,
        "damaged weights": lambda: damaged("cuda"),
        "threads": lambda: threads(lm(), 2 if args.quick else 50),
        "bench": lambda: bench(args),
    }
    processes = ("tests", "lengths without cuDNN", "kernels", "bench")
    results: dict[str, Any] = {}
    for name, check in checks.items():
        if args.only not in (None, name) or (args.quick and name in processes):
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            results[name] = check()
        except Exception as error:  # the others are still worth their time
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(results, indent=1)
        if str(args.json) != "-":
            args.json.write_text(text)  # after each check: a crash of CUDA ends the process
    if str(args.json) == "-":
        print(text)
    failed = [name for name, one in results.items() if isinstance(one, dict) and (one.get("error") or one.get("wrong"))]
    return 1 if failed or not results.get("tests", {"passed": True}).get("passed") else 0


if __name__ == "__main__":
    sys.exit(main())
