"""The endpoint beside the library it serves: 8 clients against generate_many at batch 8, and the first token.

Both work on the same model, take turns and use as many threads, so that only the ratio matters. GPT-2 small's layout,
random weights; `-m` takes another model.

    pip install -e ".[serve]"
    python scripts/bench_serve.py [-m MODEL] [--rounds 7] [--tokens 40]
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel, Tokenizer

CLIENTS = 8
PROMPTS = [f"Once upon a time number {i} there was" for i in range(CLIENTS)]


def first_token(port: int, prompt: str, tokens: int) -> float:
    """Seconds from a request to its first event; all of it is read."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    options = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stop_ids": [], "stream": True}
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(options), {"content-type": "application/json"})
    response = connection.getresponse()
    response.readline()
    first = time.perf_counter() - started
    response.read()
    connection.close()
    return first


def clients(port: int, tokens: int) -> float:
    """Tokens per second of all clients together."""
    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda prompt: first_token(port, prompt, tokens), PROMPTS))
    return CLIENTS * tokens / (time.perf_counter() - started)


def library(lm: LanguageModel, tokens: int) -> float:
    started = time.perf_counter()
    drawn = sum(len(one.ids) for one in lm.generate_many(PROMPTS, max_new_tokens=tokens, stop_ids=(), batch_size=8))
    return drawn / (time.perf_counter() - started)


def library_first(lm: LanguageModel) -> float:
    started = time.perf_counter()
    with lm.stream(PROMPTS[0], max_new_tokens=3, stop_ids=()) as stream:
        next(stream)
        return time.perf_counter() - started


def measure(lm: LanguageModel, port: int, tokens: int, rounds: int) -> None:
    clients(port, tokens), library(lm, tokens)
    ratios, waits = [], []
    for _ in range(rounds):
        ratios.append(clients(port, tokens) / library(lm, tokens))
        time.sleep(0.1)  # the server is idle again
        waits.append(first_token(port, PROMPTS[0], 3) - library_first(lm))
    print(f"{CLIENTS} clients: {statistics.median(ratios):.3f} of generate_many's tokens per second")
    print(f"first token: {1000 * statistics.median(waits):+.1f} ms beside the library's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=minigpt.usable_cpus())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with TemporaryDirectory() as folder:
        if args.model is None:
            torch.manual_seed(0)
            minigpt.save(LanguageModel(GPT2(GPT2Config()), Tokenizer.gpt2()), folder)
            args.model = folder
        log = Path(folder) / "log"
        command = [sys.executable, str(Path(__file__).with_name("serve.py")), "-m", args.model, "--port", "0"]
        with log.open("w") as out:
            server = subprocess.Popen([*command, "--threads", str(args.threads)], stderr=out)
        try:
            while not (found := re.search(r":(\d+) \(Press", log.read_text())) and server.poll() is None:
                time.sleep(0.1)
            if not found:
                sys.exit(log.read_text())
            measure(minigpt.load(args.model), int(found[1]), args.tokens, args.rounds)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
