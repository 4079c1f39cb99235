"""The command line: what it prints where, its exit codes, and one clear line for everything that can go wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

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
    keys = ["id", "sample", "prompt", "prompt_ids", "text", "ids", "finish_reason", "seed", "logprobs", "model"]
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
        "device: cpu",
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
    assert "parameters, loaded in" in said and "device: cpu, torch.int8, " in said
    assert f"matrix products by {chosen(FORMATS[torch.int8]).name}" in said
    assert "tokenizer: GPT-2's own: the folder has none\n" in said
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
        (["a", "--logit-bias", "5"], 2, "write it as ID=VALUE"),
        (["a", "--logit-bias", "99999=1"], 2, "logit_bias has token id 99999"),
        (["a", "--logprobs", "-1"], 2, "logprobs must be at least 0"),
        (["a", "--max-seconds", "-1"], 2, "max_seconds must be a finite number of at least 0"),
        (["a", "--threads", "0"], 2, "--threads must be from 1 to 4096"),
        (["a", "--threads", "99999999999"], 2, "--threads must be from 1 to 4096"),
        (["a", "--overflow", "wrap"], 2, "invalid choice"),
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
        lambda lm, prompts, params: seen.append((params, lm)) or original(lm, prompts, params),
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
    assert "give token ids (with --ids)" in capsys.readouterr().err
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
