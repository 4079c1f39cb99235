"""Prompts and options from hostile hands: exit code 0, 1 or 2, one sentence and no traceback, and UTF-8 on stdout.

A sample by default; --fuzz-cases 5000 gives 10,000 command lines in one process and 200 in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import Worker, fuzz
from hypothesis import strategies as st
from tiny import gpt2_folder

import minigpt

pytestmark = pytest.mark.slow
ODD_TEXTS = [
    "",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\udcff\udc80",
    "a\0b",
    "-",
    "--",
    "-x",
    "\u0301" * 3000,
    "e\u0301\u0302",
    "\u202e\ufeff",
    "\r\n\n",
    "<|endoftext|>",
    "\U0010ffff",
    "👩‍👩‍👧",
    "\x1b[31m",
    "{}",
    "%s%n",
    " " * 2_000,
    "א\u05b0ב",
    "\x85\u2028",
]
NUMBERS = [
    "0",
    "1",
    "-1",
    "3",
    "1e308",
    "1e-320",
    "nan",
    "inf",
    "-inf",
    "9" * 30,
    "9" * 5000,
    "2147483648",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775809",
    "0x10",
    "",
    " 1 ",
    "1_0",
    "٣",
    "1e400",
    "0.5",
    "\ud800",
]
# Their values may be any number; those that set how much is asked for are tried with -n 2 after them.
NUMERIC = [
    "--min-new-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--seed",
    "--max-seconds",
    "--logprobs",
    "--no-repeat-ngram-size",
    "-n",
    "--stop",
    "--logit-bias",
    "--ablate",
    "--device",
    "--dtype",
    "--batch-size",
    "--revision",
]
texts = st.binary(max_size=60).map(os.fsdecode) | st.text(max_size=40) | st.sampled_from(ODD_TEXTS)
ids = st.lists(st.sampled_from([*NUMBERS, "5", "50256", "50257", ",", ",,", "[1]", "1.5", "\0"]), max_size=8).map(
    " ".join
)
values = st.sampled_from(NUMBERS) | texts
options = st.lists(
    st.tuples(st.sampled_from(NUMERIC), values).map(lambda pair: [pair[0] + "=" * (pair[0] != "-n") + pair[1]])
    | st.tuples(st.sampled_from(["0", "5", "50257", "-1", "x", "9" * 30]), values).map(
        lambda pair: [f"--logit-bias={'='.join(pair)}"]
    )
    | st.sampled_from(
        [["--json"], ["--echo"], ["--ids"], ["--special"], ["--ignore-eos"], ["--stats"], ["--overflow", "slide"]]
    ),
    max_size=3,
).map(lambda parts: [word for part in parts for word in part])
lines = st.lists(
    st.binary(max_size=30)
    | st.fixed_dictionaries(
        {},
        optional={
            "prompt": texts,
            "ids": st.lists(st.sampled_from([0, 5, -1, 10**30, None, "1"]), max_size=4),
            "id": values,
            "seed": st.sampled_from([1, -1, 2**64, 1.5]),
            "stop": texts,
            "special": st.sampled_from([True, None, "x"]),
            "text": texts,
            "context": texts | st.none(),
            "logit_bias": st.dictionaries(texts, st.sampled_from([1, 1e308, None]), max_size=2),
        },
    ).map(lambda value: json.dumps(value).encode()),
    max_size=5,
).map(b"\n".join)


@st.composite
def command(draw: st.DrawFn, model: str, real: bool = False) -> dict[str, str | list[str]]:
    """A command line and its standard input. Arguments of real processes hold no null bytes."""
    end = ["-m", model, "--offline"]
    kind = draw(st.sampled_from(["generate", "generate", "generate", "score", "tokenize", "attention", "stdin", "job"]))
    stdin = b""
    if kind == "job":
        stdin = draw(lines)
        argv = draw(st.sampled_from([["generate", "-n2"], ["score"], ["score", "--stride=8"]]))
        return {"argv": [*argv, "--input", "{input}", *end], "stdin": stdin.hex()}
    if kind == "stdin":
        stdin = draw(st.binary(max_size=200))
        argv = [draw(st.sampled_from(["generate", "score", "tokenize"])), "-"]
    else:
        argv = [kind, draw(st.sampled_from(["", "--prompt="])) + draw(texts | ids)]
    if argv[0] == "generate":
        argv += ["-n2", *draw(options), *draw(st.sampled_from([[], ["--temperature=1"]]))]
        if any(word.startswith("-n") for word in argv[3:]):
            argv += ["--overflow=stop"]  # else -n 999999999 is what it gets
    elif argv[0] in ("score", "attention"):
        argv += draw(st.sampled_from([[], ["--ids"], ["--json"]]))
        argv += [f"--context={draw(texts)}"] if argv[0] == "score" and draw(st.booleans()) else []
        argv += draw(st.sampled_from([[], ["--stride"], ["--bos"]])) if argv[0] == "score" else []
        argv += [draw(values)] if argv[-1] == "--stride" else []
    argv += end
    return {"argv": [word.replace("\0", "0") for word in argv] if real else argv, "stdin": stdin.hex()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(gpt2_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def with_input(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The case, with what it reads by name written to a file."""
    if "{input}" in case["argv"]:
        (folder / "in.jsonl").write_bytes(bytes.fromhex(case["stdin"]))
        case = {**case, "argv": [str(folder / "in.jsonl") if word == "{input}" else word for word in case["argv"]]}
    return case


def test_commands_in_one_process(worker: Worker, model: str, tmp_path: Path, fuzz_cases: int) -> None:
    fuzz(command(model), lambda case: worker.run(**with_input(case, tmp_path)) and None, 2 * fuzz_cases)


def test_commands_in_processes_of_their_own(model: str, tmp_path: Path, fuzz_cases: int) -> None:
    def check(case: dict[str, Any]) -> None:
        case = with_input(case, tmp_path)
        argv = [os.fsencode(word.encode("utf-8", "replace") if _odd(word) else word) for word in case["argv"]]
        run = subprocess.run(
            [sys.executable, "-m", "minigpt", *argv],
            input=bytes.fromhex(case["stdin"]),
            capture_output=True,
            timeout=300,
        )
        run.stdout.decode()
        said = run.stderr.decode()
        assert run.returncode in (0, 1, 2) and "Traceback" not in said and bool(said) >= bool(run.returncode), (
            said,
            argv,
        )

    fuzz(command(model, real=True), check, max(3, fuzz_cases // 25))


def _odd(word: str) -> bool:
    """Whether no argument of a process can say it."""
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        return True
    return False


@pytest.mark.parametrize(
    "text", [" " * 1_000_000, " " * 1_000_000 + "a", "\u0301" * 300_000, "a" * 300_000, "\0" * 300_000]
)
def test_very_long_texts(worker: Worker, model: str, text: str) -> None:
    for name in ("generate", "tokenize"):
        worker.run(argv=[name, "-", "-m", model, "--offline"], stdin=text.encode().hex())


@pytest.mark.parametrize(
    "ids", [[10**30], [-(10**30)], [2**63], [-1], [True], [1.0], [None], [[1]], ["1"], ["a", 1], [b"1"]]
)
def test_ids_through_the_api(model: str, ids: list[Any]) -> None:
    lm = minigpt.load(model, device="cpu", offline=True)
    for use in (lm.generate, lm.score, lambda ids: next(lm.stream(ids))):
        if use in (lm.generate, lm.score) and ids in (["1"], [[1]]):
            continue  # it is a list of good ones
        with pytest.raises(minigpt.PromptError):
            use(ids)
    for name in ("logit_bias", "suppress_tokens"):
        with pytest.raises(ValueError):
            lm.generate("a", **{name: {10**30: 1.0} if name == "logit_bias" else [10**30]})
