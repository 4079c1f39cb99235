"""The lm-evaluation-harness through minigpt: the scores of its own transformers model. Needs the extra `lm-eval`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytest.importorskip("lm_eval", reason='needs pip install -e ".[lm-eval]"')

TASKS = {
    "local_choice": """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_rolling": """
task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "local_generate": """
task: local_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [".", "\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, official: Path) -> Path:
    """The demo model with GPT-2's tokenizer files beside it, which transformers needs."""
    source = ROOT / "weights" / "demo"
    if not (source / "model.safetensors").is_file():
        pytest.skip("the demo model is not here")
    folder = tmp_path_factory.mktemp("demo")
    for file in [*source.iterdir(), official / "vocab.json", official / "merges.txt"]:
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    animals = ["fox", "dog", "bird", "cat", "bear", "fish"]
    places = ["forest", "garden", "house", "river"]
    rows = []
    for n in range(24):
        animal, place = animals[n % 6], places[n % 4]
        text = f"Once upon a time, there was a little {animal}. The {animal} lived in the {place}." + " It was fun." * n
        choices = [
            f" The {animal} was happy.",
            " Zebra quantum the of",
            f" {place.title()}",
            " One day, it went out to play.",
        ]
        page = (text + "".join(choices)) * (1 + n % 5) + ("<|endoftext|> caf\u00e9" if n % 7 == 0 else "")
        rows.append({"start": text, "text": text if n else "", "choices": choices, "answer": n % 4, "page": page})
    data = folder / "data.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("lm_eval_minigpt")


def test_the_scores_are_those_of_the_harness_own_transformers_model(harness: Any, demo: Path, tasks: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    def evaluate(model: str, arguments: str, batch_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
        found = lm_eval.simple_evaluate(
            model=model,
            model_args=f"pretrained={demo},{arguments}",
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            batch_size=batch_size,
            device="cpu",
            bootstrap_iters=0,
        )
        return found["results"], found["samples"]

    theirs, their_samples = evaluate("hf", "dtype=float32", 1)
    ours, our_samples = evaluate("minigpt", "offline=True", 5)
    assert set(ours) == set(theirs) == set(TASKS)
    for task, scores in theirs.items():
        for name, value in scores.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)  # measured: 2e-7
    assert 0 < theirs["local_choice"]["acc,none"] < 1
    worst = 0.0
    for task in TASKS:
        for mine, other in zip(our_samples[task], their_samples[task], strict=True):
            if task == "local_generate":
                assert mine["resps"] == other["resps"]
                continue
            for one, two in zip(mine["resps"], other["resps"], strict=True):
                a, b = (one[0], two[0]) if task == "local_choice" else (one, two)
                worst = max(worst, abs(float(a[0]) - float(b[0])))
                assert a[1:] == b[1:]  # whether greedy decoding gives it
    print(f"largest difference of a log-likelihood: {worst:.1e}")
    assert worst < 2e-3  # of up to 1300; measured: 1.4e-4


def test_the_command_line_runs_the_harness(demo: Path, tasks: Path, tmp_path: Path) -> None:
    args = ["--model_args", f"pretrained={demo},offline=True", "--tasks", "local_choice", "--include_path", str(tasks)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    command = [sys.executable, "scripts/lm_eval_minigpt.py", *args, "--limit", "4", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "local_choice" in done.stdout and "acc_norm" in done.stdout


def test_unusable_options_are_named(harness: Any, demo: Path) -> None:
    from lm_eval.api.instance import Instance

    model = harness.MiniGPT(str(demo), device="cpu", offline=True)
    for options, message in [
        ({"num_beams": 4, "max_gen_toks": 5}, "generation option 'num_beams' is not supported"),
        ({"max_gen_toks": 256}, r"max_gen_toks \(256\) must be below the context of 256 tokens"),
    ]:
        request = Instance(request_type="generate_until", doc={}, arguments=("a", options), idx=0)
        with pytest.raises(ValueError, match=message):
            model.generate_until([request], disable_tqdm=True)


def test_a_continuation_longer_than_the_context_is_named(harness: Any, demo: Path) -> None:
    model = harness.MiniGPT(str(demo), device="cpu", offline=True)
    with pytest.raises(ValueError, match="a continuation has 257 tokens, but the context is 256"):
        model._loglikelihood_tokens([(None, [50256], [5] * 257)], disable_tqdm=True)
    assert len(model._loglikelihood_tokens([(None, [50256], [5] * 256)], disable_tqdm=True)) == 1


def test_sampled_texts_repeat(harness: Any, demo: Path) -> None:
    from lm_eval.api.instance import Instance

    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20, "until": []}
    request = Instance(request_type="generate_until", doc={}, arguments=("Once upon", options), idx=0)
    texts = []
    for seed in (0, 0, 1):
        model = harness.MiniGPT(str(demo), device="cpu", offline=True, seed=seed)
        texts += [model.generate_until([request], disable_tqdm=True) for _ in range(2)]
    assert texts[0] == texts[1] == texts[2] == texts[3] != texts[4]


def test_the_harness_own_client_gets_the_same_scores_from_the_endpoint(
    harness: Any, demo: Path, tasks: Path, tmp_path: Path
) -> None:
    """Its local-completions model against scripts/serve.py, with the tokenizer of a folder that minigpt.save wrote."""
    pytest.importorskip("uvicorn", reason='needs pip install -e ".[serve]"')
    import lm_eval
    from endpoint import Served
    from lm_eval.tasks import TaskManager

    import minigpt

    minigpt.save(minigpt.load("demo", offline=True), tmp_path / "saved")
    found = {}
    with Served(tmp_path) as served:
        url = f"base_url={served.url}/v1/completions,model=demo,tokenizer={tmp_path / 'saved'}"
        for model, arguments in {
            "local-completions": f"{url},max_length=256,num_concurrent=4,tokenized_requests=True",
            # The client sends a window whole, with the token that it only predicts: two less than its limit.
            "minigpt": f"pretrained={demo},offline=True,max_length=254",
        }.items():
            found[model] = lm_eval.simple_evaluate(
                model=model,
                model_args=arguments,
                tasks=list(TASKS),
                task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
                batch_size=4 if model == "minigpt" else 1,
                bootstrap_iters=0,
            )["results"]
    for task, scores in found["minigpt"].items():
        for name, value in scores.items():
            if isinstance(value, float):
                assert found["local-completions"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
