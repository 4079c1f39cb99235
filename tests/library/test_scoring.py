"""Scoring: log-probabilities and the sliding-window procedure against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import from_hf, hf_model
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import GPT2, GPT2Config, LanguageModel, PromptError, Tokenizer, TokenizerError, save
from minigpt.cli.main import main


@torch.no_grad()
def test_logprobs_equal_transformers() -> None:
    reference = hf_model()
    lm = LanguageModel(from_hf(reference))
    ids = torch.randint(0, 64, (32,)).tolist()
    expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    score = lm.score(ids)
    assert score.ids == ids and len(score.logprobs) == 31
    for at, logprob in enumerate(score.logprobs):
        assert abs(logprob - expected[at, ids[at + 1]]) < 1e-4  # of up to 12; measured: 2e-6
    loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    assert abs(score.mean + loss) < 1e-4
    assert math.isclose(score.total, sum(score.logprobs), abs_tol=1e-9)
    assert math.isclose(score.perplexity, math.exp(-score.mean))
    assert score.bits_per_byte is None


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 7, 16, 31, 32])
@pytest.mark.parametrize("length", [10, 32, 33, 100])
def test_strides_score_each_token_as_the_published_procedure_does(stride: int, length: int) -> None:
    """The loop of https://huggingface.co/docs/transformers/perplexity, with each token's own loss."""
    reference = hf_model()
    ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(length))
    expected: list[float] = []
    previous = 0
    for begin in range(0, length, stride):
        end = min(begin + 32, length)
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - previous)] = -100
        logits = reference(ids[:, begin:end]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="none")
        expected += (-losses[labels[0, 1:] >= 0]).tolist()
        previous = end
        if end == length:
            break
    score = LanguageModel(from_hf(reference)).score(ids[0].tolist(), stride=stride)
    assert len(score.logprobs) == len(expected)
    assert max(abs(a - b) for a, b in zip(score.logprobs, expected, strict=True)) < 1e-4
    assert (len(expected) == length - 1) == (stride < 32 or length <= 32)


@torch.no_grad()
def published_perplexity(reference: GPT2LMHeadModel, ids: torch.Tensor, stride: int, size: int, exact: bool) -> float:
    """The loop of https://huggingface.co/docs/transformers/perplexity; `exact` counts the losses that there are."""
    nll_sum = n_tokens = previous = 0.0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + size, ids.shape[1])
        targets = ids[:, begin:end].clone()
        targets[:, : -int(end - previous)] = -100
        n_losses = int((targets[:, 1:] != -100).sum()) if exact else int((targets != -100).sum()) - 1
        if n_losses:
            nll_sum += reference(ids[:, begin:end], labels=targets).loss.double().item() * n_losses
            n_tokens += n_losses
        previous = end
        if end == ids.shape[1]:
            break
    return math.exp(nll_sum / n_tokens)


@pytest.mark.parametrize("stride", [1, 2, 7, 16, 31, 32])
@pytest.mark.parametrize("length", [10, 33, 200, pytest.param(1000, marks=pytest.mark.slow)])
def test_perplexity_is_that_of_the_published_procedure_and_the_mean_is_exact(stride: int, length: int) -> None:
    reference = hf_model()
    for parameter in reference.parameters():
        parameter.data *= 0.5  # perplexities near 80, as real ones are, not in the thousands
    lm = LanguageModel(from_hf(reference))
    ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(length))
    score = lm.score(ids[0].tolist(), stride=stride)
    page = published_perplexity(reference, ids, stride, 32, exact=False)
    exact = published_perplexity(reference, ids, stride, 32, exact=True)
    assert abs(score.perplexity - page) < 1e-4  # measured: 2e-5
    assert abs(math.exp(-score.mean) - exact) < 1e-4
    if length == 1000 and stride == 7:
        assert abs(page - exact) > 1e-2  # the two differ, and each figure is the right one


def test_windows_go_through_the_model_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LanguageModel(from_hf(hf_model()))
    ids = torch.randint(0, 64, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    shapes = []
    hidden = lm.model.hidden
    monkeypatch.setattr(lm.model, "hidden", lambda ids, **more: shapes.append(tuple(ids.shape)) or hidden(ids, **more))
    together = lm.score(ids, stride=16)
    assert shapes == [(31, 31)]  # the last, shorter window is padded
    monkeypatch.setattr("minigpt.scoring._TOKENS", 1)
    alone = lm.score(ids, stride=16)
    assert shapes[-1][0] == 1 and len(alone.logprobs) == len(together.logprobs) == 499
    worst = max(abs(a - b) for a, b in zip(together.logprobs, alone.logprobs, strict=True))
    assert worst < 1e-4  # measured: 0, on one thread


def test_text_beginning_tokens_and_bytes() -> None:
    torch.manual_seed(0)
    lm = LanguageModel(GPT2(GPT2Config(n_embd=8, n_head=1, n_layer=1, n_positions=16)), Tokenizer.gpt2())
    score = lm.score("The dog", bos=True)
    assert score.ids == [50256, 464, 3290] and len(score.logprobs) == 2
    assert score.bits_per_byte is not None
    assert math.isclose(score.bits_per_byte, -score.total / math.log(2) / len("The dog"))
    assert lm.score("").ids == [] and lm.score("", bos=True).ids == [50256]
    single = lm.score("The")
    assert single.logprobs == [] and math.isnan(single.mean) and single.bits_per_byte is None


def test_ablation_changes_the_score_of_that_call_only() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    ids = [3, 5, 8, 13]
    plain = lm.score(ids)
    assert lm.score(ids, ablate=["1.2"]).total != plain.total
    assert lm.score(ids) == plain


def test_bad_input() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    with pytest.raises(PromptError, match="the text has 33 tokens, but the model's context is 32: give a stride"):
        lm.score([3] * 33)
    with pytest.raises(ValueError, match="stride must be from 1 to 32, not 33"):
        lm.score([3], stride=33)
    for bad in (0, 1.5, "a", True):
        with pytest.raises(ValueError, match="stride must be"):
            lm.score([3], stride=bad)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="token id 64 is outside"):
        lm.score([64])
    with pytest.raises(TokenizerError, match="no tokenizer"):
        lm.score("text")


def test_json_has_no_infinity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2(GPT2Config(n_embd=8, n_head=1, n_layer=1, n_positions=16))
    model.ln_f.weight.data *= 1e6  # so sure of the wrong token that the perplexity overflows
    save(model, tmp_path / "sure")
    args = ["score", "--offline", "-m", str(tmp_path / "sure"), "--device", "cpu", "--ids", "--json"]
    assert main([*args, "3 5 8"]) == 0
    out = capsys.readouterr().out
    assert "Infinity" not in out and "NaN" not in out
    assert json.loads(out)["perplexity"] is None and json.loads(out)["mean"] < -700


def reference_logprobs(reference: Any, ids: list[int], n_scored: int) -> list[float]:
    """Of the last n_scored ids, by transformers; the last id is never fed."""
    with torch.no_grad():
        logits = reference(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return [float(logits[at - 1, ids[at]]) for at in range(len(ids) - n_scored, len(ids))]


def test_a_continuation_is_scored_after_its_context() -> None:
    """Also one that fills the context, where the harness feeds all but the last token, and one whose context is cut."""
    reference = hf_model()
    lm = LanguageModel(from_hf(reference))
    ids = torch.randint(3, 64, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    for n_context, n_text in ((1, 1), (5, 9), (20, 13), (60, 9), (50, 30), (1, 32)):
        context, text = ids[:n_context], ids[-n_text:]
        fed = [*context, *text][-33:]
        score = lm.score(text, context=context)
        wanted = reference_logprobs(reference, fed, n_text)
        assert score.ids == fed and len(score.logprobs) == n_text
        assert max(abs(a - b) for a, b in zip(score.logprobs, wanted, strict=True)) < 2e-4  # measured: 2e-5
        assert score.total == math.fsum(score.logprobs)
    with pytest.raises(PromptError, match="33 tokens, but the model's context is 32"):
        lm.score(ids[:33], context=[5])
    assert lm.score([7, 8], context=[]) == lm.score([7, 8], context=[1])  # the beginning-of-text token is 1
    for wrong in ({"bos": True}, {"stride": 4}):
        with pytest.raises(ValueError, match="context goes with neither bos nor stride"):
            lm.score([7], context=[5], **wrong)


def test_white_space_between_context_and_text_belongs_to_the_text() -> None:
    lm = minigpt.load("demo", device="cpu")
    one = lm.score("sat down.", context="The cat ")
    assert one == lm.score(" sat down.", context="The cat") and lm.tokenizer.decode(one.ids) == "The cat sat down."
    assert len(one.logprobs) == len(lm.encode(" sat down."))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_list_gives_what_each_text_gives_alone(dtype: str) -> None:
    lm = minigpt.load("demo", device="cpu", dtype=dtype)
    texts = ["The cat sat.", "One day, a little girl named Lily went to the park.", "", "Tom", "A dog! " * 30]
    contexts = ["Once.", "", "Hi", "Lily and ", "See:"]
    for together, alone in (
        (lm.score(texts), [lm.score(text) for text in texts]),
        (lm.score(texts, bos=True), [lm.score(text, bos=True) for text in texts]),
        (lm.score(texts, stride=5), [lm.score(text, stride=5) for text in texts]),
        (
            lm.score(texts, context=contexts),
            [lm.score(text, context=c) for text, c in zip(texts, contexts, strict=True)],
        ),
    ):
        for ours, theirs in zip(together, alone, strict=True):
            assert ours.ids == theirs.ids and len(ours.logprobs) == len(theirs.logprobs)
            pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
            assert max((abs(a - b) for a, b in pairs), default=0.0) < 1e-4  # measured: 1e-5
    assert math.isnan(lm.score("").mean) and lm.score("").logprobs == []
    with pytest.raises(ValueError, match="one for each of the 5 texts"):
        lm.score(texts, context=contexts[:2])
    with pytest.raises(ValueError, match="one for each of the 5 texts"):
        lm.score(texts, context="Once")


def test_the_best_tokens_in_each_place() -> None:
    lm = LanguageModel(from_hf(hf_model()))
    score = lm.score([3, 4, 5, 6], logprobs=2)
    logits = lm.model(torch.tensor([[3, 4, 5]]))[0].log_softmax(-1)
    assert score.top is not None and [len(top) for top in score.top] == [2, 2, 2]
    for place, top in enumerate(score.top):
        values, ids = logits[place].topk(2)
        assert [id for id, _ in top] == ids.tolist()
        assert max(abs(a - b) for (_, a), b in zip(top, values.tolist(), strict=True)) < 1e-5
    assert lm.score([3, 4, 5, 6]).top is None
    with pytest.raises(ValueError, match="logprobs"):
        lm.score([3, 4], logprobs=-1)


def test_ids_without_a_token_are_never_listed() -> None:
    """A padded vocabulary: its rows count for the softmax, but are no candidates, in generate and in score."""
    model = GPT2(GPT2Config(vocab_size=50304, n_embd=8, n_head=1, n_layer=1, n_positions=64, initializer_range=1.0))
    with torch.no_grad():
        model.wte.weight[50257:] *= 10
    lm = LanguageModel(model, Tokenizer.gpt2())
    found = lm.generate("a b c", max_new_tokens=8, logprobs=5)
    assert all(id < 50257 for one in found.logprobs or () for id, _ in one.top)
    assert all(id < 50257 for top in lm.score("a b c d", logprobs=5).top or () for id, _ in top)
