"""What is enough: a run that compared nothing proves nothing, --strict leaves nothing out, --require names one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import hf_model, save_hf

import minigpt
from minigpt.cli.main import main
from minigpt.parity import figures, record_file, reference, run
from minigpt.parity.check import Check, row, shortfall

GOOD = Check("transformers", "layers", True)
MISSING = Check("transformers", "all", None, "not installed")
ELSEWHERE = Check("published", "numbers", None, "official files only", applies=False)
KEPT = Check("recorded", "logits", True)
BROKEN = Check("tokenizer", "all", None, "unreadable")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(hf_model(vocab_size=131), tmp_path_factory.mktemp("good"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference, figures):
        monkeypatch.setattr(module, "SETTINGS", ({},))


@pytest.mark.parametrize(
    "checks, strict, require, expected",
    [
        ([GOOD, ELSEWHERE], False, [], ""),
        ([GOOD, ELSEWHERE], True, [], ""),
        ([KEPT, MISSING, ELSEWHERE], False, [], ""),
        ([KEPT, MISSING, ELSEWHERE], True, [], "not compared: transformers: all (not installed)"),
        ([KEPT, MISSING], False, ["transformers"], "not compared: with transformers (not installed)"),
        ([KEPT, MISSING], True, ["transformers"], "not compared: with transformers (not installed)"),
        ([GOOD, ELSEWHERE], False, ["published"], "not compared: with published numbers (official files only)"),
        ([GOOD], False, ["recorded"], "not compared: with recorded numbers (none given)"),
        ([GOOD, BROKEN], False, [], ""),
        ([GOOD, BROKEN], True, [], "not compared: tokenizer: all (unreadable)"),
        (
            [Check("tokenizer", "vectors", True), MISSING, ELSEWHERE],
            False,
            [],
            "not compared: with transformers (not installed), with published numbers (official files only), "
            "with recorded numbers (none given)",
        ),
        ([GOOD, *[Check("recorded", name, False) for name in "abcd"]], True, [], "fails: a; b; c and 1 more"),
    ],
)
def test_what_is_enough(checks: list[Check], strict: bool, require: list[str], expected: str) -> None:
    assert shortfall(checks, strict, require) == expected


def test_what_does_not_apply_is_no_skip() -> None:
    assert "n/a   numbers" in row(ELSEWHERE) and "skip  all" in row(MISSING)


def parity(folder: Path, *more: str) -> int:
    return main(["parity", "-m", str(folder), "--offline", "--device", "cpu", *more])


def test_a_record_is_enough_without_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = str(tmp_path / "mine.json")
    assert parity(folder, "--record", file) == 0 and "results of 4 prompts" in capsys.readouterr().out
    assert parity(folder, "--record", file) == 1 and "is there already" in capsys.readouterr().err
    assert parity(folder, "--against", file, "--strict") == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert parity(folder, "--against", file, "--require", "recorded") == 0
    capsys.readouterr()
    assert parity(folder, "--against", file, "--strict") == 1
    out, err = capsys.readouterr()
    assert out.endswith("1 skipped, 3 not applicable\n".replace("3", "4")) and "not compared: transformers" in err
    assert parity(folder, "--against", file, "--require", "transformers", "--json") == 1
    assert "with transformers (transformers is not installed" in json.loads(capsys.readouterr().out)["problem"]


def test_a_changed_weight_fails_against_the_record(folder: Path, tmp_path: Path, capsys: Any) -> None:
    file, changed = tmp_path / "mine.json", tmp_path / "changed"
    assert parity(folder, "--record", str(file)) == 0
    lm = minigpt.load(folder, device="cpu")
    lm.model.h[1].mlp.c_fc.bias.data[0] += 0.05
    minigpt.save(lm, changed)
    assert parity(changed) == 0  # transformers gives the same for the changed file
    capsys.readouterr()
    assert parity(changed, "--against", str(file)) == 1
    out, err = capsys.readouterr()
    assert "first differs at h.1.mlp.c_fc" in out and err.startswith(
        f"minigpt: error: parity of {changed} fails: layers of"
    )


def test_prompts_from_files(folder: Path, tmp_path: Path, capsys: Any) -> None:
    lines, file = tmp_path / "ids.jsonl", tmp_path / "mine.json"
    lines.write_text('{"ids": [5, 6, 7]}\n\n{"ids": [9], "id": "one"}\n')
    assert parity(folder, "--record", str(file), "--input", str(lines)) == 0
    made = record_file.read(file)
    assert [prompt["ids"] for prompt in made["prompts"][-2:]] == [[5, 6, 7], [9]]
    assert all(check.passed is not False for check in run.run(folder, offline=True, device="cpu", against=made))
    for bad, words in {
        '{"ids": [5], "prompt": "a"}': "line 1: give one of",
        '{"ids": "5"}': "line 1: ids must be a list of token ids",
        '{"ids": [5], "top_k": 3}': "line 1: give a prompt (text) or ids (a list of token ids) alone",
        '{"ids": [500]}': "token id 500 is outside the vocabulary",
        "5": "line 1: a line must be a JSON object",
        '{"prompt": "a"}': "no tokenizer",
    }.items():
        lines.write_text(bad)
        assert parity(folder, "--record", str(tmp_path / "no.json"), "--input", str(lines)) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no.json").exists()


@pytest.mark.parametrize("more", [["--strict"], ["--json"], ["--require", "recorded"], ["--dtype", "float32", "int8"]])
def test_recording_compares_nothing(folder: Path, tmp_path: Path, more: list[str], capsys: Any) -> None:
    assert parity(folder, "--record", str(tmp_path / "no.json"), *more) == 2
    assert "--record compares nothing" in capsys.readouterr().err
    assert parity(folder, "--require", "recorded") == 2 and "needs --against FILE" in capsys.readouterr().err
