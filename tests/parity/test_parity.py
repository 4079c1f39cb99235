"""`parity` itself: its data is what was published, it passes where it should, and above all it can fail."""

from __future__ import annotations

import copy
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host import DEFAULTS, default
from tiny import from_hf, hf_model, save_hf
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import LanguageModel, Tokenizer
from minigpt.cli.main import main
from minigpt.files import checkpoint
from minigpt.interpret.heads import without_heads as shared
from minigpt.network.model import ACTIVATIONS
from minigpt.parity import check as limits
from minigpt.parity import published, run
from minigpt.parity import reference as against
from minigpt.parity.check import Check, row, to_json
from minigpt.parity.published import check_published, identify
from minigpt.parity.tokenizer import check_vectors

DATA = published.read()
Entry = dict[str, Any]


@pytest.fixture(autouse=True)
def one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and one sampled run are enough here: the processors have tests of their own."""
    monkeypatch.setattr(against, "SETTINGS", ({}, {"temperature": 1.0, "top_k": 20}))
    monkeypatch.setattr(against, "SEEDS", (1,))
    monkeypatch.setattr(against, "NEW_TOKENS", 6)


def reference_model() -> GPT2LMHeadModel:
    """Tiny, with embeddings small enough that LayerNorm's epsilon shows."""
    model = hf_model(vocab_size=131, n_positions=32)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(0.1)
        model.transformer.wpe.weight.mul_(0.1)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(reference_model(), tmp_path_factory.mktemp("good"))


# The shipped data


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def sequences(value: Any) -> Iterator[list[float]]:
    """Every list of numbers in it, nested ones flattened, with the columns of tables."""
    if isinstance(value, (int, float)):
        yield [value]
    items = list(value.values()) if isinstance(value, dict) else value
    if isinstance(items, list):
        yield list(numbers(items))
        if all(isinstance(item, list) for item in items):
            yield from (list(numbers(list(column))) for column in zip(*items, strict=False))
        for item in items:
            yield from sequences(item)


def test_the_shipped_numbers_are_those_that_were_published(golden: Path) -> None:
    known = {entry["id"]: entry for entry in json.loads((golden / "golden.json").read_text(encoding="utf-8"))}
    tokenizer = Tokenizer.gpt2()
    ids = {entry["id"].split("/")[0] for entry in DATA["checks"]}
    assert (
        len(DATA["checks"]) >= 75
        and len(ids) >= 40
        and len({entry["id"] for entry in DATA["checks"]}) == len(DATA["checks"])
    )
    for entry in DATA["checks"]:
        name = entry["id"].split("/")[0]
        if name.startswith("explainer-") or name in ("rustbert-beam3-member", "rustbert-beam3-bad-words"):
            continue  # below; and read in the source that the entry names
        origin = known[name]
        assert entry["model"] == origin["model"] and entry["stated"] == origin["tolerance"]
        assert entry["source"] and entry["tolerance"] > 0
        assert not origin["kind"].startswith("contrastive") and "temperature" not in origin["kind"]
        expected = origin["expected"]
        if "score" in entry:  # the source divides by all tokens, transformers 5 and minigpt by the new ones
            share = len(entry["ids"]) / (len(entry["ids"]) + len(entry["prompt_ids"]))
            assert entry["score"] == pytest.approx(expected["score"] / share, abs=1e-6)
        assert entry.get("prompt") == (None if "rows" in entry else origin["prompt"])
        if origin["prompt_ids"]:
            given = entry["rows"][0] if "rows" in entry else entry["prompt_ids"]
            assert given[: len(origin["prompt_ids"])] == origin["prompt_ids"]
        if entry["kind"] in ("greedy", "beam search"):
            if "ids" in expected:
                assert expected["ids"] == entry["prompt_ids"] + entry["ids"]
            texts = [text for text in expected.values() if isinstance(text, str)]
            text = entry.get("text", tokenizer.decode(entry["ids"])).strip()
            assert not texts or any(whole.removeprefix(entry["prompt"] or "").strip() == text for whole in texts)
            assert text in tokenizer.decode(entry["ids"])
        elif entry["kind"] == "attention":
            check_attention(entry, expected, golden)
        elif "values" in entry:
            scale = 100 if "top_percent" in expected and entry["kind"] == "probabilities" else 1
            nested = isinstance(entry["values"][0], list)
            for values in entry["values"] if nested else [entry["values"]]:
                ours = [round(value * scale, 12) for value in numbers(values)]
                known_ones = ([round(n, 12) for n in sequence[: len(ours)]] for sequence in sequences(expected))
                assert any(ours == sequence for sequence in known_ones), entry["id"]


def test_the_explainers_numbers_are_those_that_were_published(golden: Path) -> None:
    entries = {entry["id"]: entry for entry in DATA["checks"] if entry["id"].startswith("explainer-")}
    files = [json.loads(path.read_text("utf-8")) for path in sorted((golden / "explainer").glob("ex*.json"))]
    assert len(files) == 5 and len(entries) == 10
    for source, (logits, attention) in zip(files, zip(*[iter(entries.values())] * 2, strict=True), strict=True):
        for entry in (logits, attention):
            assert (entry["prompt"], entry["prompt_ids"]) == (source["prompt"], source["tokenIds"])
        ids, every = logits["ids"], torch.tensor(source["logits"], dtype=torch.float64)
        assert len(set(ids)) == 100 and ids[:50] == every.topk(50).indices.tolist() and max(ids[50:]) > 49_000
        expected = torch.cat([every[ids], every.logsumexp(0, keepdim=True)])
        assert (expected - torch.tensor(logits["values"], dtype=torch.float64)).abs().max() <= 5.1e-6
        assert attention["heads"] == [[0, head] for head in range(12)]
        for ours, theirs in zip(attention["values"], source["attn_softmax"][0], strict=True):
            assert [len(row) for row in ours] == [*range(1, len(source["tokens"]) + 1)]
            pairs = [
                (a, b) for row, wanted in zip(ours, theirs, strict=True) for a, b in zip(row, wanted, strict=False)
            ]
            assert max(abs(a - b) for a, b in pairs) <= 5e-7


def check_attention(entry: Entry, expected: Entry, golden: Path) -> None:
    source = json.loads((golden / expected["file"]).read_text(encoding="utf-8"))
    group = source["groups"][expected["group"]] if "group" in expected else source
    for head, queries in enumerate(entry["values"]):
        if "heads" in group:
            assert group["heads"][head] == "L{}H{}".format(*entry["heads"][head])
        for query, weights in zip(entry["queries"], queries, strict=True):
            assert max(abs(a - b) for a, b in zip(weights, group["attention"][head][query], strict=False)) <= 5e-7
            assert len(weights) == query + 1


def test_the_ids_in_the_data_are_the_tokens_meant() -> None:
    tokenizer = Tokenizer.gpt2()
    for entry in DATA["checks"]:
        if entry.get("prompt") and entry["prompt"] != "<|endoftext|>":
            ids = entry["prompt_ids"]
            text = tokenizer.decode(ids[1:] if ids[0] == 50256 else ids)
            assert text.startswith(entry["prompt"])
    tops = {entry["id"]: [tokenizer.decode([id]) for id in entry["ids"]] for entry in DATA["checks"] if "ids" in entry}
    assert tops["pyvene-spain"][:3] == [" Madrid", " the", " Barcelona"]
    assert tops["tl-ioi-clean"] == [" John", " Mary"] and tops["nnsight-paris"] == [" Paris"]


def test_rust_bert_never_repeats_three_tokens() -> None:
    found = [entry for entry in DATA["checks"] if entry["id"].startswith("rustbert") and entry["kind"] == "greedy"]
    assert len(found) == 3
    for entry in found:
        ids = entry["prompt_ids"] + entry["ids"]
        threes = list(zip(ids, ids[1:], ids[2:], strict=False))
        assert entry["options"] == {"no_repeat_ngram_size": 3} and len(threes) == len(set(threes))


def test_the_tokenizer_vectors_are_those_that_were_published(golden: Path) -> None:
    known = json.loads((golden / "tokenizer.json").read_text(encoding="utf-8"))
    assert [vector["ids"] for vector in DATA["tokenizer"]] == [vector["ids"] for vector in known]
    # The collection lost white space at the ends of texts; the ids have it.
    assert all(a["text"].strip() == b["text"].strip() for a, b in zip(DATA["tokenizer"], known, strict=True))
    assert check_vectors(Tokenizer.gpt2(), DATA["tokenizer"]).passed


def test_tokenizer_vectors_can_fail() -> None:
    wrong = [{**DATA["tokenizer"][0], "ids": [1, 2]}]
    check = check_vectors(Tokenizer.gpt2(), wrong)
    assert check.passed is False and "0 of 1" in check.detail and DATA["tokenizer"][0]["text"] in check.detail


# A model that stands in for an official one: 12 blocks of 12 heads and GPT-2's vocabulary, with "published" numbers
# that transformers computes here for every shipped entry.


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entry]:
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    model = hf_model(vocab_size=50257, n_positions=192, n_embd=48, n_layer=12, n_head=12, **ends)
    model.set_attn_implementation("eager")
    folder = save_hf(model, tmp_path_factory.mktemp("official"))
    sha = checkpoint.describe(folder)["files"][0]["sha256"]
    with torch.no_grad():
        checks = [{**published_by_transformers(model, entry), "model": "gpt2"} for entry in DATA["checks"]]
    files = {**DATA["files"], "gpt2": {**DATA["files"]["gpt2"], "sha256": sha}}
    return folder, {**DATA, "files": files, "checks": checks}


def published_by_transformers(model: GPT2LMHeadModel, entry: Entry) -> Entry:
    """The entry with what transformers gives for it in place of what was published."""
    entry = copy.deepcopy(entry)
    kind, ids = entry["kind"], entry.get("ids")
    prompt = torch.tensor([entry.get("prompt_ids", [0])])
    if kind == "greedy":
        options = {name: value for name, value in entry.get("options", {}).items()}
        out = model.generate(
            prompt, max_new_tokens=len(ids), do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        entry.pop("text", None)
        return {**entry, "ids": out[0, prompt.shape[1] :].tolist()}
    if kind == "beam search":
        more: Any = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0, **entry["options"]}
        found = model.generate(prompt, max_new_tokens=len(ids), do_sample=False, **more)
        score = {"score": found.sequences_scores[0].item()} if "score" in entry else {}
        entry.pop("text", None)
        return {**entry, **score, "ids": found.sequences[0, prompt.shape[1] :].tolist()}
    if kind == "loss":
        for layer, head in entry.get("ablate", []):
            model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(
                lambda _, x: (x[0].index_fill(2, torch.arange(head * 4, head * 4 + 4), 0.0),)  # noqa: B023
            )
        rows = [torch.tensor([r]) for r in entry["rows"]]
        losses = [model(r, labels=r).loss.item() * (r.shape[1] - 1) for r in rows]
        for layer, _ in entry.get("ablate", []):
            model.transformer.h[layer].attn.c_proj._forward_pre_hooks.clear()
        return {**entry, "values": [sum(losses) / sum(r.shape[1] - 1 for r in rows)]}
    if kind == "logits with the exact GELU":
        usual = [block.mlp.act for block in model.transformer.h]
        for block in model.transformer.h:
            block.mlp.act = torch.nn.GELU()
        logits = model(prompt).logits[0, -1]
        for block, activation in zip(model.transformer.h, usual, strict=True):
            block.mlp.act = activation
        return {**entry, "values": [*logits[ids].tolist(), logits.double().logsumexp(0).item()]}
    if kind == "ln_f bias through the head":
        bias = model.transformer.wte.weight @ model.transformer.ln_f.bias
        return {**entry, "values": (bias - bias.mean())[ids].tolist()}
    hook = None
    if "zero_mlp" in entry:
        hook = model.transformer.h[entry["zero_mlp"]].mlp.register_forward_hook(lambda m, i, o: o * 0)
    residuals: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda m, i, o: residuals.append(o[0] if isinstance(o, tuple) else o))
        for module in (model.transformer.drop, *model.transformer.h)
    ]
    out = model(prompt, output_attentions=True, output_hidden_states=True)
    for each in [*hooks, *([hook] if hook else [])]:
        each.remove()
    logits, logprobs = out.logits[0, -1], out.logits[0].log_softmax(-1)
    drawn = logprobs[:-1].gather(1, prompt[0, 1:, None])[:, 0][entry.get("first", 1) - 1 :]
    lens = model.lm_head(model.transformer.ln_f(torch.cat([r.view(1, -1, 48)[:, -1] for r in residuals])))
    values = {
        "argmax": lambda: None,
        "logits": lambda: logits[ids],
        "logits minus their mean": lambda: (logits - logits.mean())[ids],
        "logit difference": lambda: logits[ids[:1]] - logits[ids[1:]],
        "probabilities": lambda: logits.softmax(-1)[ids],
        "log-probabilities": lambda: drawn,
        "log-probability": lambda: drawn.sum(0, keepdim=True),
        "hidden state": lambda: out.hidden_states[-1][0, entry["position"], :5],
        "final scale": lambda: (residuals[-1].view(1, -1, 48)[0, -1].var(unbiased=False) + 1e-5).sqrt().view(1),
        "logit lens": lambda: lens[:, ids].t(),
    }
    if kind == "attention":
        entry["values"] = [
            [out.attentions[layer][0, head, q, : q + 1].tolist() for q in entry["queries"]]
            for layer, head in entry["heads"]
        ]
    elif kind == "argmax":
        entry["ids"] = [int(logits.argmax())]
    else:
        entry["values"] = values[kind]().tolist()
    return entry


def test_every_shipped_entry_passes_on_a_model_that_agrees(official: tuple[Path, Entry]) -> None:
    lm = minigpt.load(official[0], device="cpu")
    checks = list(check_published(lm, official[1]["checks"]))
    assert len(checks) == len(DATA["checks"])
    assert [(check.name, check.difference, check.detail) for check in checks if not check.passed] == []
    assert {entry["kind"] for entry in official[1]["checks"]} == set(published.KINDS)


def test_every_shipped_entry_can_fail(official: tuple[Path, Entry]) -> None:
    lm = minigpt.load(official[0], device="cpu")

    def shifted(value: Any, by: float) -> Any:
        return [shifted(item, by) for item in value] if isinstance(value, list) else value + by

    wrong = []
    for entry in official[1]["checks"]:
        entry = {**entry, "source": "elsewhere"}
        if entry["kind"] in ("greedy", "argmax", "beam search"):
            logits = lm.model(torch.tensor([entry["prompt_ids"]]))[0, -1]
            entry["ids"] = [int(logits.argmin()), *entry["ids"][1:]]
        else:
            entry["values"] = shifted(entry["values"], 1.5 * entry["tolerance"])
        wrong.append(entry)
    checks = list(check_published(lm, wrong))
    assert [check.name for check in checks if check.passed is not False] == []
    assert all("published" in check.detail for check in checks)


def test_the_exact_gelu_is_another_model_that_shares_the_memory(
    official: tuple[Path, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = minigpt.load(official[0], device="cpu")
    entry = {**next(one for one in official[1]["checks"] if one["kind"] == "logits with the exact GELU")}
    with torch.no_grad():
        logits = lm.model(torch.tensor([entry["prompt_ids"]]))[0, -1]
    entry["tolerance"] = 1e-5  # these logits are a tenth of GPT-2's
    approximate = {**entry, "values": [*logits[entry["ids"]].tolist(), logits.logsumexp(0).item()]}
    good, wrong = check_published(lm, [entry, approximate])
    assert good.passed and wrong.passed is False
    with torch.no_grad():  # the model itself is as it was
        assert torch.equal(lm.model(torch.tensor([entry["prompt_ids"]]))[0, -1], logits)

    def kept(model: Any, heads: Any) -> Any:
        made.append(shared(model, heads))
        return made[-1]

    made: list[Any] = []
    monkeypatch.setattr(published, "without_heads", kept)
    assert all(check.passed for check in check_published(lm, [entry]))
    own, theirs = ({weight.data_ptr() for weight in model.parameters()} for model in (lm.model, made[0]))
    assert own == theirs


def test_greedy_entries_honour_their_options(official: tuple[Path, Entry]) -> None:
    lm = minigpt.load(official[0], device="cpu")
    entry = next(entry for entry in official[1]["checks"] if entry["id"] == "rustbert-name-36")
    free = lm.generate([50256], max_new_tokens=40, stop_ids=()).ids
    bound = lm.generate([50256], max_new_tokens=40, stop_ids=(), no_repeat_ngram_size=1).ids
    assert free != bound
    entry = {**entry, "prompt_ids": [50256], "ids": bound, "options": {"no_repeat_ngram_size": 1}}
    (check,) = check_published(lm, [entry])
    assert check.passed and check.difference == 0
    (check,) = check_published(lm, [{**entry, "ids": free}])
    assert check.passed is False
    (check,) = check_published(lm, [{**entry, "options": {}}])
    assert check.passed is False


def with_offset(model: GPT2LMHeadModel, offset: float) -> GPT2LMHeadModel:
    """The same model with `offset` added to every logit, as GPT-2 has one of about -100."""
    with torch.no_grad():
        wte, bias = model.transformer.wte.weight, model.transformer.ln_f.bias
        wte[:, 0] = 1.0
        model.transformer.ln_f.weight[0] = 0.0
        bias[0] = offset
    return model


def test_an_offset_of_all_logits_widens_no_tolerance() -> None:
    logits = torch.tensor([1.0, -2.0, 4.0, -math.inf])
    assert limits.spread(logits) == 3.0 and abs(limits.spread(logits - 100) - 3.0) < 1e-4
    assert limits.spread(torch.stack([logits, logits - 100])) == pytest.approx(3.0)
    nan = torch.full((3,), math.nan)
    assert limits.spread(nan) == 0.0
    reference = with_offset(hf_model(), -100.0)
    reference.set_attn_implementation("eager")
    lm = LanguageModel(from_hf(reference).to(torch.bfloat16), None, ())
    scores = lm.model(torch.tensor([[5, 6, 7]]))[0, -1].float().detach()
    assert scores.mean() < -90
    entry = {"id": "x", "prompt_ids": [5, 6, 7], "tolerance": 1e-3, "source": ""}
    wrong = [
        {**entry, "kind": "argmax", "ids": [int(scores.argmin())]},
        {**entry, "kind": "greedy", "ids": [int(scores.argmin())]},
        {**entry, "kind": "logit difference", "ids": [1, 2], "values": [float(scores[1] - scores[2]) + 4.0]},
    ]
    assert [check.passed for check in check_published(lm, wrong)] == [False] * 3
    assert limits.allowed_error(lm, nan, 1.0) == 0.0 and limits.allowed_error(lm, logits - 100, 1.0) == pytest.approx(
        3.4, 0.02
    )
    reference.generation_config.eos_token_id = None
    prompts = {"three": [5, 6, 7]}
    checks = list(against.compare(lm, reference, prompts))
    assert [check for check in checks if check.passed is False] == []
    assert next(check for check in checks if check.name.startswith("greedy")).passed


def test_wrong_ids_fail_in_bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = with_offset(hf_model(), -100.0)
    reference.generation_config.eos_token_id = None
    lm = LanguageModel(from_hf(reference).to(torch.bfloat16), None, ())
    original = against.reference_ids

    def worst(lm: LanguageModel, reference: Any, ids: list[int], params: Any) -> list[int]:
        right = original(lm, reference, ids, params)
        scores = reference(torch.tensor([ids])).logits[0, -1]
        return [int(scores.argmin()), *right[1:]]

    monkeypatch.setattr(against, "reference_ids", worst)
    check = against.compare_ids(lm, reference, {"three": [5, 6, 7]}, {})
    assert check.passed is False and check.tolerance is not None and check.tolerance < 4


def test_a_tie_is_no_failure_and_what_follows_it_is_checked(official: tuple[Path, Entry]) -> None:
    lm = minigpt.load(official[0], device="cpu")
    entry = next(entry for entry in official[1]["checks"] if entry["id"] == "hf-the-dog")
    best, second = lm.model(torch.tensor([entry["prompt_ids"]]))[0, -1].topk(2)[1].tolist()
    assert entry["ids"][0] == best
    after = lm.generate([*entry["prompt_ids"], second], max_new_tokens=5, stop_ids=()).ids
    other = {**entry, "ids": [second, *after], "tolerance": 100.0}
    (check,) = check_published(lm, [other])
    assert check.passed and f"token 1 is {best}" in check.detail and check.difference and check.difference > 0
    (check,) = check_published(lm, [{**other, "tolerance": check.difference / 2}])
    assert check.passed is False
    rest = [
        second,
        *after[:2],
        int(lm.model(torch.tensor([[*entry["prompt_ids"], second, *after[:2]]]))[0, -1].argmin()),
    ]
    (check,) = check_published(lm, [{**other, "ids": rest, "tolerance": check.difference * 1.01}])
    assert check.passed is False


def test_the_command_on_an_official_model(
    official: tuple[Path, Entry], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {**official[1], "checks": official[1]["checks"][::9]}
    monkeypatch.setattr(run, "read", lambda: data)
    assert main(["parity", "-m", str(official[0]), "--offline", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "official openai-community/gpt2" in out and f"51 of {51} texts" in out and err == ""
    assert " 0 failed, 0 skipped" in out and "hf-the-dog" in out
    entry = next(entry for entry in official[1]["checks"] if entry["kind"] == "logits")
    data["checks"] = [{**entry, "values": [value + 9.0 for value in entry["values"]], "id": "wrong"}]
    monkeypatch.setattr(run, "load_reference", lambda *args: Check("transformers", "all", None))
    assert main(["parity", "-m", str(official[0]), "--offline", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL  wrong" in out and err.endswith(" fails: wrong\n")


def test_only_the_very_file_is_official(official: tuple[Path, Entry], tmp_path: Path) -> None:
    files = official[1]["files"]
    described = checkpoint.describe(official[0])
    assert identify(described, files)[0] == "gpt2"
    lm = minigpt.load(official[0], device="cpu")
    for name, dtype in (("float16", torch.float16), ("same", None)):
        minigpt.save(lm.model, tmp_path / name, dtype=dtype)
        found, check = identify(checkpoint.describe(tmp_path / name), files)
        assert found is None and check.passed is None and "not an official file" in check.detail
    assert {len(known["sha256"]) for known in DATA["files"].values()} == {64} and len(DATA["files"]) == 5


def test_an_alias_whose_file_is_another_fails(
    official: tuple[Path, Entry], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {**official[1], "checks": []}
    monkeypatch.setattr(run, "read", lambda: data)
    monkeypatch.setattr(run, "load_reference", lambda *args: Check("transformers", "all", None))
    places = {"gpt2": official[0], "gpt2-xl": official[0], "distilgpt2": folder}
    monkeypatch.setattr("minigpt.parity.run.locate.locate", lambda model, **_: places.get(model, model))
    assert next(run.run("gpt2", offline=True)).passed is True
    for alias in ("gpt2-xl", "distilgpt2"):
        check = next(run.run(alias, offline=True))
        assert check.passed is False and check.detail.startswith(f"not the file of {alias}: ")
        check = next(run.run(alias, offline=True, revision="main"))
        assert check.passed is (True if alias == "gpt2-xl" else None)
    assert next(run.run(folder, offline=True)).passed is None
    assert main(["parity", "-m", "distilgpt2", "--offline", "--device", "cpu"]) == 1
    assert "parity of distilgpt2 fails: official; not compared: with transformers" in capsys.readouterr().err


def test_device_and_formats_are_checked_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.parity.run.locate.locate", lambda *args, **_: pytest.fail("work was done"))
    for wrong in ({"dtypes": ("float32", "bfloat16"), "device": "cpu"}, {"device": "cuda:99"}):
        with pytest.raises(minigpt.DeviceError):
            next(run.run(folder, **wrong))


# Against transformers


def transposed(state: dict[str, Any], config: Entry) -> None:
    state["transformer.h.1.attn.c_proj.weight"] = state["transformer.h.1.attn.c_proj.weight"].t().contiguous()


def swapped_heads(state: dict[str, Any], config: Entry) -> None:
    weight = state["transformer.h.2.attn.c_proj.weight"]  # (in, out): rows are the heads' outputs, 6 for each
    state["transformer.h.2.attn.c_proj.weight"] = torch.cat([weight[6:12], weight[:6], weight[12:]])


def swapped_values(state: dict[str, Any], config: Entry) -> None:
    weight = state["transformer.h.1.attn.c_attn.weight"]  # columns: Q, K, V, 24 each
    state["transformer.h.1.attn.c_attn.weight"] = torch.cat(
        [weight[:, :48], weight[:, 54:60], weight[:, 48:54], weight[:, 60:]], 1
    )


def erf_gelu(state: dict[str, Any], config: Entry) -> None:
    config["activation_function"] = "gelu"


def epsilon(state: dict[str, Any], config: Entry) -> None:
    config["layer_norm_epsilon"] = 1e-6


def missing_bias(state: dict[str, Any], config: Entry) -> None:
    state["transformer.h.2.mlp.c_fc.bias"] = torch.zeros_like(state["transformer.h.2.mlp.c_fc.bias"])


def dropped_position(state: dict[str, Any], config: Entry) -> None:
    weight = state["transformer.wpe.weight"]
    state["transformer.wpe.weight"] = torch.cat([weight[1:], weight[-1:]])


@pytest.mark.parametrize(
    "defect, module",
    [
        (transposed, "h.1.attn.c_proj"),
        (swapped_heads, "h.2.attn.c_proj"),
        (swapped_values, "h.1.attn.c_attn"),
        (erf_gelu, "h.0.mlp.c_proj"),
        (epsilon, "h.0.ln_1"),
        (missing_bias, "h.2.mlp.c_fc"),
        (dropped_position, "wpe"),
    ],
)
def test_each_defect_fails_with_its_layer_named(
    defect: Callable[[dict[str, Any], Entry], None], module: str, folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    defect(state, config)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm = minigpt.load(tmp_path, device="cpu")
    reference = against.load_reference(folder, lm)
    checks = list(against.compare(lm, reference, against.choose_prompts(lm)))
    layers = [check for check in checks if check.name.startswith("layers")]
    assert layers and all(check.passed is False for check in layers)
    assert all(f"first differs at {module}," in check.detail for check in layers)
    block = int(module.split(".")[1]) if module.startswith("h.") else 0
    for check in layers:
        assert check.layers and all(value <= limits.TOLERANCES["layers"] for value in check.layers[:block])
        assert check.layers[block] > limits.TOLERANCES["layers"]
    logits = [check for check in checks if check.name.startswith("logits")]
    assert any(check.passed is False and module in check.detail for check in logits) or defect is epsilon
    for check in checks:  # the weights depend on Q and K alone, up to the block at fault
        if check.name.startswith("attention") and module.startswith("h."):
            assert check.layers and all(value <= limits.TOLERANCES["attention"] for value in check.layers[:block])


def test_a_good_model_passes_and_wrong_ids_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = minigpt.load(folder, device="cpu")
    reference = against.load_reference(folder, lm)
    prompts = against.choose_prompts(lm)
    assert any(len(ids) == 32 for ids in prompts.values())
    state = torch.get_rng_state()
    checks = list(against.compare(lm, reference, prompts))
    assert torch.equal(state, torch.get_rng_state())
    assert [check for check in checks if not check.passed] == []
    assert {check.name.split()[0] for check in checks} == {"layers", "attention", "logits", "greedy", "sampled"}
    original = against.reference_ids

    def one_token_off(*args: Any) -> list[int]:
        ids = original(*args)
        return [*ids[:2], (ids[2] + 1) % 131, *ids[3:]]

    monkeypatch.setattr(against, "reference_ids", one_token_off)
    wrong = [check for check in against.compare(lm, reference, prompts) if check.name.startswith(("greedy", "sampled"))]
    assert all(check.passed is False and "first differs at token 3" in check.detail for check in wrong)
    assert all("top-2 margin" in check.detail for check in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("host", DEFAULTS)
def test_the_hosts_defaults_change_no_check(official: tuple[Path, Entry], folder: Path, host: str) -> None:
    """Prompts were drawn by a generator of the CPU for the host's default device, figures kept in its default dtype."""
    one_each = list({entry["kind"]: entry for entry in official[1]["checks"]}.values())

    def checks() -> list[Check]:
        # Loaded anew: on some CPUs, calls before decide how a product rounds.
        lm, small = minigpt.load(official[0], device="cpu"), minigpt.load(folder, device="cpu")
        reference = against.load_reference(folder, small)
        prompts = {name: ids[:9] for name, ids in against.choose_prompts(small).items()}
        return [*check_published(lm, one_each), *against.compare(small, reference, prompts)]

    expected = checks()
    assert all(check.passed for check in expected)
    with default(host):
        assert checks() == expected


def test_the_callers_settings_hold_between_two_checks(folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    for _ in against.compare(lm, against.load_reference(folder, lm), {"three": [3, 4, 5]}):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_a_small_trained_model_passes(golden: Path) -> None:
    """bbycroft/llm-viz's network, which sorts three letters: really trained weights, an untied head, no tokenizer."""
    checks = list(run.run(golden / "llmviz", offline=True, device="cpu"))
    assert [check for check in checks if check.passed is False] == []
    assert sum(check.passed is True for check in checks) == 14
    assert [check.group for check in checks if check.passed is None] == ["file", "tokenizer", "published"]


def test_the_command_finds_a_wrong_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["parity", "-m", str(folder), "--offline", "--device", "cpu", "--json"]
    assert main(command) == 0
    good = json.loads(capsys.readouterr().out)
    assert good["failed"] == 0 and good["passed"] > 5 and good["skipped"] == 0 and good["not applicable"] == 3
    monkeypatch.setitem(ACTIVATIONS, "gelu_new", torch.nn.functional.gelu)
    assert main(command) == 1
    out, err = capsys.readouterr()
    bad = json.loads(out)
    layers = [check for check in bad["checks"] if check["name"].startswith("layers")]
    assert all("h.0.mlp.c_proj" in check["detail"] for check in layers)
    assert bad["failed"] >= len(layers) and err.startswith(f"minigpt: error: parity of {folder} fails: layers")


def test_what_cannot_be_checked_is_skipped_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # import then raises ImportError
    assert main(["parity", "-m", str(folder), "--offline", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "skip  all" in out and "not an official file" in out and "no tokenizer" in out
    assert "0 passed, 0 failed, 1 skipped, 3 not applicable" in out
    assert err == (
        f"minigpt: error: parity of {folder} not compared: with transformers (transformers is not installed (pip "
        "install transformers)), with published numbers (they hold for the official files only), with recorded numbers "
        "(none given)\n"
    )


def test_any_failure_to_import_transformers_is_a_skip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = minigpt.load(folder, device="cpu")

    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Failed to import transformers.models.gpt2:\n no such symbol")

    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers"))
    check = against.load_reference(folder, lm)
    assert check.passed is None
    assert check.detail == (
        "transformers cannot be imported: Failed to import transformers.models.gpt2: no such symbol"
    )


def test_each_prompt_names_its_own_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = minigpt.load(folder, device="cpu")
    reference = against.load_reference(folder, lm)
    lm.model.h[1].mlp.c_fc.bias.data[0] += 1.0
    checks = list(against.compare(lm, reference, {"one": [3, 4, 5], "two": [60, 61]}))
    layers = [check.detail for check in checks if check.name.startswith("layers")]
    logits = [check.detail for check in checks if check.name.startswith("logits")]
    assert len(set(layers)) == 2
    assert all(detail.endswith(f"; a layer {layer}") for detail, layer in zip(logits, layers, strict=True))


def test_no_comparison_with_random_weights(folder: Path, tmp_path: Path) -> None:
    """transformers initialises what it does not find, with no more than a warning."""
    from safetensors.torch import load_file, save_file

    state = {f"_orig_mod.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    checks = list(run.run(tmp_path, offline=True, device="cpu"))
    assert checks[-1].group == "transformers" and checks[-1].passed is None
    assert "transformers does not find transformer.h.0.attn.c_attn.bias and others" in checks[-1].detail


def test_given_prompts_are_compared_and_bad_ones_refused(
    official: tuple[Path, Entry], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = minigpt.load(official[0], device="cpu")
    prompts = against.choose_prompts(lm, ["The dog", "A second one"])
    assert prompts["The dog"] == [464, 3290] and len(prompts) == len(against.PROMPTS) + 3
    for text in ("", "dog " * 200):
        assert main(["parity", "-m", str(official[0]), "--offline", "--device", "cpu", "-p", text]) == 1
        assert "a prompt for parity has 1 to 192 tokens" in capsys.readouterr().err
    assert main(["parity", "-m", str(folder), "--offline", "--device", "cpu", "-p", "text"]) == 1
    assert "no tokenizer" in capsys.readouterr().err
    assert main(["parity", "-m", str(folder), "--offline", "--device", "cpu", "--dtype", "float32", "float99"]) == 1
    assert "'float99' is not supported" in capsys.readouterr().err


def test_rows_and_json_of_odd_figures() -> None:
    check = Check("transformers", "x", False, "why", math.nan, 1e-5, "float32", layers=[math.inf, 1.0])
    assert "FAIL" in row(check) and "nan" in row(check) and row(check).startswith("\ncompared with transformers")
    assert not row(check, check).startswith("\n")
    assert row(check).split()[-4:] == ["nan", ">", "1.0e-05", "why"]
    passed = Check("transformers", "x", True, "", 1e-6, 1e-5, "float32")
    assert "1.0e-06 <= 1.0e-05" in row(passed)
    assert to_json(check)["difference"] is None and to_json(check)["layers"] == [None, 1.0]
    json.loads(json.dumps(to_json(check), allow_nan=False))


@torch.no_grad()
def test_damaged_weights_fail_wherever_the_nan_is(folder: Path) -> None:
    lm = minigpt.load(folder, device="cpu")
    reference = against.load_reference(folder, lm)
    broken = LanguageModel(copy.deepcopy(lm.model))
    broken.model.h[1].mlp.c_fc.bias[3] = math.nan  # the last block turns it into NaN everywhere
    checks = []
    with pytest.raises(minigpt.CheckpointError, match="NaN"):
        for check in against.compare(broken, reference, against.choose_prompts(lm)):
            checks.append(check)
    assert all(check.passed is False for check in checks) and "first differs at h.1.mlp.c_fc," in checks[0].detail


def test_one_skipped_check_skips_no_group_of_the_pretrained_tests() -> None:
    from judge import judge

    good, skipped, bad = (Check("transformers", f"{kind}", kind, "why") for kind in (True, None, False))
    judge([good, good], "transformers")
    with pytest.warns(UserWarning, match="skipped: None: why"):
        judge([good, skipped], "transformers")
    with pytest.raises(pytest.skip.Exception):
        judge([skipped], "transformers")
    for checks in ([good, skipped, bad], [Check("file", "official", True)]):
        with pytest.raises(AssertionError):
            judge(checks, "transformers")
