"""The endpoint: real clients of the completions interface against a real server. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from drawn import assert_same
from endpoint import Served
from tiny import from_hf, hf_model

import minigpt
from minigpt import LanguageModel, SamplingParams

openai = pytest.importorskip("openai", reason='needs pip install -e ".[serve]"')
httpx = pytest.importorskip("httpx", reason='needs pip install -e ".[serve]"')
pytest.importorskip("uvicorn", reason='needs pip install -e ".[serve]"')
pytest.importorskip("starlette", reason='needs pip install -e ".[serve]"')

START = "Once upon a time, there was a little fox"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return minigpt.load("demo", device="cpu", offline=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One row at a time, two waiting requests, a key, narrow bounds."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "key").write_text("s3cret-key\n")
    bounds = ["--batch-size", "1", "--waiting", "2", "--max-tokens", "250", "--max-rows", "4", "--max-body", "3000"]
    with Served(folder, "--api-key-file", str(folder / "key"), "--cors", "https://page.example", *bounds) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(served: Served, body: Any, **headers: str) -> Any:
    """POST a body, JSON or bytes; gives httpx's response."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    return httpx.post(f"{served.url}/v1/completions", content=content, headers=headers, timeout=120)


def raw(body: Any) -> bytes:
    """The same request as bytes."""
    content = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: a", "Connection: close", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content


# What is asked, and the same as SamplingParams.
REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": START}, {}),
    ({"prompt": START, "max_tokens": 40, "temperature": 0}, {"max_new_tokens": 40, "temperature": 0}),
    ({"prompt": [464, 3290], "max_tokens": 9, "seed": 5, "top_p": 0.9}, {"max_new_tokens": 9, "seed": 5, "top_p": 0.9}),
    (
        {"prompt": "Tom had a ball.", "n": 3, "seed": 2**64 - 2, "stop": ["."], "max_tokens": 30},
        {"samples": 3, "seed": 2**64 - 2, "stop": ["."], "max_new_tokens": 30},
    ),
    ({"prompt": "", "temperature": 0.7, "seed": -1}, {"temperature": 0.7, "seed": 2**64 - 1}),
    (
        {"prompt": "caf\u00e9 \U0001f98a", "temperature": 0, "logit_bias": {"262": 5, "11": -100}},
        {"temperature": 0, "logit_bias": {262: 5, 11: -100}},
    ),
    ({"prompt": START, "stop": "fox", "max_tokens": 50, "seed": 1}, {"stop": "fox", "max_new_tokens": 50, "seed": 1}),
    ({"prompt": "The end.", "max_tokens": 250, "seed": 3}, {"max_new_tokens": 250, "seed": 3}),  # to the context's end
    (
        {"prompt": START, "seed": 4, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"seed": 4, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    ),
]
NEUTRAL = {"best_of": 1, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "somebody"}


def alone(lm: LanguageModel, body: dict[str, Any], options: dict[str, Any]) -> tuple[SamplingParams, list[Any]]:
    """The completions that the library gives for it."""
    params = SamplingParams(**{"max_new_tokens": 16, "temperature": 1.0, **options})
    done = lm.generate(body["prompt"], params) if params.samples > 1 else [lm.generate(body["prompt"], params)]
    return params, done


def compare(lm: LanguageModel, choices: list[dict[str, Any]], params: SamplingParams, expected: list[Any]) -> int:
    """Text, ids and reason are the library's, up to ties; gives how many ties there were."""
    ties = 0
    for choice, one in zip(choices, expected, strict=True):
        same = params if one.seed is None else params.over({"seed": one.seed})
        tie = assert_same(lm, one.prompt_ids, choice["token_ids"], one.ids, same)
        ties += tie
        if not tie:
            reason = "stop" if one.finish_reason == "stop" else "length"
            assert (choice["text"], choice["finish_reason"], choice["seed"]) == (one.text, reason, one.seed)
    return ties


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_the_openai_client_gets_what_the_library_gives(lm: LanguageModel, client: Any, number: int) -> None:
    body, options = REQUESTS[number]
    names = ("prompt", "max_tokens", "temperature", "n", "stop", "seed", "top_p", "logit_bias")
    theirs = {name: value for name, value in body.items() if name in names}
    ours = {name: value for name, value in body.items() if name not in theirs}
    done = client.completions.create(model="demo", **theirs, extra_body={**ours, **(NEUTRAL if number == 0 else {})})
    choices = [choice.model_dump() for choice in done.choices]
    if "seed" not in body and body.get("temperature") != 0:
        options = {**options, "seed": choices[0]["seed"]}  # the one that it drew
    params, expected = alone(lm, body, options)
    ties = compare(lm, choices, params, expected)
    assert done.object == "text_completion" and done.model == "demo" and done.id.startswith("cmpl-")
    assert [choice["index"] for choice in choices] == list(range(params.samples))
    drawn = sum(len(choice["token_ids"]) for choice in choices)
    prompt = len(expected[0].prompt_ids)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        prompt, drawn, prompt + drawn)  # fmt: skip
    theirs["seed"] = (choices[0]["seed"] or 0) % 2**64
    chunks = list(client.completions.create(
        model="demo", **theirs, stream=True, stream_options={"include_usage": True}, extra_body=ours))  # fmt: skip
    assert chunks[-1].choices == [] and chunks[-1].usage == done.usage and not any(c.usage for c in chunks[:-1])
    for index, choice in enumerate(choices):
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert ties or "".join(piece.text for piece in pieces) == choice["text"]
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == choice["finish_reason"]


def test_many_prompts_come_in_order(lm: LanguageModel, client: Any) -> None:
    prompts = ["One day", START, "The", "Mia was sad."]
    done = client.completions.create(model="demo", prompt=prompts, n=2, seed=7, max_tokens=12)
    choices = [choice.model_dump() for choice in done.choices]
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=7, samples=2)
    compare(lm, choices, params, lm.generate(prompts, params))
    done = client.completions.create(model="demo", prompt=[[464], [464, 3290]], temperature=0)
    assert done.choices[0].text == lm.generate([464], max_new_tokens=16).text and len(done.choices) == 2


def test_logprobs_and_echo_are_those_of_score(lm: LanguageModel, client: Any) -> None:
    """In the interface's shape: the first of a prompt is null, and offsets count the prompt's characters."""
    prompt = "caf\u00e9 \U0001f98a. The fox"
    plain = lm.generate(prompt, max_new_tokens=12, logprobs=2)
    score = lm.score(prompt, logprobs=2)
    whole = lm.score(plain.prompt_ids + plain.ids)
    for n_new, stream in itertools.product((12, 0), (False, True)):
        options = {"temperature": 0, "logprobs": 2, "echo": True, "stream": stream, "max_tokens": n_new}
        done = client.completions.create(model="demo", prompt=prompt, **options)
        pieces = [chunk.choices[0] for chunk in done] if stream else done.choices
        assert "".join(piece.text for piece in pieces) == prompt + plain.text * bool(n_new)
        assert pieces[-1].finish_reason == "length" and all(piece.finish_reason is None for piece in pieces[:-1])
        tokens, values, best, offsets = (
            [item for piece in pieces for item in getattr(piece.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert len(tokens) == len(values) == len(best) == len(offsets) == len(score.ids) + n_new
        assert values[0] is None and best[0] is None
        assert values[1:] == pytest.approx(whole.logprobs[: len(values) - 1], abs=1e-4)
        for one, top, value, token in zip(score.top or [], best[1:], values[1:], tokens[1:], strict=False):
            assert list(top.values())[:2] == pytest.approx([logprob for _, logprob in one], abs=1e-4)
            assert top[token] == value and len(top) in (2, 3)
        assert "bytes:\\x98\\x8a" in tokens or any(token.startswith("bytes:") for token in tokens)
        text = prompt + plain.text
        for at, (token, offset) in enumerate(zip(tokens, offsets, strict=True)):
            assert token.startswith("bytes:") or text[offset : offset + len(token)] == token, at
    bare = client.completions.create(model="demo", prompt=prompt, temperature=0, logprobs=0, max_tokens=3).choices[0]
    assert bare.logprobs.text_offset[0] == len(prompt) and [len(top) for top in bare.logprobs.top_logprobs] == [1] * 3
    echoed = client.completions.create(model="demo", prompt=[[464], [5]], echo=True, max_tokens=0)
    assert [choice.text for choice in echoed.choices] == ["The", "&"] and echoed.choices[0].logprobs is None


def test_errors_are_those_that_the_client_knows(client: Any, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-9' does not exist") as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="top_p must be a finite number from 0 to 1, not 7") as caught:
        client.completions.create(model="demo", prompt="a", top_p=7)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "top_p")
    barred = {"suppress_tokens": list(range(1000)), "no_repeat_ngram_size": 1}
    barred |= {"logit_bias": {"1000": 0}, "stop_ids": []}
    assert client.completions.create(model="demo", prompt="a", extra_body=barred).choices
    assert [model.id for model in client.models.list()] == ["demo"] and client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"best_of": 2}, 400, "best_of", "best_of is not supported"),
        ({"suffix": "x"}, 400, "suffix", "suffix is not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "presence_penalty is not supported"),
        ({"frequency_penalty": -1}, 400, "frequency_penalty", "frequency_penalty is not supported"),
        ({"max_new_tokens": 3}, 400, "max_new_tokens", "did you mean max_tokens?"),
        ({"temprature": 3}, 400, "temprature", "did you mean temperature?"),
        ({"max_tokens": -1}, 400, "max_tokens", "max_tokens must be at least 0, not -1"),
        ({"max_tokens": 5000}, 400, "max_tokens", "max_tokens must be at most 4096, not 5000"),
        ({"n": 0}, 400, "n", "n must be at least 1, not 0"),
        ({"n": 129}, 400, "prompt", "prompts times n must be from 1 to 128, not 129"),
        ({"prompt": []}, 400, "prompt", "not 0"),
        ({"prompt": [[1], [True]]}, 400, "prompt", "a prompt is text or a list of token ids"),
        ({"prompt": [50257]}, 400, "prompt", "token id 50257 is outside the vocabulary"),
        ({"prompt": "a " * 300}, 400, "prompt", "the model's context is 256"),
        ({"prompt": "a " * 300, "overflow": "slide", "echo": True, "logprobs": 1}, 400, "prompt", "at most 256 tokens"),
        ({"logprobs": 21}, 400, "logprobs", "logprobs must be from 0 to 20, not 21"),
        ({"logprobs": True}, 400, "logprobs", "logprobs must be an integer, not True"),
        ({"echo": 1}, 400, "echo", "echo must be true or false, not 1"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "goes with stream"),
        ({"logit_bias": {"60000": 1}}, 400, "logit_bias", "only 50257 ids"),
        ({"logit_bias": {str(id): 1 for id in range(1025)}}, 400, "logit_bias", "from 0 to 1024, not 1025"),
        ({"stop": {"a": 1}}, 400, "stop", "stop must not be an object"),
        ({"stop": [""]}, 400, "stop", "stop must be a non-empty string"),
        ({"seed": 2**64}, 400, "seed", "seed must be from 0"),
        ({"max_seconds": -1}, 400, "max_seconds", "max_seconds must be a finite number"),
        ({"temperature": float("nan")}, 400, None, "the body is not JSON: NaN"),
        ({"model": ["demo"]}, 404, "model", "does not exist"),
        ({"\ud800": 1}, 400, "\ud800", "unknown field"),
        ([1], 400, None, "the body must be a JSON object"),
        (b"[" * 100_000, 400, None, "the body is not JSON"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", 400, None, "the body is not JSON"),
        (b'{"prompt": "\xff"}', 400, None, "the body is not JSON"),
        (b"", 400, None, "the body is not JSON"),
        (b" " * 1_000_001, 413, None, "the body has more than 1000000 bytes"),
    ],
)
def test_what_is_refused_is_named(served: Served, body: Any, status: int, param: str | None, message: str) -> None:
    answer = ask(served, {"prompt": "a", **body} if isinstance(body, dict) else body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and message in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


def test_other_paths_and_methods_get_the_same_kind_of_body(served: Served) -> None:
    for method, path, status in [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/../../etc/passwd", 404),
        ("POST", "/v1/chat/completions", 404),
    ]:
        answer = httpx.request(method, served.url + path)
        assert answer.status_code == status and answer.json()["error"]["message"], path
        assert "access-control-allow-origin" not in answer.headers and "server" not in answer.headers
    assert httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "a"}').status_code == 415
    assert served.health() == {"status": "ok", "running": 0, "waiting": 0}


def test_one_that_fails_fails_alone(lm: LanguageModel, served: Served, client: Any) -> None:
    """No token is left to draw in the middle of one request, while another runs."""
    extreme = {"prompt": "a", "logit_bias": {"5": 1e39}, "max_tokens": 9}
    streams = client.completions.create(model="demo", prompt=START, temperature=0, max_tokens=60, stream=True)
    next(streams)
    answer = ask(served, extreme)
    assert answer.status_code == 400 and "logit overflows float32" in answer.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="logit overflows float32"):
        list(client.completions.create(model="demo", stream=True, **extreme))
    rest = "".join(chunk.choices[0].text for chunk in streams)
    assert lm.generate(START, max_new_tokens=60).text.endswith(rest) and len(rest) > 20


def test_a_client_that_gives_up_frees_its_rows(served: Served, client: Any) -> None:
    long = {
        "model": "demo",
        "prompt": [START] * 20,
        "max_tokens": 4000,
        "extra_body": {"overflow": "slide", "stop_ids": []},
    }
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(**long)
    served.idle()
    with client.completions.create(**long, stream=True) as stream:
        assert next(stream).choices
        served.reaches(8, 1)
    served.idle()
    assert client.completions.create(model="demo", prompt="a").choices


def test_curl(lm: LanguageModel, served: Served) -> None:
    if not shutil.which("curl"):
        pytest.skip("no curl")
    body = json.dumps({"prompt": START, "temperature": 0, "max_tokens": 5, "stream": True})
    command = ["curl", "-sNi", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    head, _, events = shown.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200 OK") and "content-type: text/event-stream" in head.lower()
    *lines, end = [event for event in events.split("\n\n") if event.strip()]
    assert end == "data: [DONE]" and len(lines) == 5 and all(line.startswith("data: {") for line in lines)
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert "".join(texts) == lm.generate(START, max_new_tokens=5).text


def test_only_the_key_opens(guarded: Served) -> None:
    for header in (None, "", "Bearer", "Bearer wrong", "Bearer s3cret-key2", "s3cret-key", "Bearer caf\u00e9"):
        headers = {} if header is None else {"authorization": header.encode()}
        for path in ("/v1/models", "/v1/nothing"):
            answer = httpx.get(guarded.url + path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong").models.list()
    assert openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="s3cret-key").models.list().data
    assert guarded.health()["status"] == "ok"
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert httpx.options(f"{guarded.url}/v1/completions", headers=asked).status_code == 200
    asked["origin"] = "https://other.example"
    assert httpx.options(f"{guarded.url}/v1/completions", headers=asked).status_code == 400


def test_bounds(guarded: Served) -> None:
    """The queue, the rows, the tokens, the body, the time: it counts from the arrival on, for every sample."""
    key = {"authorization": "Bearer s3cret-key"}
    long = {"prompt": START, "max_tokens": 250, "overflow": "slide", "stop_ids": []}
    for body, status in [({**long, "n": 5}, 400), ({**long, "max_tokens": 251}, 400), ({"prompt": "a" * 3001}, 413)]:
        assert ask(guarded, body, **key).status_code == status
    for seconds in (0, 0.3):
        answer = ask(guarded, {**long, "n": 4, "max_seconds": seconds}, **key).json()
        counts = [len(choice["token_ids"]) for choice in answer["choices"]]
        assert len(counts) == 4 and all(1 <= count < 250 for count in counts), counts
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    many = {**long, "n": 4, "stream": True}
    url, headers = f"{guarded.url}/v1/completions", {**key, "content-type": "application/json"}
    with httpx.Client(timeout=60) as http, http.stream("POST", url, json=many, headers=headers) as first:
        lines = first.iter_lines()
        next(lines)  # it has the one row, and three more of its samples wait for it
        with http.stream("POST", url, json=many, headers=headers), http.stream("POST", url, json=many, headers=headers):
            guarded.reaches(4, 2)
            answer = ask(guarded, {"prompt": "a"}, **key)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
    guarded.idle()
    assert ask(guarded, {"prompt": "a"}, **key).status_code == 200
    assert "s3cret" not in guarded.log and START not in guarded.log and "Traceback" not in guarded.log


async def crowd(served: Served, lm: LanguageModel, seconds: float) -> tuple[int, int, list[float]]:
    """64 clients that ask for REQUESTS in a random order: answers, ties, and the server's memory on the way."""
    cases = []
    for number, (body, options) in enumerate(REQUESTS):
        if body.get("temperature") != 0 and "seed" not in body:
            body, options = {**body, "seed": number}, {**options, "seed": number}
        cases.append((body, *alone(lm, body, options)))
    until = time.monotonic() + seconds
    answers = ties = 0
    memory = []

    async def one(number: int, http: Any) -> None:
        nonlocal answers, ties
        chosen = random.Random(number)
        while time.monotonic() < until:
            body, params, expected = chosen.choice(cases)
            stream = chosen.random() < 0.5
            answer = await http.post(f"{served.url}/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 200, answer.text
            choices = joined(answer.text) if stream else answer.json()["choices"]
            ties += compare(lm, choices, params, expected)
            answers += 1
            if number == 0:
                memory.append(served.megabytes)

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        await asyncio.gather(*(one(number, http) for number in range(64)))
    return answers, ties, memory


def joined(text: str) -> list[dict[str, Any]]:
    """The choices of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    *lines, end = [line[6:] for line in text.splitlines() if line]
    assert end == "[DONE]"
    for piece in (piece for line in lines for piece in json.loads(line)["choices"]):
        whole = choices.setdefault(piece["index"], {"text": "", "token_ids": []})
        ids = whole["token_ids"] + piece["token_ids"]
        choices[piece["index"]] = {**piece, "text": whole["text"] + piece["text"], "token_ids": ids}
    return [choices[index] for index in sorted(choices)]


def test_64_clients_get_what_each_would_get_alone(
    served: Served, lm: LanguageModel, request: pytest.FixtureRequest
) -> None:
    asyncio.run(crowd(served, lm, 2))
    files = settled(served)
    seconds = 60 if request.config.getoption("--slow") else 6
    answers, ties, memory = asyncio.run(crowd(served, lm, seconds))
    print(f"{answers} answers in {seconds} s, {ties} ties, memory {memory[0]:.1f} to {memory[-1]:.1f} MB")
    assert answers >= 64 and ties <= answers // 50
    assert memory[-1] - memory[0] < 15  # measured: see the printed line
    assert abs(settled(served) - files) <= 2
    assert "Traceback" not in served.log and "ERROR" not in served.log


def settled(served: Served) -> int:
    """Open files once uvicorn has closed idle connections."""
    served.idle()
    time.sleep(6)
    return served.files


def test_200_clients_vanish(served: Served, lm: LanguageModel) -> None:
    served.idle()
    chosen = random.Random(3)
    body = {"prompt": START, "max_tokens": 200, "n": 2, "overflow": "slide", "stop_ids": []}

    def vanish(seconds: float, stream: bool, cut: int | None) -> None:
        """Send a request, or the first bytes of one; hang up after that time."""
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as wire:
            wire.sendall(raw({**body, "stream": stream})[:cut])
            time.sleep(seconds)

    waiting: list[threading.Thread] = []
    for number in range(200):
        cut = chosen.randrange(1, 250) if number % 10 == 0 else None
        waiting.append(threading.Thread(target=vanish, args=(chosen.random() * 0.6, number % 2 == 0, cut)))
        waiting[-1].start()
        time.sleep(0.01)
    for thread in waiting:
        thread.join(60)
    served.idle()
    answer = ask(served, {"prompt": START, "temperature": 0})
    assert answer.json()["choices"][0]["text"] == lm.generate(START, max_new_tokens=16).text
    assert "Traceback" not in served.log and "ERROR" not in served.log


def test_a_slow_reader_keeps_nobody_waiting(served: Served) -> None:
    """It asks for megabytes and reads nothing; others are answered; then it gets all of them."""
    body = {"prompt": ["a " * 240] * 6, "n": 8, "max_tokens": 1, "logprobs": 20, "echo": True, "stream": True}
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.settimeout(60)
        wire.connect(("127.0.0.1", served.port))
        wire.sendall(raw(body))
        assert wire.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(5):
            assert ask(served, {"prompt": "a", "max_tokens": 3}).status_code == 200
        served.idle()  # its rows do not wait for it
        parts = []
        while part := wire.recv(1 << 20):
            parts.append(part)
    text = b"".join(parts)
    assert b"data: [DONE]" in text[-40:] and len(text) > 4_500_000  # more than the wire holds
    assert text.count(b'"finish_reason":null') == text.count(b'"token_ids":[]') == 48


def test_500_malformed_bodies(served: Served) -> None:
    chosen = random.Random(0)
    good = {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "n": 1, "stop": ["x"], "seed": 1, "logprobs": 1}
    good |= {"echo": False, "stream": False, "logit_bias": {"5": 1}, "top_p": 0.5, "top_k": 3, "stop_ids": [3]}
    wrong: list[Any] = [{}, {"a": 1}, [[]], [None], [[[1]]], "\ud800\x00", -(10**30), 1.5e308, True, [{}], "NaN"]
    fits = [("logit_bias", {}), ("echo", True), ("stream", True), ("temperature", 1.5e308), ("prompt", [[]])]
    fits += [(name, text) for name in ("prompt", "stop") for text in ("NaN", "\ud800\x00")]

    def malformed() -> bytes:
        text = json.dumps(good).encode()
        kind = chosen.randrange(4)
        if kind == 0:  # cut
            return text[: chosen.randrange(len(text))]
        if kind == 1:  # noise
            return bytes(chosen.randrange(256) for _ in range(chosen.randrange(300)))
        if kind == 2:  # a byte that JSON never has, outside or inside a string
            at = chosen.randrange(len(text))
            return text[:at] + bytes([chosen.choice([0, 1, 31, 128, 255])]) + text[at:]
        while True:
            name, value = chosen.choice(list(good)), chosen.choice(wrong)
            if (name, value) not in fits:
                return json.dumps({**good, name: value}).encode()

    headers = {"content-type": "application/json"}
    with httpx.Client(timeout=60) as http:
        for _ in range(500):
            body = malformed()
            answer = http.post(f"{served.url}/v1/completions", content=body, headers=headers)
            assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], (body, answer.text)
    assert ask(served, good).status_code == 200 and "Traceback" not in served.log


def test_bytes_that_are_no_http(served: Served) -> None:
    for data in (
        b"\x00" * 2000,
        b"GET / HTTP/9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as wire:
            wire.sendall(data)
            assert wire.recv(1000)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404")
    assert served.health()["status"] == "ok"


def test_sigterm_finishes_what_runs_and_refuses_new(tmp_path: Path, lm: LanguageModel) -> None:
    body = {"prompt": START, "max_tokens": 200, "temperature": 0, "stream": True, "stop_ids": []}
    expected = lm.generate(START, max_new_tokens=200, stop_ids=()).text
    with Served(tmp_path, "--batch-size", "1") as served:
        with httpx.Client(timeout=60) as http, http.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            with ThreadedAsk(served, {"prompt": "a", "temperature": 0}) as waiting:  # in the queue: it was accepted
                served.reaches(1, 1)
                served.process.send_signal(signal.SIGTERM)
                refused = 0
                while not refused:
                    try:
                        served.health()
                    except OSError:
                        refused = 1
                text = "\n".join([first, *lines])
            assert waiting.status == 200
        assert joined(text)[0]["text"] == expected
        assert served.process.wait(30) == -signal.SIGTERM
        assert START not in served.log and "Traceback" not in served.log


class ThreadedAsk:
    """`ask` in a thread; its status at the end of the block."""

    def __init__(self, served: Served, body: Any) -> None:
        self.status = 0
        self.thread = threading.Thread(target=lambda: setattr(self, "status", ask(served, body).status_code))

    def __enter__(self) -> ThreadedAsk:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(60)


def test_a_killed_server_loses_only_what_was_in_flight(tmp_path: Path) -> None:
    body = {"prompt": START, "max_tokens": 4000, "overflow": "slide", "stop_ids": [], "stream": True}
    with Served(tmp_path) as served, httpx.Client(timeout=60) as http:
        with http.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            served.process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        served.process.wait()
        with Served(tmp_path, port=served.port) as again:
            assert ask(again, {"prompt": START}).status_code == 200


def test_bad_arguments_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for args, code, message in [
        (["--batch-size", "0"], 2, "--batch-size must be at least 1, not 0"),
        (["--api-key-file", str(tmp_path / "empty")], 2, "holds no key"),
        (["--api-key-file", str(tmp_path / "none")], 1, "No such file"),
        (["-m", str(tmp_path / "nowhere")], 1, "nowhere"),
    ]:
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "-m", "demo", "--offline", *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == code and done.stderr.startswith("serve: error:") and message in done.stderr


def test_a_failure_of_the_engine_ends_what_runs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.engine import Engine, EngineError, Job

    from minigpt import Failure, Step
    from minigpt.decoding.batch import Batch

    lm = LanguageModel(from_hf(hf_model()))
    engine = Engine(lambda: lm, 2, 9)
    params = SamplingParams(max_new_tokens=5, stop_ids=())

    def run(scored: int | None = None) -> list[Any]:
        events: list[Any] = []
        done = threading.Event()

        def deliver(at: int, event: Any) -> None:
            events.append(event)
            if isinstance(event, Failure) or getattr(event, "finish_reason", None):
                done.set()

        engine.submit(Job([([3, 4], params)], scored, time.monotonic() + 60, deliver))
        assert done.wait(60)
        return events

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("no memory")

    for target, name, scored, before in [(Batch, "step", None, 1), (lm, "score", 1, 0)]:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, broken)
            *steps, failure = run(scored)
            assert len(steps) == before and isinstance(failure, Failure) and isinstance(failure.error, EngineError)
        assert [type(event) for event in run()] == [Step] * 5
    engine.end()
    assert engine.state() == {"status": "ended", "running": 0, "waiting": 0}
