"""What a request asks for: its JSON, checked field by field, as prompts and SamplingParams."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minigpt import LanguageModel, MiniGPTError, PromptError, SamplingParams
from minigpt.checks import integer, number, short_repr
from minigpt.decoding.params import fresh_seed
from minigpt.decoding.sequence import Prompt
from minigpt.prompts import is_one_prompt

OURS = {  # fields of the interface and our own -> SamplingParams
    **{"max_tokens": "max_new_tokens", "n": "samples", "min_new_tokens": "min_new_tokens"},
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")},
    **{name: name for name in ("logit_bias", "suppress_tokens", "stop", "stop_ids", "seed", "logprobs", "overflow")},
}
DEFAULTS = {"max_tokens": 16, "temperature": 1}  # where the interface has other ones than SamplingParams
OTHERS = ("model", "prompt", "echo", "stream", "stream_options", "user", "max_seconds", "special")
NEUTRAL = {"suffix": ("", None), "best_of": (), "presence_penalty": (0, None), "frequency_penalty": (0, None)}
LOGPROBS, ITEMS, STOPS = 20, 1024, 64  # the most best tokens; biased, barred or stopping ids; stop strings


class RefusedError(Exception):
    """A request that is not answered. param: the field at fault; code: what is wrong, for programs."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message := message[:1000])
        self.status = status
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
        kind = "server_error" if status >= 500 else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Bounds:
    """What one request may cost. rows: prompts times n; seconds: from its arrival on."""

    tokens: int = 4096
    rows: int = 128
    seconds: float = 120.0
    body: int = 1_000_000


@dataclass(frozen=True)
class Asked:
    """A request. prompts: checked ids, none of them empty; params: one for each prompt; usage: at a stream's end."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    echo: bool
    stream: bool
    usage: bool
    seconds: float

    @property
    def scored(self) -> int | None:
        """How many of the best tokens to give for each token of the prompts; None: they are not scored."""
        return self.params[0].logprobs if self.echo else None


def read_json(body: bytes) -> dict[str, Any]:
    """The fields of a body, those that are null left out. Raises RefusedError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        data = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RefusedError(f"the body must be a JSON object, not {short_repr(data)[:100]}")
    return {name: value for name, value in data.items() if value is not None}


def read(data: Mapping[str, Any], lm: LanguageModel, model: str, bounds: Bounds) -> Asked:
    """The request that the fields make. Raises RefusedError."""
    if data.get("model", model) != model:
        message = f"the model {short_repr(data['model'])} does not exist: this server has {model!r}"
        raise RefusedError(message, "model", 404, "model_not_found")
    _refuse_unknown(data)
    base = _params(data)
    if base.max_new_tokens > bounds.tokens:
        raise RefusedError(f"max_tokens must be at most {bounds.tokens}, not {base.max_new_tokens}", "max_tokens")
    echo, stream, special = (_flag(data, name) for name in ("echo", "stream", "special"))
    options = data.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise RefusedError("stream_options must be an object, and goes with stream", "stream_options")
    given = data.get("prompt", "")
    try:
        prompts = [given] if is_one_prompt(given) else list(given)
        if not 1 <= len(prompts) * base.samples <= bounds.rows:
            raise PromptError(f"prompts times n must be from 1 to {bounds.rows}, not {len(prompts) * base.samples}")
        ids = [Prompt(lm.encode(one, special=special), base, lm.limits).ids for one in prompts]
        if echo and base.logprobs is not None and max(map(len, ids)) > lm.limits.n_positions:
            raise PromptError(f"a prompt with logprobs has at most {lm.limits.n_positions} tokens")
    except (MiniGPTError, ValueError) as error:
        at_fault = next((name for name in ("logit_bias", "suppress_tokens", "stop") if name in str(error)), "prompt")
        raise RefusedError(str(error), at_fault) from None
    try:
        seconds = min(number("max_seconds", data.get("max_seconds", bounds.seconds), 0), bounds.seconds)
    except ValueError as error:
        raise RefusedError(str(error), "max_seconds") from None
    return Asked(ids, [_seeded(base) for _ in ids], echo, stream, _flag(options, "include_usage"), seconds)


def _refuse_unknown(data: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        allowed = (data.get("n", 1),) if name == "best_of" else neutral
        if name in data and data[name] not in allowed:
            raise RefusedError(f"{name} is not supported", name, code="unsupported_parameter")
    known = [*OURS, *OTHERS, *NEUTRAL]
    unknown = next((name for name in data if name not in known), None)
    if unknown is not None:
        renamed = [theirs for theirs, ours in OURS.items() if ours == unknown]
        close = renamed or difflib.get_close_matches(unknown[:50], known, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise RefusedError(f"unknown field {short_repr(unknown)[:100]}{hint}", unknown[:50], code="unknown_parameter")


def _params(data: Mapping[str, Any]) -> SamplingParams:
    """The SamplingParams of the fields, each checked alone so that an error names it."""
    params = SamplingParams()
    for name in OURS:
        value = data.get(name, DEFAULTS.get(name))
        try:
            if isinstance(value, dict) and name != "logit_bias":  # which would do as a list of its keys
                raise ValueError(f"{name} must not be an object")
            if isinstance(value, (dict, list)):
                integer(f"the number of items in {name}", len(value), 0, STOPS if name == "stop" else ITEMS)
            if name == "seed" and type(value) is int and -(2**63) <= value < 0:
                value += 2**64  # the interface's seeds have a sign
            if name == "logprobs" and value is not None:
                integer("logprobs", value, 0, LOGPROBS)
            params = params.over({OURS[name]: value})
        except ValueError as error:
            raise RefusedError(str(error).replace(OURS[name], name, 1), name) from None
    return params


def _seeded(params: SamplingParams) -> SamplingParams:
    """With the seed that a prompt gets, so that the answer can tell it."""
    fresh = params.temperature > 0 and params.seed is None
    return params.over({"seed": fresh_seed()}) if fresh else params


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(f"{name} must be true or false, not {short_repr(value)[:100]}", name)
    return bool(value)
