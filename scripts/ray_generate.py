"""`minigpt generate --input` on many machines, with Ray Data: the same lines in, the same records out.

    pip install -e ".[ray]"
    python scripts/ray_generate.py --input prompts.jsonl --output records.jsonl -m gpt2 --workers 16 [--address auto]

Every worker is a process that loads the model once and takes blocks of lines. Ids, seeds, bad lines and their errors
are those of the single process, because a line's record depends on that line, its number and the options alone; the
log-probabilities are, up to float32 rounding. The records are written in the order of the lines. The driver holds the
input in memory, a worker one block of it.
Decoding options are given as JSON: --params '{"temperature": 0.8, "max_new_tokens": 100, "seed": 1}'.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Any

import ray

from minigpt import MiniGPTError, SamplingParams, Tokenizer
from minigpt.files import checkpoint, locate
from minigpt.jobs import Job, records
from minigpt.lines import Input, Line
from minigpt.network.device import find_device, find_dtype


class Worker:
    """A model, loaded once, that turns blocks of lines into records."""

    def __init__(self, model: str, device: str, dtype: str, threads: int, batch_size: int) -> None:
        import torch

        import minigpt

        torch.set_num_threads(threads)
        self.model, self.batch_size = model, batch_size
        self.lm = minigpt.load(model, device=device, dtype=dtype)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """{"position": [...], "line": [...]} -> {"position": [...], "records": [...]}, one JSON text for each line."""
        found = records(self.lm, map(unpack, block["line"]), model=self.model, batch_size=self.batch_size)
        return {"position": block["position"], "records": [json.dumps(each) for each in found]}


def pack(line: Line) -> str:
    """A Line as text, which any cluster's Ray can carry."""
    return json.dumps(asdict(line))


def unpack(text: str) -> Line:
    """The Line that `pack` was given."""
    values = json.loads(text)
    return Line(**{**values, "params": SamplingParams(**values["params"])})


def generate(args: argparse.Namespace) -> tuple[int, int]:
    """Run the job. Gives how many records there are, and how many of them are errors."""
    settings = {"model": args.model, "revision": None, "dtype": args.dtype, "special": False, "device": args.device}
    with closing(Job(Input(args.input), args.output, SamplingParams(**args.params), settings, args.resume)) as job:
        if not (lines := list(job.lines)):
            return job.count, job.failed
        check_model(args)
        # A Ray of its own gets a core more than the workers take: without one, Ray Data's own tasks would never run.
        here = {} if args.address else {"num_cpus": args.workers * args.threads + 1, "include_dashboard": False}
        ray.init(address=args.address, log_to_driver=False, logging_level="ERROR", **here)
        blocks = min(len(lines), args.workers * 8)
        items = [{"position": at, "line": pack(line)} for at, line in enumerate(lines)]
        done = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            Worker,
            fn_constructor_args=(args.model, args.device, args.dtype, args.threads, args.batch_size),
            batch_size=None,  # a block at a time
            compute=ray.data.ActorPoolStrategy(size=args.workers),
            num_cpus=args.threads,
            num_gpus=1 if args.device.startswith("cuda") else 0,
        )
        waiting: dict[int, str] = {}  # what came before its turn
        following = 0
        for row in done.iter_rows():
            waiting[row["position"]] = row["records"]
            while following in waiting:
                job.write(json.loads(waiting.pop(following)))
                following += 1
        return job.count, job.failed


def check_model(args: argparse.Namespace) -> None:
    """Raise MiniGPTError for what no worker could load, before Ray starts. A cluster's GPUs need not be here."""
    if args.device == "cpu" or not args.address:
        find_dtype(args.dtype, find_device(args.device))
    folder = locate.locate(args.model)
    config = checkpoint.read_config(folder)
    checkpoint.check(folder, config)
    Tokenizer.from_folder(folder, config.vocab_size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--resume", action="store_true", help="go on with an --output that is not complete")
    parser.add_argument("-m", "--model", default="gpt2", help="as in minigpt: every machine must be able to load it")
    parser.add_argument("--params", type=json.loads, default={}, help="SamplingParams as JSON")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with its own model [2]")
    parser.add_argument("--threads", type=int, default=1, help="CPU cores per worker [1]")
    parser.add_argument("--batch-size", type=int, default=8, help="rows at a time in each worker [8]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per worker [cpu]")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--address", help="a running cluster's, or auto [a Ray of its own on this machine]")
    args = parser.parse_args()
    try:
        for name in ("workers", "threads", "batch_size"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
        count, failed = generate(args)
        if failed:
            raise MiniGPTError(f"{failed} of {count} records are errors: see {args.output}")
    except ray.exceptions.RayError as error:  # a worker's whole traceback, with what went wrong at its end
        print("ray_generate: error:", (str(error).strip() or repr(error)).splitlines()[-1].strip(), file=sys.stderr)
        return 1
    except (MiniGPTError, ValueError, TypeError) as error:
        print("ray_generate: error:", error, file=sys.stderr)
        return 1 if isinstance(error, MiniGPTError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
