"""Jobs: JSON lines in, records out, in order, with every failure in its place; killed at any moment and resumed."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import gpt2_folder

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel, SamplingParams, Tokenizer
from minigpt.cli.main import main
from minigpt.jobs import Job
from minigpt.lines import Input


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with GPT-2's vocabulary, in the official layout."""
    return gpt2_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def job(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Write lines (dicts, or raw bytes) to a file and run the job: (exit code, records, stderr)."""

    def run(lines: list[Any] | None, *options: str) -> tuple[int, list[dict[str, Any]], str]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        if lines is not None:
            source.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
        code = call(source, target, folder, *options)
        captured = capsys.readouterr()
        assert captured.out == ""
        records = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
        return code, records, captured.err

    run.folder = tmp_path  # type: ignore[attr-defined]
    return run


def call(source: Path, target: Path, folder: Path, *options: str) -> int:
    args = ["generate", "--offline", "--device", "cpu", "-m", str(folder), "--input", str(source)]
    try:
        return main([*args, "--output", str(target), *options])
    except SystemExit as exit:  # argparse
        return int(exit.code or 0)


def errors(records: list[dict[str, Any]]) -> dict[int, str]:
    return {record["line"]: record["error"] for record in records if "error" in record}


def test_each_line_gives_what_it_gives_alone_in_input_order(folder: Path, job: Any) -> None:
    lm = minigpt.load(folder, device="cpu")
    lines: list[dict[str, Any]] = [
        {"prompt": "Hello there", "id": "first"},
        {"ids": [464, 3290], "max_new_tokens": 9, "id": 77},
        {"prompt": "", "temperature": 1.0, "seed": 5, "samples": 3},
        {"prompt": "Caf\u00e9 \u2028 \ud83d", "temperature": 0.7, "top_k": 5, "logprobs": 2},
        {"prompt": "a", "stop": [" drown"], "logit_bias": {"16398": 100.0}, "seed": None},
    ]
    code, records, err = job(lines, "-n", "4", "--batch-size", "2", "--seed", "100")
    assert code == 0 and "5/5 lines" in err
    assert [record["id"] for record in records] == ["first", 77, 3, 3, 3, 4, 5]
    assert [record["sample"] for record in records] == [0, 0, 0, 1, 2, 0, 0]
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
    assert [record["seed"] for record in records] == [101, 102, 5, 6, 7, 104, 105]  # its own, or --seed + its number
    assert [record["prompt"] for record in records[:2]] == ["Hello there", None]
    expected = []
    for number, line in enumerate(lines, 1):
        options = {
            key: value for key, value in line.items() if key not in ("prompt", "ids", "id") and value is not None
        }
        params = SamplingParams(**{"max_new_tokens": 4, "seed": 100 + number, **options})
        expected += lm.generate([line.get("prompt", line.get("ids"))], params)
    assert [record["ids"] for record in records] == [completion.ids for completion in expected]
    assert [record["text"] for record in records] == [completion.text for completion in expected]
    assert records[-1]["text"] == "" and records[-1]["finish_reason"] == "stop"
    assert [len(entry["top"]) for entry in records[5]["logprobs"]] == [2] * 4


def test_a_fresh_seed_is_drawn_once_and_only_where_it_is_used(job: Any, folder: Path) -> None:
    _, records, _ = job([{"prompt": "a"}, {"prompt": "a", "temperature": 1}, {"prompt": "a", "temperature": 1}])
    assert records[0]["seed"] is None and records[2]["seed"] == records[1]["seed"] + 1
    again = minigpt.load(folder, device="cpu").generate("a", temperature=1.0, seed=records[1]["seed"])
    assert again.ids == records[1]["ids"]


def test_special_tokens_and_standard_output(job: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    _, records, _ = job([{"prompt": "<|endoftext|>"}], "-n", "1", "--special")
    assert records[0]["prompt_ids"] == [50256]
    args = ["generate", "--offline", "-m", str(folder), "--input", str(tmp_path / "in.jsonl"), "-n", "1", "--special"]
    assert main(args) == 0
    assert json.loads(capsys.readouterr().out) == records[0]


def test_an_id_of_ones_own_may_be_another_lines_number(job: Any) -> None:
    """Line 2 failed, as its number was the id that line 1 gave itself. Ids need not differ."""
    code, records, _ = job([{"prompt": "a", "id": 2}, {"prompt": "b"}, {"prompt": "c", "id": 1}], "-n", "1")
    assert code == 0 and [record["id"] for record in records] == [2, 2, 1]
    assert [record["prompt"] for record in records] == ["a", "b", "c"]
    code, records, _ = job(None, "-n", "1", "--resume")
    assert code == 0 and len(records) == 3


def test_null_is_not_given(job: Any) -> None:
    options = dict.fromkeys([*vars(SamplingParams()), "id", "special"])
    lines = [{"prompt": "a", "ids": None, **options}, {"ids": [64], "prompt": None}, {"prompt": None}]
    code, records, _ = job(lines, "-n", "3", "--temperature", "1", "--seed", "4", "--stop", "zz")
    assert code == 1 and records[2]["error"] == "give one of prompt (text) and ids (a list of token ids)"
    assert [record["id"] for record in records] == [1, 2, 3] and len(records[0]["ids"]) == 3
    assert [record["seed"] for record in records[:2]] == [5, 6]


def test_the_lines_own_word_on_special_tokens(job: Any) -> None:
    text = "<|endoftext|>"
    lines = [{"prompt": text}, {"prompt": text, "special": True}, {"prompt": text, "special": False}]
    plain, read = Tokenizer.gpt2().encode(text), [50256]
    assert [record["prompt_ids"] for record in job(lines, "-n", "1")[1]] == [plain, read, plain]
    (job.folder / "out.jsonl").unlink()
    assert [record["prompt_ids"] for record in job(lines, "-n", "1", "--special")[1]] == [read, read, plain]


def test_standard_input(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read twice, so a copy is made; a job from it can be resumed, too."""
    target = tmp_path / "out.jsonl"
    lines = b'{"prompt": "a"}\n{"prompt": "b", "samples": 2, "temperature": 1}\n'

    def run(data: bytes, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        args = ["generate", "--offline", "--device", "cpu", "-m", str(folder), "-n", "3", "--input", "-"]
        return main([*args, *options]), *capsys.readouterr()

    code, out, _ = run(lines)
    assert code == 0 and [json.loads(line)["id"] for line in out.splitlines()] == [1, 2, 2]
    assert run(lines, "--output", str(target))[0] == 0
    whole = target.read_bytes()
    target.write_bytes(whole[:-200])
    again = ["--output", str(target), "--resume"]
    assert run(lines, *again)[0] == 0 and target.read_bytes() == whole
    assert run(lines[:20], *again)[0] == 1 and target.read_bytes() == whole
    code, _, err = run(b"\n")
    assert code == 1 and "standard input is empty: it should hold a JSON object a line" in err


def test_options_without_effect_on_a_line_are_noted_once(job: Any) -> None:
    lines = [{"prompt": "a", "top_k": 3}, {"prompt": "b", "top_k": 3}, {"prompt": "c", "temperature": 1, "top_k": 3}]
    said = job(lines, "-n", "1")[2]
    assert said.count("minigpt: top_k has no effect on a line at temperature 0") == 1
    (job.folder / "out.jsonl").unlink()
    assert (
        "no effect" not in job([lines[2], {"prompt": "a"}], "-n", "1", "--seed", "3")[2]
    )  # seed: of those that sample


def test_a_deadline_is_no_setting(job: Any) -> None:
    """A job that was cut short by the clock goes on with another limit."""
    code, records, _ = job([{"prompt": "a"}, {"prompt": "b", "max_seconds": 60}], "-n", "5", "--max-seconds", "0")
    assert code == 0 and [record["finish_reason"] for record in records] == ["time", "length"]
    assert job(None, "-n", "5", "--max-seconds", "9", "--resume")[0] == 0


# Bad lines: an error record each, and the others go on


def test_a_bad_line_becomes_an_error_record_and_the_job_goes_on(job: Any) -> None:
    bad: dict[int, tuple[Any, str]] = {
        2: (b"nope", "not JSON: Expecting value at column 1"),
        3: (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
        4: (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at offset 12"),
        5: (["a"], "a line must be a JSON object"),
        6: ({"prompt": "a", "temprature": 1}, "unknown key 'temprature': did you mean temperature?"),
        7: ({"id": "no prompt"}, "give one of prompt (text) and ids"),
        8: ({"prompt": "a", "ids": [1]}, "give one of prompt (text) and ids"),
        9: ({"prompt": 5}, "prompt must be a text, not 5"),
        10: ({"ids": "5"}, "ids must be a list of token ids, not '5'"),
        11: ({"ids": [50257]}, "token id 50257 is outside the vocabulary (0 to 50256)"),
        12: ({"prompt": "a", "id": 1.5}, "id must be a text or an integer, not 1.5"),
        13: ({"prompt": "a", "id": True}, "id must be a text or an integer, not True"),
        14: ({"prompt": "a", "top_p": 2}, "top_p must be a finite number from 0 to 1, not 2"),
        15: (b'{"prompt": "a", "top_p": NaN}', "top_p must be a finite number"),
        16: ({"prompt": "a", "samples": 0}, "samples must be at least 1"),
        17: ({"ids": [[1]]}, "ids must be a list of token ids, not [[1]]"),
        18: (b"[" * 100_000, "nested too deeply"),
        19: ({"prompt": "x " * 65}, "tokens, but the model's context is 64"),
        20: ({"prompt": "a", "logit_bias": {"50257": 1}}, "logit_bias has token id 50257"),
        21: ({"prompt": "a", "suppress_tokens": list(range(50257))}, "no token is left to draw"),
        22: (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
        23: ({"ids": [True]}, "a list of token ids"),
        24: (b"Once upon a time", 'column 1; write it as {"prompt": "Once upon a time"}'),
        25: ({"prompt": "a", "num_return_sequences": 2}, "did you mean samples?"),
        26: ({"prompt": "a", "special": "yes"}, "special must be true or false, not 'yes'"),
        27: ({"text": "a"}, "unknown key 'text': a line has prompt, ids, id, special and the options of generate"),
    }
    lines = [{"prompt": "Hello", "id": "good"}, *(line for line, _ in bad.values()), {"prompt": "Hello", "id": "last"}]
    code, records, err = job(lines, "-n", "3", "--batch-size", "3")
    assert code == 1
    assert err.splitlines()[-1].startswith("minigpt: error: 26 of 28 records are errors: see ")
    got = errors(records)
    assert list(got) == list(bad)
    for line, (_, message) in bad.items():
        assert message in got[line], got[line]
    assert all(list(record) == ["id", "line", "error"] for record in records[1:-1])
    assert [record["id"] for record in records] == ["good", *range(2, 7), "no prompt", *range(8, 28), "last"]
    assert records[0]["ids"] == records[-1]["ids"] and len(records[0]["ids"]) == 3


def test_a_sample_that_fails_while_drawing_is_one_error_and_loses_nothing_else(job: Any) -> None:
    """A row that could not go on used to end the whole run, with the finished rows of its batch."""
    stuck = {"prompt": "a", "samples": 2, "suppress_tokens": [], "temperature": 1.0, "no_repeat_ngram_size": 1}
    stuck |= {"logit_bias": {}, "suppress_tokens": list(range(3, 50257)), "max_new_tokens": 9}
    code, records, _ = job([{"prompt": "b"}, stuck, {"prompt": "c"}], "-n", "9", "--seed", "1")
    assert code == 1
    assert [record.get("sample") for record in records] == [0, 0, 1, 0]
    assert [list(record) for record in records[1:3]] == [["id", "sample", "line", "error"]] * 2
    assert "no token is left to draw" in records[1]["error"]  # after three tokens
    assert [len(record["ids"]) for record in (records[0], records[3])] == [9, 9]


def test_nan_in_the_weights_is_every_lines_own_error(tmp_path: Path) -> None:
    from minigpt.jobs import records
    from minigpt.lines import Line

    torch.manual_seed(0)
    model = GPT2(GPT2Config(n_embd=8, n_head=1, n_layer=1, n_positions=16))
    model.wte.weight.data[5] = torch.nan  # the tied head gives NaN logits for every prompt
    lines = [Line(1, 1, [7]), Line(2, 2, [8])]
    got = [one for [one] in records(LanguageModel(model, Tokenizer.gpt2()), lines, model="m", batch_size=2)]
    assert [record["line"] for record in got] == [1, 2]
    assert all("NaN or infinity" in record["error"] and "wte.weight" in record["error"] for record in got)


@pytest.mark.slow
def test_a_line_of_ten_megabytes(job: Any) -> None:
    code, records, _ = job([{"prompt": "word " * 2_000_000}, {"prompt": "a" * 10_000_000}, {"prompt": "b"}], "-n", "1")
    assert code == 1 and "the model's context is 64" in errors(records)[1] and "context is 64" in errors(records)[2]
    assert records[2]["id"] == 3


def test_byte_order_mark_blank_lines_and_windows_line_ends(job: Any) -> None:
    code, records, _ = job([b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  \t", b'{"prompt": "b"}\r'], "-n", "1")
    assert code == 0 and [record["id"] for record in records] == [1, 4]


# Bad files and options: one sentence, before the model is loaded


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("minigpt.loading.load", fail)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--batch-size", "0"], 2, "--batch-size must be from 1 to 4096, not 0"),
        (["--batch-size", "x"], 2, "invalid int value: 'x'"),
        (["prompt"], 2, "the prompt is given twice: --input FILE holds the prompts"),
        (["-f", "x"], 2, "the prompt is given twice"),
        (["--ids"], 2, "--ids is for one prompt"),
        (["--echo"], 2, "--echo is for one prompt"),
        (["--ablate", "0.0"], 2, "--ablate is for one prompt, not for --input"),
        (["--top-p", "2"], 2, "top_p must be"),
        (["--input", "/nowhere/in.jsonl"], 1, "cannot read /nowhere/in.jsonl: No such file or directory"),
        (["--input", "/"], 1, "cannot read /: Is a directory"),
        (["--input", "/dev/null"], 1, "/dev/null is empty"),
        (["--output", "/nowhere/out.jsonl"], 1, "cannot write '/nowhere/out.jsonl': No such file or directory"),
        (["--output", "/"], 1, "cannot write '/': Is a directory"),
    ],
)
def test_bad_options_are_one_clear_line(job: Any, options: list[str], code: int, message: str) -> None:
    got, records, err = job([{"prompt": "a"}], *options)
    assert (got, records) == (code, [])
    assert message in err and err.splitlines()[-1].startswith("minigpt")


@pytest.mark.usefixtures("no_model")
def test_input_and_output_that_cannot_be_used(job: Any, tmp_path: Path, folder: Path, capsys: Any) -> None:
    code, records, err = job([])
    assert (code, records) == (1, []) and "in.jsonl is empty: it should hold a JSON object a line" in err
    assert job([b"", b" "])[2] == err
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}')
    assert call(source, source, folder) == 2
    assert "in.jsonl is also the input" in capsys.readouterr().err and source.read_text() == '{"prompt": "a"}'
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    assert call(source, link, folder) == 2
    (tmp_path / "out.jsonl").write_text("precious\n")
    assert call(source, tmp_path / "out.jsonl", folder) == 1
    assert "is there already: add --resume to go on with it, or remove it" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    for options in (["--resume"], ["--output", "x"], ["--batch-size", "2"]):
        assert main(["generate", "a", *options]) == 2
        assert f"{options[0]} needs --input" in capsys.readouterr().err
    assert main(["generate", "--input", str(source), "--resume"]) == 2
    assert "--resume needs --output" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["stop", "logit_bias", "suppress_tokens", "id", "prompt", "ids", "seed", "top_p"])
def test_a_line_nested_too_deeply_is_one_error(what: str) -> None:
    """Deep enough for json to read and repr to fail, and deeper."""
    from minigpt.lines import parse

    for depth in (50, *range(700, 1001), 5000, 50_000):
        nested = "[" * depth + "]" * depth
        line = f'{{"{what}": {nested}}}' if what in ("prompt", "ids") else f'{{"prompt": "a", "{what}": {nested}}}'
        found = parse(7, line.encode(), SamplingParams(), 0)
        assert found.number == found.id == 7 and found.error


def test_an_input_that_can_be_read_only_once(job: Any, folder: Path, tmp_path: Path) -> None:
    """A shell's <(...) was refused."""
    job([{"prompt": "a"}, {"prompt": "b"}], "-n", "1")
    whole = (tmp_path / "out.jsonl").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    pid = child(lambda: int((tmp_path / "pipe").write_bytes((tmp_path / "in.jsonl").read_bytes()) < 0))
    assert call(tmp_path / "pipe", tmp_path / "other.jsonl", folder, "-n", "1") == 0
    assert os.waitpid(pid, 0)[1] == 0 and (tmp_path / "other.jsonl").read_bytes() == whole


# Resume

LINES: list[dict[str, Any]] = [
    {"prompt": f"Prompt {n}", "max_new_tokens": 5 + n * 7 % 40, **({"samples": 3} if n % 5 == 0 else {})}
    for n in range(60)
]
LINES[7] = {"prompt": "x " * 70}
LINES[8] = {"nonsense": 1}
SAMPLED = ["--temperature", "1", "--seed", "3", "--batch-size", "4"]


def test_resume_gives_the_same_file_wherever_it_was_cut(job: Any, tmp_path: Path) -> None:
    """Cut at record ends, inside records, inside a line's samples; errors are counted again at the end."""
    code, _, err = job(LINES[:12], *SAMPLED)
    whole = (tmp_path / "out.jsonl").read_bytes()
    assert code == 1 and "2 of 18 records are errors" in err
    for cut in [*range(0, len(whole), len(whole) // 11), whole.index(b"\n") + 1, len(whole) - 1, len(whole)]:
        (tmp_path / "out.jsonl").write_bytes(whole[:cut])
        code, _, err = job(None, *SAMPLED, "--resume")
        assert code == 1 and "2 of 18 records are errors" in err
        assert (tmp_path / "out.jsonl").read_bytes() == whole, cut


def test_resume_keeps_a_fresh_seed_and_starts_where_nothing_is_there(job: Any, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "temperature": 1}] * 3
    assert job(lines, "--resume")[0] == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole[:400])
    assert job(None, "--resume")[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    code, _, err = job(None, "--resume", "--batch-size", "3")  # nothing to do; the batch size changes no record
    assert code == 0 and "3/3 lines" in err and (tmp_path / "out.jsonl").read_bytes() == whole


def test_resume_refuses_other_settings_another_input_and_another_file(
    job: Any, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert job([{"prompt": "a"}, {"prompt": "b"}], "-n", "3")[0] == 0
    whole = output.read_bytes()
    for options, what in [
        (["-n", "4"], "max_new_tokens was 3, now 4"),
        (["-n", "3", "--temperature", "0.5"], "temperature was 0.0, now 0.5"),
        (["-n", "3", "--seed", "4"], "seed was None, now 4"),
        (["-n", "3", "--special"], "special was False, now True"),
        (["-n", "3", "--stop", "x"], "stop was [], now ['x']"),
    ]:
        code, _, err = job(None, "--resume", *options)
        assert code == 2 and f"was begun with other settings ({what})" in err
    code, _, err = job([{"prompt": "a"}, {"prompt": "c"}], "-n", "3", "--resume")
    assert code == 1 and "cannot be resumed: the input has changed since" in err
    job([{"prompt": "a"}, {"prompt": "b"}], "-n", "3", "--resume")
    foreign = [b"[" * 100_000 + b"\n", b'"error"\n', b'["error"]\n', b'{"id": 1, "error": "x"}\n']
    foreign += [(tmp_path / "in.jsonl").read_bytes(), b'{"prompt": "a", "id": 1}\n']  # the input in the output's place
    foreign += [whole.replace(b'"sample": 0', b'"sample": 1'), whole.replace(b'"id": 2', b'"id": 3')]
    for damaged in (whole + whole[:80] + b"\n", b"{}\n", b"\0\0\n", whole[whole.index(b"\n") + 1 :], *foreign):
        output.write_bytes(damaged)
        assert call(tmp_path / "in.jsonl", output, folder, "-n", "3", "--resume") == 1
        assert "is not a record of this job" in capsys.readouterr().err
        assert output.read_bytes() == damaged
    for damaged in (b"no newline", b"line one\nprecious", whole + b"precious", whole + b'{"ib"', b"\0"):
        output.write_bytes(damaged)
        assert call(tmp_path / "in.jsonl", output, folder, "-n", "3", "--resume") == 1
        assert "is not a record of this job" in capsys.readouterr().err
        assert output.read_bytes() == damaged
    output.write_bytes(whole)
    settings = json.loads(Path(f"{output}.job").read_text())
    assert settings["device"] == "cpu"
    odd = [{**settings, "fresh_seed": seed} for seed in ("x", None)]
    del settings["fresh_seed"]
    for text in ("{", "{}", "[]", "7", "[" * 100_000, *map(json.dumps, [settings, *odd])):
        Path(f"{output}.job").write_text(text)
        err = job(None, "-n", "3", "--resume")[2]
        assert "out.jsonl.job, the settings of the job, is missing or damaged" in err and len(err.splitlines()) == 1
    Path(f"{output}.job").unlink()
    assert "is missing or damaged" in job(None, "-n", "3", "--resume")[2]
    assert output.read_bytes() == whole


def test_resume_without_records_starts_afresh_whatever_settings_lie_there(job: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert job([{"prompt": "a"}], "-n", "3")[0] == 0
    output.unlink()
    assert job(None, "-n", "2", "--resume")[0] == 0 and len(json.loads(output.read_text())["ids"]) == 2
    output.write_bytes(b"")
    Path(f"{output}.job").write_text("{")
    assert job([{"prompt": "b"}], "-n", "1", "--resume")[0] == 0
    assert json.loads(Path(f"{output}.job").read_text())["max_new_tokens"] == 1


def child(work: Callable[[], int]) -> int:
    """Run `work` in a copy of this process, which has torch loaded already. Gives its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(work())
    finally:
        os._exit(99)


@pytest.mark.slow
def test_a_job_killed_at_twenty_random_moments_loses_and_repeats_nothing(folder: Path, tmp_path: Path) -> None:
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    started = time.perf_counter()
    assert os.waitstatus_to_exitcode(os.waitpid(child(lambda: call(source, whole, folder, *SAMPLED)), 0)[1]) == 1
    seconds = time.perf_counter() - started
    random.seed(0)
    kills, sizes = 0, set()
    for _ in range(100):
        pid = child(lambda: call(source, target, folder, *SAMPLED, "--resume"))
        time.sleep(random.uniform(0, seconds / 4))
        os.kill(pid, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        kills += killed
        if target.exists():
            sizes.add(target.stat().st_size)
        if not killed:  # it came to the end
            assert target.read_bytes() == whole.read_bytes()
            if kills >= 20:
                break
            target.unlink()
    else:
        assert call(source, target, folder, *SAMPLED, "--resume") == 1
    print(f"{kills} kills, at {len(sizes)} sizes of the output, of a job of {seconds:.2f} s")
    assert kills >= 20 and len(sizes) >= 5
    assert target.read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_with_whole_lines(folder: Path, tmp_path: Path, number: int, code: int) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = json.dumps({"prompt": "Hello", "max_new_tokens": 20}) + "\n"
    source.write_text(line * 20_000)
    args = ["generate", "--offline", "-m", str(folder), "--input", str(source), "--output", str(target), "--ignore-eos"]
    running = subprocess.Popen([sys.executable, "-m", "minigpt", *args], stderr=subprocess.PIPE)
    while not (target.exists() and target.stat().st_size > 2000):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    err = running.communicate(timeout=60)[1].decode()
    assert running.returncode == code
    assert "lines" in err and "tokens per second" in err and "left" in err and "Traceback" not in err
    data = target.read_bytes()
    assert data.endswith(b"\n")
    assert [json.loads(line)["id"] for line in data.splitlines()] == list(range(1, data.count(b"\n") + 1))


# Full disks


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line_and_the_job_can_go_on(folder: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the disk: a write that reaches it is cut short, and the next one fails."""
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES[:20]))
    args = [
        sys.executable,
        "-m",
        "minigpt",
        "generate",
        "--offline",
        "-m",
        str(folder),
        "--input",
        str(source),
        *SAMPLED,
    ]

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    limited = subprocess.run([*args, "--output", str(target)], capture_output=True, text=True, preexec_fn=full)
    assert limited.returncode == 1
    count = target.read_bytes().count(b"\n")
    assert 0 < target.stat().st_size <= 3000 and target.read_bytes().endswith(b"\n")
    last = limited.stderr.splitlines()[-1]
    assert last == (
        f"minigpt: error: cannot write {str(target)!r}: File too large; its {count} records are whole, "
        "and --resume goes on after them"
    )
    call(source, whole, folder, *SAMPLED)
    call(source, target, folder, *SAMPLED, "--resume")
    assert target.read_bytes() == whole.read_bytes()


def test_dev_full(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    assert call(tmp_path / "in.jsonl", Path("/dev/full"), folder) == 1
    assert capsys.readouterr().err.endswith("minigpt: error: cannot write '/dev/full': No space left on device\n")


def test_a_signal_between_two_writes_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text('{"prompt": "a"}')
    job = Job(Input(str(tmp_path / "in")), str(tmp_path / "out"), SamplingParams(), {}, resume=False)
    job.write([{"id": 1}])
    file = job._file

    def stopped(data: Any) -> int:
        file.write(data[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_file", SimpleNamespace(write=stopped, truncate=file.truncate))
    with pytest.raises(KeyboardInterrupt):
        job.write([{"id": 2}])
    assert (tmp_path / "out").read_bytes() == b'{"id": 1}\n'
