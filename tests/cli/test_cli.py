"""The command line: what it prints where, its exit codes, and one clear line for everything that can go wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer, environment

import minigpt
from minigpt import GPT2, GPT2Config, Tokenizer
from minigpt.cli.main import main
from minigpt.cli.parser import make_parser
from minigpt.network import device
from minigpt.network.products import FORMATS, chosen

GENERATE = ["generate", "--offline", "--device", "cpu"]
PLAIN = "minigpt: <|endoftext|> is read as plain text: add --special to read it as the special token\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with GPT-2's vocabulary, in the official layout."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    model = GPT2(GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=64, initializer_range=0.5))
    minigpt.save(model, path)
    return path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in this process: (exit code, stdout, stderr). `stdin` is bytes."""

    def call(*args: str, stdin: bytes = b"", model: bool = True) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main([*args, *(["-m", str(folder)] if model else [])])
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def process(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "minigpt", *args], **{**pipes, **options})


# Output


def test_stdout_is_the_text_and_a_newline_and_stderr_is_empty(run: Any, folder: Path) -> None:
    expected = minigpt.load(folder, device="cpu").generate("Hello there", max_new_tokens=8).text
    assert run(*GENERATE, "Hello there", "-n", "8") == (0, expected + "\n", "")
    assert run(*GENERATE, "Hello there", "-n", "8", "--echo") == (0, "Hello there" + expected + "\n", "")
    assert run(*GENERATE, "Hello there", "-n", "0") == (0, "\n", "")


@pytest.mark.parametrize(
    "args", [[""], ["-"], ["--ids", ""], ["", "--json"], ["", "--samples", "2", "--temperature", "1"]]
)
def test_an_empty_prompt_starts_a_text(run: Any, args: list[str]) -> None:
    code, out, err = run(*GENERATE, *args, "-n", "2")
    assert (code, err) == (0, "") and out


def test_samples_are_separated_by_a_line_of_dashes(run: Any, folder: Path) -> None:
    options = {"max_new_tokens": 5, "temperature": 1.0, "seed": 3, "samples": 3}
    texts = [c.text for c in minigpt.load(folder, device="cpu").generate("Hello", **options)]
    code, out, err = run(*GENERATE, "Hello", "-n", "5", "--temperature", "1", "--seed", "3", "--samples", "3")
    assert (code, out, err) == (0, "---\n".join(text + "\n" for text in texts), "")


def test_json_holds_the_whole_record(run: Any, folder: Path) -> None:
    code, out, err = run(
        *GENERATE, "Caf\u00e9", "-n", "4", "--json", "--logprobs", "2", "--samples", "2", "--temperature", "1"
    )
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(records)) == (0, "", 2)
    keys = [
        "id",
        "sample",
        "prompt",
        "prompt_ids",
        "text",
        "ids",
        "finish_reason",
        "seed",
        "logprobs",
        "score",
        "model",
    ]
    assert all(list(record) == keys for record in records)
    first = records[0]
    assert (first["prompt"], first["sample"], first["model"]) == ("Caf\u00e9", 0, str(folder))
    assert first["prompt_ids"] == Tokenizer.gpt2().encode("Caf\u00e9")
    assert [entry["id"] for entry in first["logprobs"]] == first["ids"]
    assert [len(entry["top"]) for entry in first["logprobs"]] == [2] * 4


def test_ids_in_and_out(run: Any, folder: Path) -> None:
    ids = minigpt.load(folder, device="cpu").generate([464, 3290], max_new_tokens=5).ids
    assert run(*GENERATE, "--ids", "464, 3290", "-n", "5") == (0, " ".join(map(str, ids)) + "\n", "")
    code, _, err = run(*GENERATE, "--ids", "464 dog")
    assert code == 1 and "token ids separated by spaces or commas" in err


def test_stats_go_to_stderr(run: Any) -> None:
    code, out, err = run(*GENERATE, "Hello", "-n", "5", "--stats", "--seed", "9", "--temperature", "1")
    assert code == 0 and out.endswith("\n")
    for expected in (
        "prompt: 1 token in",
        "generation: 4 tokens in",
        "tokens per second",
        "peak memory:",
        "M parameters, cpu, float32, tokenizer: GPT-2's own: the folder has none), loaded in ",
    ):
        assert expected in err
    assert "seed: 9" in err and "finish reason: length" in err
    fresh = run(*GENERATE, "Hello", "-n", "5", "--stats", "--temperature", "1")[2]
    seed = next(line.removeprefix("seed: ") for line in fresh.splitlines() if line.startswith("seed: "))
    assert seed.isdigit()  # the fresh seed is reported, so that the run can be repeated
    assert (
        "seed: 4, 5"
        in run(*GENERATE, "Hello", "-n", "2", "--stats", "--seed", "4", "--temperature", "1", "--samples", "2")[2]
    )


def test_stats_say_what_was_loaded_and_no_seed_that_was_not_used(run: Any) -> None:
    said = run(*GENERATE, "Hello", "-n", "1", "--stats", "--dtype", "int8")[2]
    assert "M parameters, cpu, int8, tokenizer: GPT-2's own: the folder has none), loaded in " in said
    assert f"matrix products by {chosen(FORMATS[torch.int8]).name}" in said
    assert "seed" not in said and "prompt: 1 token in" in said and "generation: 0 tokens in" in said


# Prompts


def test_every_way_to_give_the_prompt(run: Any, tmp_path: Path) -> None:
    def ids(*args: str, stdin: bytes = b"") -> list[int]:
        code, out, err = run(*GENERATE, "-n", "0", "--json", *args, stdin=stdin)
        assert code == 0 and err == ("" if "a<|endoftext|>" not in args or "--special" in args else PLAIN)
        return list(json.loads(out)["prompt_ids"])

    encode = Tokenizer.gpt2().encode
    path = tmp_path / "prompt.txt"
    assert ids("a\nb") == ids("-p", "a\nb") == ids("-", stdin=b"a\nb\n") == encode("a\nb")
    assert ids("a\\nb") == encode("a\\nb")  # a backslash is a backslash
    assert ids("--prompt=-x") == encode("-x")
    assert ids("") == [50256]
    assert ids("The quick ") == [464, 2068, 220]  # never stripped
    for data, expected in [
        (b"\xef\xbb\xbfHello", [15496]),  # a byte-order mark
        (b"Hello\n", [15496]),
        (b"Hello\r\n", [15496]),
        (b"Hello\n\n", [15496, 198]),
        (b"a\r\nb", encode("a\r\nb")),
        (b"", [50256]),
    ]:
        path.write_bytes(data)
        assert ids("-f", str(path)) == ids("-", stdin=data) == expected
    assert ids("--special", "a<|endoftext|>")[-1] == 50256
    assert ids("a<|endoftext|>")[-1] != 50256
    assert ids("\udce9") == ids("\udbc0") == encode("\ufffd")  # an argument that was not UTF-8, or not UTF-16


@pytest.mark.parametrize(
    "args, code, message",
    [
        ([], 2, "no prompt: give one of"),
        (["a", "-p", "b"], 2, "the prompt is given twice"),
        (["-p", "a", "-f", "b"], 2, "the prompt is given twice"),
        (["-f", "/nowhere/prompt.txt"], 1, "cannot read the prompt from /nowhere/prompt.txt: No such file"),
        (["a", "--temperature", "-1"], 2, "temperature must be"),
        (["a", "--temperature", "nan"], 2, "temperature must be"),
        (["a", "--top-p", "1.5"], 2, "top_p must be"),
        (["a", "--top-k", "-1"], 2, "top_k must be at least 0"),
        (["a", "--top-k", "40.0"], 2, "invalid int value"),
        (["a", "-n", "-1"], 2, "max_new_tokens must be at least 0"),
        (["a", "--samples", "0"], 2, "samples must be at least 1"),
        (["a", "--repetition-penalty", "0"], 2, "repetition_penalty must be above 0"),
        (["a", "--stop", ""], 2, "stop must be a non-empty string"),
        (["a", "--logit-bias", "5"], 2, "write it as ID=X with numbers"),
        (["a", "--logit-bias", "99999=1"], 2, "logit_bias has token id 99999"),
        (["a", "--logprobs", "-1"], 2, "logprobs must be at least 0"),
        (["a", "--max-seconds", "-1"], 2, "max_seconds must be a finite number of at least 0"),
        (["a", "--threads", "0"], 2, "--threads must be from 1 to 4096"),
        (["a", "--threads", "99999999999"], 2, "--threads must be from 1 to 4096"),
        (["a", "--overflow", "wrap"], 2, "overflow must be 'stop' or 'slide', not 'wrap'"),
        (["a", "--temperature=--"], 2, "invalid float value: '--'"),
        (["a", "--device=--"], 1, "device '--' is not supported"),
        (["a", "--no-such-option"], 2, "unrecognized arguments"),
        (["a", "--device", "gpu"], 1, "use auto, cpu, cuda or cuda:N"),
        (["a", "--device", "cuda:99"], 1, "is not there"),
        (["a", "--dtype", "int4"], 1, "dtype 'int4' is not supported on cpu"),
        (["x " * 65], 1, "but the model's context is 64"),
    ],
)
def test_bad_input_is_one_clear_line(run: Any, args: list[str], code: int, message: str) -> None:
    got, out, err = run(*GENERATE, *args)
    assert (got, out) == (code, "")
    assert message in err and "Traceback" not in err
    assert err.splitlines()[-1].startswith("minigpt")


def test_a_prompt_that_is_not_utf8_names_the_offset(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9 au lait")
    code, _, err = run(*GENERATE, "-f", str(path))
    assert (code, err) == (1, f"minigpt: error: {path} is not UTF-8: byte 0xe9 at offset 3\n")
    code, _, err = run(*GENERATE, "-", stdin=b"\xff")
    assert (code, err) == (1, "minigpt: error: standard input is not UTF-8: byte 0xff at offset 0\n")


@pytest.mark.slow
def test_text_is_utf8_whatever_the_locale(folder: Path, tmp_path: Path) -> None:
    """In the C locale Python reads an argument as ASCII, and leaves every other byte as a lone surrogate."""
    (tmp_path / "prompt.txt").write_bytes("café 日".encode())
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for prompt in (["café 日"], ["-f", str(tmp_path / "prompt.txt")]):
        running = process("tokenize", "--json", "-m", str(folder), *prompt, env=environment)
        out, err = running.communicate(timeout=60)
        assert err == b"" and [json.loads(line)["id"] for line in out.splitlines()] == [66, 1878, 2634, 10545, 245, 98]


@pytest.mark.parametrize("prompt", ["a , b", "ends in lines\n\n", " \t", "\U0001f642 caf\u00e9"])
def test_echo_is_the_prompt_and_then_what_comes_without_it(run: Any, prompt: str) -> None:
    """The prompt is never cut off by its length in characters: decoding need not give it back."""
    alone = run(*GENERATE, prompt, "-n", "4")
    assert run(*GENERATE, prompt, "-n", "4", "--echo") == (0, prompt + alone[1], "")


def test_threads_are_those_that_the_process_may_use(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(device, "usable_cpus", lambda: 2)
    run(*GENERATE, "a", "-n", "1", "--threads", "3")
    run(*GENERATE, "a", "-n", "1")
    assert asked == [3, 2]


def test_an_unknown_model_is_one_clear_line(run: Any) -> None:
    code, out, err = run(*GENERATE, "a", "-m", "nobody/nothing", model=False)
    assert (code, out) == (1, "") and err.startswith("minigpt: error: ") and err.count("\n") == 1


# Notes: one line on stderr, and none where nothing is wrong


@pytest.mark.parametrize("command", ["generate", "score", "tokenize", "attention"])
def test_a_special_token_that_stays_plain_text_is_noted(run: Any, command: str) -> None:
    """A fine-tune's <|user|> became plain text without a word."""
    more = ["-n", "1"] if command == "generate" else []
    note = "minigpt: <|endoftext|> is read as plain text: add --special to read it as the special token\n"
    text = "<|endoftext|>hi there"
    assert run(command, "--offline", text, *more)[::2] == (0, note)
    assert run(command, "--offline", text, *more, "--special")[::2] == (0, "")
    assert run(command, "--offline", "< |endoftext|>hi", *more)[::2] == (0, "")
    if command != "tokenize":
        assert run(command, "--offline", "--ids", "5 6", *more)[::2] == (0, "")


def test_special_tokens_are_noted_once_for_a_file(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "<|endoftext|>"}\n{"prompt": "a<|endoftext|>"}\n')
    code, out, err = run(*GENERATE, "--input", str(tmp_path / "in"), "-n", "1")
    assert code == 0 and err.count(PLAIN) == 1
    (tmp_path / "in").write_text('{"prompt": "<|endoftext|>", "special": true}\n{"prompt": "a", "special": null}\n')
    code, out, err = run(*GENERATE, "--input", str(tmp_path / "in"), "-n", "1")
    assert code == 0 and "--special" not in err and json.loads(out.splitlines()[0])["prompt_ids"] == [50256]


@pytest.fixture
def tuned(folder: Path, tmp_path: Path) -> Path:
    """The model with a generation_config.json that changes what transformers draws."""
    path = tmp_path / "tuned"
    shutil.copytree(folder, path)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5, "eos_token_id": 50256}
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def test_generation_config_is_used_or_noted(run: Any, tuned: Path) -> None:
    """It was ignored in silence."""
    lm = minigpt.load(tuned, device="cpu")
    args = [*GENERATE, "Hello", "-n", "6", "-m", str(tuned)]
    code, out, err = run(*args, model=False)
    assert (code, out) == (0, lm.generate("Hello", max_new_tokens=6).text + "\n")
    assert err.startswith("minigpt: generation_config.json sets ") and err.count("\n") == 1
    assert "--use-model-defaults" in err
    for setting in ("temperature 0.7", "top_k 5", "repetition_penalty 1.5"):
        assert setting in err
    code, out, err = run(*args, "--use-model-defaults", "--seed", "3", model=False)
    assert (code, err) == (0, "") and out == lm.generate("Hello", lm.defaults, max_new_tokens=6, seed=3).text + "\n"
    # What is given comes before the model's own, also where it is what the library takes by itself.
    code, out, err = run(*args, "--use-model-defaults", "--temperature", "0", "--top-k", "0", model=False)
    assert (code, err) == (0, "") and out == lm.generate("Hello", max_new_tokens=6, repetition_penalty=1.5).text + "\n"
    given = ["--temperature", "0.7", "--top-k", "9", "--repetition-penalty", "1", "--seed", "1"]
    assert run(*args, *given, model=False)[::2] == (0, "")


def test_generation_config_in_a_job(run: Any, tuned: Path, tmp_path: Path) -> None:
    lm = minigpt.load(tuned, device="cpu")
    (tmp_path / "in").write_text('{"prompt": "a"}\n{"prompt": "b", "top_k": 3}\n')
    args = [*GENERATE, "--input", str(tmp_path / "in"), "-n", "4", "--seed", "7", "-m", str(tuned)]
    assert "add --use-model-defaults" in run(*args, model=False)[2]
    code, out, err = run(*args, "--use-model-defaults", model=False)
    assert code == 0 and "--use-model-defaults" not in err
    options = {"max_new_tokens": 4}
    expected = [
        lm.generate("a", lm.defaults, seed=8, **options),
        lm.generate("b", lm.defaults, seed=9, top_k=3, **options),
    ]
    assert [json.loads(line)["ids"] for line in out.splitlines()] == [one.ids for one in expected]


@pytest.mark.parametrize(
    "options, names",
    [
        (["--top-k", "5"], "top_k"),
        (["--top-p", "0.5"], "top_p"),
        (["--min-p", "0.5"], "min_p"),
        (["--seed", "1"], "seed"),
        (["--samples", "2"], "samples"),
        (["--top-k", "5", "--seed", "1", "--json"], "top_k, seed"),
        (["--top-k", "0", "--top-p", "1", "--temperature", "0"], ""),
        (["--top-k", "5", "--seed", "1", "--samples", "2", "--temperature", "1"], ""),
    ],
)
def test_options_without_effect_are_noted(run: Any, options: list[str], names: str) -> None:
    code, _, err = run(*GENERATE, "a", "-n", "1", *options)
    assert code == 0 and err.count("\n") == (1 if names else 0)
    assert err.startswith(f"minigpt: {names} ha") if names else not err


def test_the_context_limit_is_noted(run: Any, tmp_path: Path) -> None:
    """The text ended in the middle of a sentence, with nothing to say why."""
    note = "minigpt: a text ends at the context of 64 tokens: --overflow slide goes on\n"
    args = [*GENERATE, "Hello", "--ignore-eos"]
    for more in ([], ["--json"], ["--samples", "2", "--temperature", "1"]):
        assert run(*args, "-n", "70", *more)[::2] == (0, note)
    assert run(*args, "-n", "64")[::2] == (0, "")  # all that was asked for
    assert run(*args, "-n", "70", "--overflow", "slide")[::2] == (0, "")
    (tmp_path / "in").write_text('{"prompt": "Hello"}\n{"prompt": "b", "max_new_tokens": 2}\n')
    err = run(*GENERATE, "--ignore-eos", "-n", "70", "--input", str(tmp_path / "in"))[2]
    assert err.count(note) == 1


def test_a_warning_of_the_library_is_one_line(run: Any, folder: Path, tmp_path: Path) -> None:
    """Python's way is two lines, with a line of source. What shows warnings afterwards is what did before."""
    path = tmp_path / "odd"
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "bos_token_id": 1, "eos_token_id": 1}))
    before = warnings.showwarning
    code, _, err = run(*GENERATE, "a", "-n", "1", "-m", str(path), model=False)
    assert code == 0 and err.startswith("minigpt: ") and err.count("\n") == 1 and "GPT-2's vocabulary is used" in err
    assert warnings.showwarning is before


# Friction


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([])
    assert capsys.readouterr().out.startswith("usage: minigpt ")


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["generate", "Once", "upon", "a", "time"],
            "unrecognized arguments: upon a time (put a prompt of several words",
        ),
        (["score", "Once", "upon"], "into quotes"),
        (["generate", "a", "--max-tokens", "5"], "--max-tokens 5: did you mean --max-new-tokens?"),
        (["generate", "a", "--max_length=5"], "did you mean --max-new-tokens?"),
        (["generate", "a", "--n", "3"], "did you mean --samples?"),  # it was taken for --no-repeat-ngram-size
        (["generate", "a", "--num-return-sequences", "3"], "did you mean --samples?"),
        (["generate", "--do-sample", "a"], "did you mean --temperature?"),
        (["generate", "a", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "a", "--temp", "1"], "did you mean --temperature?"),
        (["generate", "a", "--top_k", "1"], "did you mean --top-k?"),
        (["generate", "a", "--random-seed", "1"], "did you mean --seed?"),
        (["generate", "a", "--ignore-eof"], "did you mean --ignore-eos?"),
        (["score", "a b", "--strid", "1"], "did you mean --stride?"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(run: Any, args: list[str], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]


def test_a_file_in_utf16_is_told(run: Any, tmp_path: Path) -> None:
    """As PowerShell writes it. It was "not UTF-8: byte 0xff at offset 0"."""
    for data in ("Hello".encode("utf-16"), b"\xfe\xff" + "Hello".encode("utf-16-be")):
        (tmp_path / "text").write_bytes(data)
        for args in (["-f", str(tmp_path / "text")], ["--input", str(tmp_path / "text")]):
            code, out, err = run(*GENERATE, *args)
            assert (code, out, err) == (1, "", f"minigpt: error: {tmp_path}/text is UTF-16: save it as UTF-8\n")
        assert "standard input is UTF-16" in run("tokenize", "--offline", "-", stdin=data)[2]


def test_logprobs_are_a_table_after_the_text(run: Any, folder: Path) -> None:
    """--logprobs needed --json."""
    lm = minigpt.load(folder, device="cpu")
    done = lm.generate("Hello", max_new_tokens=3, logprobs=2)
    assert done.logprobs is not None

    def shown(id: int) -> str:
        data = lm.tokenizer.token_bytes(id)
        return repr(data.decode()) if data.decode(errors="replace").encode() == data else repr(data)

    table = ""
    for entry in done.logprobs:
        best = "".join(f"\t{shown(id)} {logprob:.4f}" for id, logprob in entry.top)
        table += f"{entry.id}\t{entry.logprob:.4f}\t{shown(entry.id)}{best}\n"
    assert run(*GENERATE, "Hello", "-n", "3", "--logprobs", "2") == (0, f"{done.text}\n\n{table}", "")
    args = ["-n", "3", "--logprobs", "0", "--temperature", "1", "--seed", "1", "--samples", "2"]
    out = run(*GENERATE, "Hello", *args)[1]
    first, second = out.split("---\n")
    assert len(first.splitlines()) == len(second.splitlines()) == 5 and out.count("\n\n") == 2


def test_max_seconds_stops_at_the_first_token_after_it(run: Any) -> None:
    code, out, _ = run(*GENERATE, "Hello", "-n", "60", "--json", "--max-seconds", "0")
    record = json.loads(out)
    assert (code, record["finish_reason"], len(record["ids"])) == (0, "time", 1)


def test_main_leaves_the_hosts_signal_handlers_alone(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where C code installed them, Python's getsignal gives None, and putting that back was a TypeError."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("a handler was installed"))
    assert run(*GENERATE, "a", "-n", "1")[0] == 0


WINDOWS = """
import json, os, sys
import torch, tiktoken, safetensors.torch, huggingface_hub, transformers  # they have other ways of their own there
import numpy, multiprocessing, subprocess, tempfile
for name in ("resource", "fcntl", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "getuid", "geteuid", "getgid", "fork", "forkpty", "uname", "sysconf", "statvfs",
             "mkfifo", "killpg", "getpgid", "setsid", "nice", "pread", "pwrite", "fchmod", "getloadavg"):
    vars(os).pop(name, None)
from minigpt.cli.main import main
codes = [main(command) for command in json.loads(sys.argv[1])]
print("codes", codes)
"""


def test_stats_where_there_is_no_resource_module(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with "the installation is broken": Windows has no such module."""
    monkeypatch.setitem(sys.modules, "resource", None)
    code, out, err = run(*GENERATE, "Hello", "-n", "3", "--stats")
    assert code == 0 and out and "peak memory" not in err and "loaded in" in err


@pytest.mark.slow
def test_every_command_works_without_what_only_posix_has(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "a b"}\n')
    where = ["--offline", "-m", str(folder)]
    job = [
        "generate",
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(tmp_path / "out.jsonl"),
        "-n",
        "2",
        *where,
    ]
    commands = [
        ["generate", "Hello", "-n", "3", "--stats", "--device", "cpu", *where],
        [*job, "--stats", "--device", "cpu"],
        [*job, "--resume"],
        ["score", "a b", *where],
        ["score", "--input", str(tmp_path / "texts.jsonl"), *where],
        ["tokenize", "a b", *where],
        ["attention", "a b", *where],
        ["attention", "--roles", "--json", *where],
        ["attention", "a b", "--html", str(tmp_path / "page.html"), *where],
        ["info", *where],
        ["parity", "--device", "cpu", *where],
    ]
    run = [sys.executable, "-c", WINDOWS, json.dumps(commands)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # transformers was imported before parity can say so
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == f"codes {[0] * len(commands)}", done.stderr
    assert "peak memory" not in done.stderr and "loaded in" in done.stderr


# Other commands


def test_tokenize_prints_a_token_a_line(run: Any) -> None:
    code, out, err = run("tokenize", "--offline", "Hello\U0001f917<|endoftext|>", "--special")
    assert (code, err) == (0, "")
    assert out == "15496\t'Hello'\n8582\tb'\\xf0\\x9f'\n97\tb'\\xa4'\n245\tb'\\x97'\n50256\t'<|endoftext|>'\n"
    out = run("tokenize", "--offline", "--json", "Hello \U0001f600")[1]
    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": 15496, "token": "Hello", "bytes": list(b"Hello")},
        {"id": 30325, "token": " \ufffd", "bytes": [32, 240, 159, 152]},  # text and bytes, not a Python repr
        {"id": 222, "token": "\ufffd", "bytes": [128]},
    ]


def test_score_lists_the_tokens_and_the_figures(run: Any, folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    expected = lm.score("Hello\U0001f917 there")
    code, out, err = run("score", "--offline", "Hello\U0001f917 there")
    assert (code, err) == (0, "")
    tokens, figures = out.split("\n\n")
    shown = ["'Hello'", "b' \\xf0\\x9f'", "b'\\xa4'", "b'\\x97'", "' there'"]
    shown[1] = "b'\\xf0\\x9f'"
    logprobs = ["-", *(f"{logprob:.4f}" for logprob in expected.logprobs)]
    assert tokens.split("\n") == ["\t".join(map(str, x)) for x in zip(expected.ids, logprobs, shown, strict=True)]
    assert figures.split("\n")[:2] == [f"tokens         {len(expected.ids)}", f"total          {expected.total:.4f}"]
    for value in (f"{expected.mean:.6f}", f"{expected.perplexity:.6g}", f"{expected.bits_per_byte:.6f}"):
        assert value in figures


def test_score_as_json_with_bos_ids_and_stride(run: Any, folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")

    def record(text: str, stride: int | None, **options: Any) -> dict[str, Any]:
        values = asdict(lm.score(text, stride=stride, **options))
        del values["top"]
        return {**values, "model": str(folder), "stride": stride}

    assert json.loads(run("score", "--offline", "--json", "--bos", "Hi there")[1]) == record("Hi there", None, bos=True)
    assert json.loads(run("score", "--offline", "--json", "--ids", "15496 612")[1])["ids"] == [15496, 612]
    text = "word, and 7 others. " * 40
    code, out, err = run("score", "--offline", "--json", "--stride", "16", "-", stdin=text.encode())
    assert (code, err) == (0, "") and json.loads(out) == record(text, 16)
    code, out, err = run("score", "--offline", "--stride", "16", text)
    assert code == 0 and len(out.splitlines()) == 5 and f"perplexity     {record(text, 16)['perplexity']:.6g}" in out


@pytest.mark.parametrize(
    "args, code, message",
    [
        ([], 2, "no prompt: give one of"),
        (["word " * 70], 1, "the text has 71 tokens, but the model's context is 64: give a stride"),
        (["word"], 1, "there is nothing to score: that takes two tokens, or one and --bos"),
        ([""], 1, "there is nothing to score"),
        (["a b", "--stride", "0"], 2, "stride must be from 1 to 64, not 0"),
        (["a b", "--stride", "65"], 2, "stride must be from 1 to 64, not 65"),
        (["a b", "--stride", "x"], 2, "invalid int value"),
        (["--ids", "5 x"], 1, "token ids separated by spaces or commas"),
        (["--ids", "5 50257"], 1, "token id 50257 is outside the vocabulary"),
        (["-f", "/nowhere/a"], 1, "cannot read the prompt from /nowhere/a"),
    ],
)
def test_score_refuses_in_one_clear_line(run: Any, args: list[str], code: int, message: str) -> None:
    got, out, err = run("score", "--offline", *args)
    assert (got, out) == (code, "") and message in err and "Traceback" not in err


def test_score_of_a_continuation(run: Any, folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    score = lm.score(" there you", context="Hello")
    code, out, err = run("score", "--offline", " there you", "--context", "Hello")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "15496\t-\t'Hello'" and lines[1] == f"612\t{score.logprobs[0]:.4f}\t' there'"
    assert f"total          {score.total:.4f}" in lines
    assert json.loads(run("score", "--offline", "x", "--context", "", "--json")[1])["ids"] == [50256, 87]
    for more in (["--bos"], ["--stride", "8"]):
        code, out, err = run("score", "--offline", "x", "--context", "a", *more)
        assert (code, out) == (2, "") and "context goes with neither bos nor stride" in err


def test_score_of_many_texts(run: Any, folder: Path, tmp_path: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    source = tmp_path / "texts.jsonl"
    lines: list[Any] = [
        {"text": " there you", "context": "Hello", "id": "first"},
        {"text": "word " * 70},
        {"text": "<|endoftext|> a", "special": True, "context": None},
        {"text": "<|endoftext|> a"},
        {"text": "a"},
        {"text": "d e", "context": ""},
        {"text": "Caf\u00e9 au lait", "context": "long " * 100, "id": 5},
        {"prompt": "a"},
        {"text": 5},
        {"text": "a b", "context": 5},
        {"context": "a"},
        {"text": "a b", "id": "first"},
        {"text": "a b", "special": "yes"},
        {"text": "a b", "max_tokens": 3},
    ]
    source.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + "plain text\n" + '{"text": "x y", "id": 99}\n'
    )
    code, out, err = run("score", "--offline", "--input", str(source))
    assert code == 1 and err.splitlines()[-1] == "minigpt: error: 9 of 16 records are errors: see standard output"
    assert PLAIN in err
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["id"] for record in records] == ["first", 2, 3, 4, 5, 6, 5, 8, 9, 10, 11, "first", 13, 14, 15, 99]
    scored: dict[int, Any] = {
        11: {},
        0: {"context": "Hello"},
        2: {"special": True},
        3: {},
        5: {"context": ""},
        6: {"context": "long " * 100},
    }
    for at, options in scored.items():
        expected = lm.score(lines[at]["text"], **options)
        keys = ["id", "text", "context", "ids", "logprobs", "total", "mean", "perplexity", "bits_per_byte", "model"]
        assert list(records[at]) == keys and records[at]["ids"] == expected.ids
        assert records[at]["logprobs"] == pytest.approx(expected.logprobs, abs=1e-5)
        assert records[at]["context"] == lines[at].get("context") and records[at]["text"] == lines[at]["text"]
    errors = {record["line"]: record["error"] for record in records if "error" in record}
    wanted = {
        2: "the text has 71 tokens, but the model's context is 64",
        5: "there is nothing to score: that takes two tokens, or one and --bos or a context",
        8: "unknown key 'prompt': a line has text, context, id, special",
        9: "text must be a text, not 5",
        10: "context must be a text, not 5",
        11: "a line needs a text",
        13: "special must be true or false, not 'yes'",
        14: "unknown key 'max_tokens': a line has text",
        15: 'not JSON: Expecting value at column 1; write it as {"text": "plain text"}',
    }
    assert errors.keys() == wanted.keys() and all(text in errors[line] for line, text in wanted.items())


def test_score_of_many_texts_with_options(run: Any, folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    text = "many words, " * 60
    data = json.dumps({"text": text}).encode() + b"\n" + b'{"text": "a"}\n{"text": "a b", "context": "c"}\n'
    code, out, err = run("score", "--offline", "--input", "-", "--stride", "32", "--bos", stdin=data)
    first, second, third = map(json.loads, out.splitlines())
    assert code == 1 and first["perplexity"] == pytest.approx(lm.score(text, stride=32, bos=True).perplexity, rel=1e-5)
    assert second["ids"] == [50256, 64] and "context goes with neither bos nor stride" in third["error"]
    assert run("score", "--offline", "--input", "-", "--special", stdin=b'{"text": "<|endoftext|> a"}')[2] == ""
    code, out, err = run("score", "--offline", "--ids", "")  # ids of no text
    assert (code, out) == (1, "") and "there is nothing to score" in err
    code, out, err = run("score", "--offline", "--input", "-", stdin=b"nothing good")  # no text to score at all
    assert code == 1 and json.loads(out)["line"] == 1
    code, out, err = run("score", "--offline", "--input", "-")
    assert code == 1 and "standard input is empty: it should hold a JSON object a line" in err
    for more in (["text"], ["--context", "a"], ["--ids"], ["-f", "x"]):
        code, out, err = run("score", "--offline", "--input", "x", *more)
        assert (code, out) == (2, "") and "--input FILE holds the texts" in err


def test_info_shows_configuration_parameters_and_files(run: Any, folder: Path) -> None:
    code, out, err = run("info", "--offline")
    assert (code, err) == (0, "")
    total = sum(parameter.numel() for parameter in minigpt.load(folder).model.parameters())
    for expected in (
        "tokenizer GPT-2's own",
        "n_positions",
        "embeddings",
        "attention",
        "MLP",
        "norms",
        "head",
        f"{total:,}",
        "sha256",
        "F32",
        "MiB",
    ):
        assert expected in out
    record = json.loads(run("info", "--offline", "--json")[1])
    assert record["tokenizer"].startswith("GPT-2's own") and record["left_out"] == []
    assert sum(record["parameters"].values()) == total
    assert record["config"]["n_layer"] == 2


def test_info_refuses_files_that_do_not_fit_their_config(run: Any, folder: Path, tmp_path: Path) -> None:
    for change in ({"n_layer": 10**9}, {"n_embd": 2147483646}, {"vocab_size": 50256}):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        code, out, err = run("info", "--offline", "-m", str(tmp_path), model=False)
        assert (code, out) == (1, "") and "the weights do not fit config.json" in err and err.count("\n") == 1


@pytest.mark.slow
def test_info_downloads_no_weights_and_says_that_they_are_not_here(folder: Path, tmp_path: Path) -> None:
    """It fetched gigabytes to print the configuration."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    huge = json.dumps({**json.loads(files["config.json"]), "n_layer": 10**9}).encode()
    with HubServer() as hub:
        hub.add("me/model", files)
        hub.add("me/huge", {**files, "config.json": huge})  # nothing proves it: no such model may be built

        def info(name: str, *args: str, code: str = "from minigpt.cli.main import main; sys.exit(main())") -> str:
            argv = [sys.executable, "-c", f"import sys; {code}", "info", "-m", name, *args]
            env = environment(hub.url, tmp_path)
            done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout

        out = info("me/model")
        assert "the weights are not here" in out and "n_positions" in out and "sha256" not in out
        assert "model.safetensors" not in hub.asked() and "config.json" in hub.asked()
        record = json.loads(info("me/model", "--json", "--offline"))
        total = sum(parameter.numel() for parameter in minigpt.load(folder).model.parameters())
        assert record["files"] == [] and sum(record["parameters"].values()) == total
        assert sum(json.loads(info("me/huge", "--json"))["parameters"].values()) > 10**9
        info("me/model", code="from minigpt.files.locate import locate; locate('me/model')")
        assert "the weights are not here" not in (out := info("me/model", "--offline")) and "sha256" in out


def test_info_refuses_a_folder_without_weights(run: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    code, out, err = run("info", "-m", str(tmp_path), model=False)
    assert (code, out) == (1, "") and "has no model.safetensors" in err


# Real processes


def test_help_never_imports_torch() -> None:
    for args in (["--help"], ["generate", "--help"], ["--version"], ["generate", "--top-k", "x"], []):
        code = f"import sys; sys.argv = ['minigpt', *{args!r}]\ntry:\n    from minigpt.cli.main import main; main()\n"
        code += "finally:\n    assert not {'torch', 'tiktoken', 'huggingface_hub', 'safetensors'} & set(sys.modules)"
        assert b"AssertionError" not in subprocess.run([sys.executable, "-c", code], capture_output=True).stderr


def test_every_option_is_described() -> None:
    commands = next(action for action in make_parser()._actions if action.choices)
    help = subprocess.run(
        [sys.executable, "-m", "minigpt", "generate", "--help"], capture_output=True, text=True
    ).stdout
    actions = [action for command in commands.choices.values() for action in command._actions]
    assert len(actions) > 35 and all(action.help for action in actions)
    assert "[50]" in help and "[0.0]" in help and "(default: gpt2)" in " ".join(help.split())


@pytest.fixture
def endless(folder: Path) -> list[str]:
    """A command that generates for minutes unless it is stopped."""
    return [*GENERATE, "Hello", "-m", str(folder), "-n", "1000000", "--overflow", "slide", "--ignore-eos"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_text_and_ends_the_line(endless: list[str], number: int, code: int) -> None:
    running = process(*endless)
    assert running.stdout is not None
    first = running.stdout.read(20)  # flushed through a pipe as it comes
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == code
    assert len(first) == 20 and out.endswith(b"\n")
    assert err == b""


@pytest.mark.slow
def test_a_signal_while_loading_is_quiet(endless: list[str]) -> None:
    for delay in (0.05, 0.4, 1.0):
        running = process(*endless)
        time.sleep(delay)
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=60)
        assert running.returncode in (143, -signal.SIGTERM) and err == b""  # -SIGTERM: before main began


@pytest.mark.slow
def test_two_signals_in_a_row_are_quiet(endless: list[str]) -> None:
    """The second arrives while Python shuts down, or before main has begun."""
    for delay in (0.0, 0.02, 0.1, 2.0):
        running = process(*endless)
        time.sleep(delay + 0.05)
        for _ in range(2):
            running.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, err = running.communicate(timeout=60)
        # Only Python's own start, before a line of this package runs, is not in our hands.
        assert err == b"" or b"minigpt" not in err


def test_a_closed_pipe_is_quiet(endless: list[str]) -> None:
    running = process(*endless)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.read(5)
    running.stdout.close()
    assert running.wait(timeout=60) == 0
    assert running.stderr.read() == b""


@pytest.mark.slow
def test_nobody_reading_stderr_loses_no_work(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    running = process(*GENERATE, "Hello", "-m", str(folder), "-n", "3", "--stats", stderr=writer)
    os.close(writer)
    expected = minigpt.load(folder, device="cpu").generate("Hello", max_new_tokens=3).text
    assert (running.communicate(timeout=60)[0].decode(), running.returncode) == (expected + "\n", 0)


@pytest.mark.slow
def test_nobody_reading_stderr_loses_no_record(folder: Path, tmp_path: Path) -> None:
    """A bar that writes to a closed pipe must not end the job."""
    (tmp_path / "in").write_text('{"prompt": "a"}\n' * 3)
    reader, writer = os.pipe()
    os.close(reader)
    running = process(*GENERATE, "-m", str(folder), "--input", str(tmp_path / "in"), "-n", "2", stderr=writer)
    os.close(writer)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0 and len(out.splitlines()) == 3


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line(endless: list[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        running = process(*endless, stdout=full)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert err.decode() == "minigpt: error: output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_output_that_the_terminal_cannot_show_never_crashes(folder: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    args = [*GENERATE, "--echo", "-n", "1", "-m", str(folder), "\u3053\u3093\u306b\u3061\u306f \U0001f642"]
    running = process(*args, env=environment)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, b"")
    assert out.startswith("\u3053\u3093".encode() if encoding == "utf-8" else b"?????")


def test_every_decoding_option_reaches_the_library(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = minigpt.LanguageModel.generate_many
    monkeypatch.setattr(
        minigpt.LanguageModel,
        "generate_many",
        lambda lm, prompts, params, **more: seen.append((params, lm)) or original(lm, prompts, params, **more),
    )
    options = "--min-new-tokens 1 -n 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
    options += " --no-repeat-ngram-size 4 --logit-bias 5=1.5 --logit-bias 6=-2 --stop a --stop b --ignore-eos --seed 8"
    options += " --samples 2 --overflow slide --logprobs 1 --json --max-seconds 60 --ablate 0.1 1.0 --ablate 1.1"
    assert run(*GENERATE, "x", *options.split())[0] == 0
    expected = minigpt.SamplingParams(
        min_new_tokens=1, max_new_tokens=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        no_repeat_ngram_size=4, logit_bias={5: 1.5, 6: -2.0}, stop=("a", "b"), stop_ids=(), seed=8, samples=2,
        overflow="slide", logprobs=1, max_seconds=60.0,
    )  # fmt: skip
    [(params, lm)] = seen
    assert params == expected
    assert torch.equal(lm.attention("a b"), minigpt.load(folder).attention("a b", ablate=["0.1", "1.0", "1.1"]))


def test_text_for_a_model_without_a_tokenizer_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    minigpt.save(GPT2(GPT2Config(vocab_size=10, n_embd=4, n_head=1, n_layer=1, n_positions=8)), tmp_path / "m")
    assert main([*GENERATE, "text", "-m", str(tmp_path / "m")]) == 1
    assert "give token ids (on a command line: --ids)" in capsys.readouterr().err
    assert main([*GENERATE, "--ids", "1 2", "-n", "3", "-m", str(tmp_path / "m")]) == 0
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.slow
def test_closed_standard_streams(folder: Path) -> None:
    command = f"{sys.executable} -m minigpt generate --offline -m {folder} -n 1"
    no_input = subprocess.run(f"{command} - <&-", shell=True, capture_output=True, text=True)
    assert (no_input.returncode, no_input.stderr) == (1, "minigpt: error: standard input is closed\n")
    no_output = subprocess.run(f"{command} hello >&-", shell=True, capture_output=True, text=True)
    assert (no_output.returncode, no_output.stderr) == (0, "")  # nobody wants it
    no_errors = subprocess.run(f"{command} x -n 2 --stats 2>&-", shell=True, capture_output=True, text=True)
    assert no_errors.returncode == 0 and "tokens" not in no_errors.stdout
    failed = subprocess.run(f"{sys.executable} -m minigpt generate -m /nowhere x 2>&-", shell=True, capture_output=True)
    assert (failed.returncode, failed.stdout) == (1, b"")


@pytest.mark.slow
def test_a_signal_leaves_no_broken_json(endless: list[str]) -> None:
    running = process(*endless, "--json")
    time.sleep(4)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, b"", b"")


def test_a_usage_error_is_one_line_of_plain_characters(run: Any) -> None:
    code, out, err = run("generate", "--no\nsuch\x1b[31m", "x")
    assert (code, out) == (2, "") and "\x1b" not in err and err.splitlines()[-1].startswith("minigpt: error: ")
