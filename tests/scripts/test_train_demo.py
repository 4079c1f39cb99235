"""scripts/train_demo.py, run on made-up text: exact resumption, what it writes, and every refusal."""

from __future__ import annotations

import json
import lzma
import math
import random
import signal
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import evaluate_demo
import pytest
import torch
import torch.nn.functional as F
import train_demo
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import GPT2, GPT2Config

TINY = (
    *("--layers", "2", "--width", "8", "--heads", "2", "--context", "16", "--batch", "4"),
    *("--steps", "6", "--full-steps", "2", "--warmup", "2", "--workers", "1"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents, some of them held out."""
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "was"]
    choice = random.Random(0).choices
    path = tmp_path_factory.mktemp("text") / "made_up.txt"
    path.write_text("\n<|endoftext|>\n".join(" ".join(choice(words, k=5 + 2 * (n % 12))) + "." for n in range(60)))
    return path


def train(text: Path, output: Path, *more: str) -> int:
    return train_demo.main([str(text), "--output", str(output), *TINY, *more])


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "model"
    assert train(text, output) == 0
    return output


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of that step."""
    rate: Callable[..., float] = train_demo.learning_rate

    def learning_rate(at: int, *more: float) -> float:
        if at == step:
            signal.raise_signal(signal.SIGINT)
        return rate(at, *more)

    monkeypatch.setattr(train_demo, "learning_rate", learning_rate)


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_bits(
    text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    with monkeypatch.context() as patch:
        interrupt_at(2, patch)
        assert train(text, output) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Ctrl-C is Python's again
    assert "stopped at step 3: the same command with --resume goes on" in capsys.readouterr().err
    assert not output.exists()
    state = (tmp_path / "model.state").read_bytes()

    assert train(text, output) == 1
    assert "is of an interrupted run: --resume goes on" in capsys.readouterr().err
    assert train(text, output, "--resume", "--dropout", "0.2") == 1
    assert "is of a run with dropout 0.1: it cannot go on with 0.2" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "One more document.")
    assert train(other, output, "--resume") == 1
    assert "is of a run with texts " in capsys.readouterr().err
    assert (tmp_path / "model.state").read_bytes() == state

    assert train(text, output, "--resume") == 0
    resumed, whole = load_file(output / "model.safetensors"), load_file(trained / "model.safetensors")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert not (tmp_path / "model.state").exists()


@pytest.mark.slow
def test_the_seed_and_the_dropout_matter(text: Path, trained: Path, tmp_path: Path) -> None:
    """The run is random in its order and in dropout: else equal bits after resuming would prove nothing."""
    whole = load_file(trained / "model.safetensors")["wte.weight"]
    for name, more in {"seed": ("--seed", "1"), "dropout": ("--dropout", "0")}.items():
        assert train(text, tmp_path / name, *more) == 0
        assert not torch.equal(load_file(tmp_path / name / "model.safetensors")["wte.weight"], whole)


@pytest.mark.slow
def test_two_processes_train_what_one_does(text: Path, tmp_path: Path) -> None:
    weights = []
    for workers in ("1", "2"):
        assert train(text, tmp_path / workers, "--dropout", "0", "--workers", workers) == 0
        weights.append(load_file(tmp_path / workers / "model.safetensors")["h.1.mlp.c_fc.weight"].float())
    start = GPT2(GPT2Config(n_embd=8, n_layer=2, n_head=2)).h[1].mlp.c_fc.weight.std()
    assert (weights[0] - weights[1]).abs().max() < 0.1 * start


def test_transformers_loads_the_result(trained: Path) -> None:
    theirs = GPT2LMHeadModel.from_pretrained(trained, dtype=torch.float32)
    ours = minigpt.load(str(trained), device="cpu")
    ids = torch.tensor([[50256, 464, 3797, 3332, 319, 262, 2603]])
    with torch.inference_mode():
        torch.testing.assert_close(ours.model(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    assert ours.generate("The cat", max_new_tokens=3).text
    assert json.loads((trained / "generation_config.json").read_text())["eos_token_id"] == 50256
    assert {tensor.dtype for tensor in load_file(trained / "model.safetensors").values()} == {torch.float16}


@pytest.mark.slow
def test_a_model_can_be_trained_further(
    text: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path / "more", "--init", str(trained), "--rate", "0", "--end-rate", "0") == 0
    first, more = load_file(trained / "model.safetensors"), load_file(tmp_path / "more" / "model.safetensors")
    assert all(torch.equal(first[name], more[name]) for name in first)
    assert train(text, tmp_path / "wider", "--init", str(trained), "--width", "16") == 1
    assert "has another shape: give its layers, width and context" in capsys.readouterr().err


def test_a_folder_that_holds_a_model_is_kept_unless_told(
    text: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    assert train(text, tmp_path) == 1
    assert "already holds a model" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"
    assert train(text, tmp_path, "--overwrite") == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: there is nothing to train on"),
        (b" \n<|endoftext|>\n ", "is empty"),
        (b"once upon\xff a time", "is not UTF-8 text: byte 9 is 0xff"),
        (b"Too short.", "is too short: 3 tokens, and one context takes 17"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_text_that_cannot_be_trained_on(
    content: bytes | None, message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    assert train_demo.main([str(text), str(path), "--output", str(tmp_path / "model"), *TINY]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and message in error and error.count("\n") == 1
    assert set(tmp_path.iterdir()) <= {path}  # nothing was written


def test_resuming_without_a_usable_state(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(text, tmp_path / "model", "--resume") == 1
    assert "to resume from: leave out --resume" in capsys.readouterr().err
    (tmp_path / "model.state").write_bytes(b"not a state")
    assert train(text, tmp_path / "model", "--resume") == 1
    assert "model.state is damaged" in capsys.readouterr().err
    assert (tmp_path / "model.state").read_bytes() == b"not a state"


@pytest.mark.parametrize(
    "option", ["--steps 0", "--width 9", "--dropout 2", "--rate nan", "--rate -1", "--workers 5", "--batch x"]
)
def test_a_refused_option_is_exit_code_2(option: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        train(text, tmp_path / "model", *option.split())
    assert error.value.code == 2


def test_packed_text_is_read_like_plain_text(text: Path, tmp_path: Path) -> None:
    packed = tmp_path / "made_up.txt.xz"
    packed.write_bytes(lzma.compress(text.read_bytes()))
    assert train_demo.documents(packed) == train_demo.documents(text)


def test_the_held_out_documents_are_those_whose_digest_begins_with_0(text: Path) -> None:
    assert train_demo.held_out("document 21")
    assert not train_demo.held_out("document 0")
    training, validation = train_demo.read([text], 16)
    assert len(training) + len(validation) == 60 and 0 < len(validation) < 10


def test_rows_begin_with_a_document_and_leave_nothing_out() -> None:
    """A row's end may cut a document, which then begins the next row; one that fills its row goes on."""
    training = [[n] * (3 + 5 * n) for n in range(8)]
    rows = [row for batch in islice(train_demo.batches(training, 10, 2, seed=0), 30) for row in batch]
    end = train_demo.END
    for before, row in pairwise(rows):
        assert row[0] == end or row[0] == before[-1]
    for ids in training:
        spans = {(end, *ids, end)[at : at + 2] for at in range(len(ids) + 1)}
        assert spans <= {(int(a), int(b)) for row in rows for a, b in pairwise(row)}
    again = next(train_demo.batches(training, 10, 2, seed=0))
    assert torch.equal(again, torch.stack(rows[:2]))


def test_the_loss_is_cross_entropy_over_the_whole_vocabulary() -> None:
    """Untrained rows are alike, so that their mean row stands for them (bfloat16: 3 digits)."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(n_positions=16, n_embd=64, n_layer=1, n_head=2)).eval()
    used = torch.arange(0, 50257, 100)
    rows = used[torch.randint(len(used), (4, 17))]
    expected = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert (train_demo.loss_of(model, rows) - expected).abs() < 0.01
    short = train_demo.loss_of(model, rows, used)
    assert (short - expected).abs() < 0.05
    short.backward()
    unused = model.wte.weight.grad[1]
    assert (model.hidden(rows[:, :-1]).mean((0, 1)) @ unused) > 0  # a descent step lowers what was never seen


def test_validation_loss_is_the_mean_over_whole_documents() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(n_positions=16, n_embd=8, n_layer=1, n_head=2))
    documents, total, count = [[5, 6, 7], [8] * 30, [9]], 0.0, 0
    for ids in documents:
        row = torch.tensor([[50256, *ids, 50256][:16]])
        logits = model.eval()(row[:, :-1])
        total += F.cross_entropy(logits[0], row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    assert train_demo.validation_loss(model, documents, batch=2) == pytest.approx(total / count, abs=1e-4)
    assert math.isnan(train_demo.validation_loss(model, []))
    assert not model.training  # it once left dropout on for the samples that the evaluation draws next
    train_demo.validation_loss(model.train(), documents)
    assert model.training


def test_weight_decay_spares_norms_and_biases() -> None:
    model = GPT2(GPT2Config(n_positions=16, n_embd=8, n_layer=2, n_head=2))
    decayed, spared = train_demo.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in spared["params"]}
    assert kept == {name for name in names.values() if "ln_" in name or name.endswith("bias")}
    assert len(decayed["params"]) + len(kept) == len(names)


def test_the_learning_rate_warms_up_then_follows_a_cosine() -> None:
    rates = [train_demo.learning_rate(step, 101, 10, 1.0, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[4] == pytest.approx(0.5) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)
    assert all(before > after for before, after in pairwise(rates[10:]))


def test_what_the_evaluation_counts() -> None:
    assert evaluate_demo.loops([1, 2, 3, 4] * 3)
    assert not evaluate_demo.loops(list(range(20)))
    assert evaluate_demo.longest_shared([[7, 1, 2, 3], [2, 3, 4, 9]], [[1, 2, 3], [4, 5], [2, 3, 4]]) == [1, 2, 3]
