"""What GPT2Config and SamplingParams accept, what they refuse and how they say it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from minigpt.decoding.params import SamplingParams
from minigpt.network.config import ACTIVATION_NAMES, GPT2Config

# The model's shape.


def test_the_defaults_are_transformers_defaults() -> None:
    theirs = transformers.GPT2Config()
    for field in dataclasses.fields(GPT2Config):
        assert getattr(GPT2Config(), field.name) == getattr(theirs, field.name), field.name
    assert GPT2Config.from_dict({}) == GPT2Config()


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2"])
def test_official_configs(golden: Path, name: str) -> None:
    data = json.loads((golden / "configs" / f"{name}.config.json").read_text())
    config = GPT2Config.from_dict(data)
    for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon", "eos_token_id"):
        assert getattr(config, key) == data[key], key
    assert config.inner_dim == 4 * data["n_embd"]


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(),
        GPT2Config(vocab_size=101, n_positions=513, n_embd=24, n_layer=3, n_head=4, n_inner=50),
        GPT2Config(activation_function="gelu", tie_word_embeddings=False, scale_attn_weights=False),
        GPT2Config(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, layer_norm_epsilon=1e-3),
        GPT2Config(eos_token_id=[50256, 198], bos_token_id=None, resid_pdrop=0, embd_pdrop=0.5, attn_pdrop=1),
        GPT2Config(eos_token_id=None, initializer_range=0.1),
        GPT2Config(eos_token_id=(), bos_token_id=-1),
    ],
)
def test_to_dict_is_what_transformers_reads(config: GPT2Config) -> None:
    """A tuple of end ids was refused by transformers, which wants a list."""
    data = config.to_dict()
    direct = transformers.GPT2Config(**data)
    loaded = transformers.GPT2Config.from_dict(json.loads(json.dumps(data)))
    for theirs in (direct, loaded):
        assert theirs.architectures == ["GPT2LMHeadModel"] and theirs.model_type == "gpt2"
        for field in dataclasses.fields(GPT2Config):
            ours = getattr(config, field.name)
            assert getattr(theirs, field.name) == (list(ours) if isinstance(ours, tuple) else ours), field.name
        assert GPT2Config.from_dict(json.loads(theirs.to_json_string(use_diff=False))) == config
    assert GPT2Config.from_dict(json.loads(json.dumps(data))) == config


def test_from_dict_reads_aliases_and_ignores_what_has_no_effect() -> None:
    data = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 99,
        "n_head": 2, "n_ctx": 5, "summary_type": "cls_index", "use_cache": False, "task_specific_params": {"a": [1]},
        "add_cross_attention": False, "pruned_heads": {}, "quantization_config": None,
    }  # fmt: skip
    before = copy.deepcopy(data)
    assert GPT2Config.from_dict(data) == GPT2Config(n_embd=32, n_layer=3, n_head=2, n_positions=99)
    assert data == before


@pytest.mark.parametrize(
    "data, words",
    [
        ({"model_type": "gpt_neo"}, ["model_type", "'gpt_neo'"]),
        ({"model_type": None}, ["model_type", "None"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"pruned_heads": {"0": [1]}}, ["pruned_heads"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"n_embd": 768, "hidden_size": 64}, ["n_embd", "768", "hidden_size", "64"]),
        ({"n_layer": 2, "num_hidden_layers": 3}, ["n_layer", "num_hidden_layers"]),
        ({"hidden_size": "768"}, ["n_embd", "'768'"]),
    ],
)
def test_from_dict_refuses(data: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        GPT2Config.from_dict(data)
    assert all(word in str(error.value) for word in words), error.value


SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
RATES = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
FLAGS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "tie_word_embeddings")
NOT_INTEGERS = ["12", 12.0, 12.5, True, [12], [[12]], {}, math.nan, torch.tensor(12.5), np.array([1, 2])]
NOT_NUMBERS = ["0.5", b"0.5", True, [0.5], {}, 1j, math.nan, math.inf, -math.inf, 10**400, torch.ones(2)]


def refused(make: Any, name: str, value: Any) -> None:
    """`make(name=value)` is a ValueError that says the name and the value."""
    with pytest.raises(ValueError) as error:
        make(**{name: value})
    message = str(error.value)
    assert name in message and repr(value) in message and "\n" not in message.replace(repr(value), "")


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    for value in [*NOT_INTEGERS, None, 0, -1, 2**31, 10**30]:
        refused(GPT2Config, name, value)
    value = 768 * 2
    others = {"n_embd": value} if name == "n_head" else {}
    config = GPT2Config(**{name: np.int64(value)}, **others)
    assert getattr(config, name) == value and type(getattr(config, name)) is int


def test_widths() -> None:
    for value in [*NOT_INTEGERS, 0, -1, 2**31]:
        refused(GPT2Config, "n_inner", value)
    assert GPT2Config(n_inner=5).inner_dim == 5
    with pytest.raises(ValueError, match=r"n_embd \(10\).*n_head \(3\)"):
        GPT2Config(n_embd=10, n_head=3)


@pytest.mark.parametrize("name", [*RATES, "layer_norm_epsilon", "initializer_range"])
def test_rates(name: str) -> None:
    for value in [*NOT_NUMBERS, None, -0.1, *([1.5] if name in RATES else [])]:
        refused(GPT2Config, name, value)
    for value in (0, 1, 0.5, np.float32(0.5), Decimal("0.5")):
        config = GPT2Config(**{name: value})
        assert getattr(config, name) == value and type(getattr(config, name)) is float


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    for value in ("true", 1, 0, None, [], 1.0):
        refused(GPT2Config, name, value)
    assert [getattr(GPT2Config(**{name: value}), name) for value in (True, False)] == [True, False]


def test_activations() -> None:
    for value in ("swish", "GELU", None, 3, ["gelu"], [["gelu"]]):
        refused(GPT2Config, "activation_function", value)
    assert [GPT2Config(activation_function=name).activation_function for name in ACTIVATION_NAMES] == list(
        ACTIVATION_NAMES
    )


def test_special_ids() -> None:
    for value in ("50256", 1.0, True, {}):
        refused(GPT2Config, "bos_token_id", value)
        refused(GPT2Config, "eos_token_id", value)
    for value, item in ((["3"], "'3'"), ([1, None], "None"), ([[1]], "[1]"), ([True], "True")):
        with pytest.raises(ValueError) as error:
            GPT2Config(eos_token_id=value)
        assert "eos_token_id" in str(error.value) and item in str(error.value)
    for value, expected in ((None, None), (5, 5), ([5, 6], (5, 6)), ((), ()), (-1, -1), ([np.int32(3)], (3,))):
        config = GPT2Config(eos_token_id=value)
        assert config.eos_token_id == expected
        assert hash(config) == hash(GPT2Config(eos_token_id=expected))


def test_configs_are_frozen() -> None:
    for thing, name in ((GPT2Config(), "n_embd"), (SamplingParams(), "top_k")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, 1)
        assert pickle.loads(pickle.dumps(thing)) == thing == copy.deepcopy(thing)


# How to decode.


@pytest.mark.parametrize(
    "name, low",
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", 0),
        ("no_repeat_ngram_size", 0),
        ("top_k", 0),
        ("samples", 1),
        ("logprobs", 0),
        ("seed", 0),
    ],
)
def test_counts(name: str, low: int) -> None:
    """--top-k 40.0 and true are slips, not counts."""
    for value in [*NOT_INTEGERS, low - 1, -5]:
        refused(SamplingParams, name, value)
    for value in (low, 7, np.int64(7), 10**15):
        params = SamplingParams(**{name: value})
        assert getattr(params, name) == value and type(getattr(params, name)) is int


def test_off_by_none() -> None:
    """Services pass optional fields on: None is "not given", and the value beneath stays."""
    every = {field.name: None for field in dataclasses.fields(SamplingParams)}
    assert SamplingParams(**every) == SamplingParams()
    base = SamplingParams(top_k=5, stop="a", stop_ids=[3], seed=1, logit_bias={1: 2}, max_seconds=9, temperature=0.5)
    assert base.over(every) == base
    assert base.over({"stop_ids": "model"}).stop_ids is None and base.over({"stop_ids": ()}).stop_ids == ()


def test_params_are_hashable() -> None:
    one, other = (SamplingParams(stop=["a"], logit_bias={1: 2.0}, top_k=3) for _ in range(2))
    assert one == other and hash(one) == hash(other) and len({one, other, SamplingParams()}) == 2


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_tokens", "max_new_tokens"),
        ("max_length", "max_new_tokens"),
        ("n", "samples"),
        ("num_return_sequences", "samples"),
        ("best_of", "samples"),
        ("do_sample", "temperature"),
        ("eos_token_id", "stop_ids"),
        ("random_seed", "seed"),
        ("top_logprobs", "logprobs"),
        ("temprature", "temperature"),
        ("repetition_penality", "repetition_penalty"),
        ("top-p", "top_p"),
    ],
)
def test_names_from_elsewhere_are_told_ours(wrong: str, right: str) -> None:
    for make in (SamplingParams, lambda **given: SamplingParams().over(given)):
        with pytest.raises(TypeError, match=rf"'{wrong}' is not an option of generate: did you mean {right}\?"):
            make(**{wrong: 1})
    with pytest.raises(TypeError, match=r"'colour' is not an option of generate$"):
        SamplingParams(colour=1)  # nothing is near


def test_seeds() -> None:
    for seed in (0, 2**32, 2**63, 2**64 - 1):
        assert SamplingParams(seed=seed).seed == seed
    refused(SamplingParams, "seed", 2**64)


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("temperature", [0, 0.0, 0.7, 1, 1e-8, 1e-40, 100], [-1, -1e-9]),
        ("top_p", [0, 1e-8, 0.9, 1, 1.0], [-0.1, 1.5, 1.0000001]),
        ("min_p", [0, 0.05, 1], [-0.1, 1.5]),
        ("max_seconds", [0, 0.5, 60], [-1]),
        ("repetition_penalty", [0.5, 1, 1.2, 5.0, 1000], [0, 0.0, -1]),
    ],
)
def test_numbers(name: str, good: list[float], bad: list[float]) -> None:
    for value in [*bad, *NOT_NUMBERS]:
        refused(SamplingParams, name, value)
    for value in good:
        params = SamplingParams(**{name: value})
        assert getattr(params, name) == value and type(getattr(params, name)) is float


def test_logit_bias() -> None:
    bias = {5: 1, np.int64(6): np.float32(0.5), "7": -100}
    params = SamplingParams(logit_bias=bias)
    assert params.logit_bias == {5: 1.0, 6: 0.5, 7: -100.0}  # the keys of a JSON object are text
    assert all(type(key) is int and type(value) is float for key, value in params.logit_bias.items())
    bias[5] = 99
    assert params.logit_bias[5] == 1.0  # a copy
    for value in ([(5, 1.0)], "5=1", 5):
        refused(SamplingParams, "logit_bias", value)
    for key in (-1, "a", "-1", "1.5", 1.5, True, None, (1,)):
        with pytest.raises(ValueError) as error:
            SamplingParams(logit_bias={key: 1.0})
        assert "logit_bias" in str(error.value) and repr(key) in str(error.value)
    for item in NOT_NUMBERS:
        with pytest.raises(ValueError) as error:
            SamplingParams(logit_bias={31: item})
        assert all(word in str(error.value) for word in ("logit_bias", "31", repr(item)))


@pytest.mark.parametrize("name", ["suppress_tokens", "stop_ids"])
def test_lists_of_ids(name: str) -> None:
    for value in ("12", b"12", 12, 1.5, object(), {}, {3: 1}):
        refused(SamplingParams, name, value)
    for item in (-1, "1", 1.5, True, None, [1]):
        with pytest.raises(ValueError) as error:
            SamplingParams(**{name: [3, item]})
        assert name in str(error.value) and repr(item) in str(error.value)
    for value in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), iter([1, 2])):
        assert getattr(SamplingParams(**{name: value}), name) == (1, 2)
    assert getattr(SamplingParams(**{name: []}), name) == ()


def test_stops() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=()).stop == ()
    # Text never holds lone surrogates, so such a stop would never be found.
    assert SamplingParams(stop=["\udbc0", "caf\udcc3\udca9", "\U0001f642"]).stop == (
        "\ufffd",
        "caf\u00e9",
        "\U0001f642",
    )
    for value in ("", [""], ["a", ""], [1], 1, {}, {"a": 1}, b"ab", [b"ab"], [["a"]]):
        refused(SamplingParams, "stop", value)


def test_overflow() -> None:
    assert SamplingParams(overflow="slide").overflow == "slide"
    for value in ("Stop", "", 1, ["stop"]):
        refused(SamplingParams, "overflow", value)


def test_replace_validates_again_and_unknown_names_are_type_errors() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2}, suppress_tokens=[3])
    assert dataclasses.replace(params) == params
    assert dataclasses.replace(params, top_p=0.5).top_p == 0.5
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2)
    with pytest.raises(TypeError, match="top_q"):
        dataclasses.replace(params, top_q=1)


def test_the_module_does_not_import_torch() -> None:
    """--help and a usage error must not wait for torch."""
    code = "import sys, minigpt.decoding.params, minigpt.network.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


def test_a_context_whose_mask_would_fill_the_memory_is_refused() -> None:
    GPT2Config(n_positions=16384)
    with pytest.raises(ValueError, match="n_positions must be from 1 to 16384, not 200000"):
        GPT2Config(n_positions=200000)


def test_a_message_copes_with_any_value() -> None:
    with pytest.raises(ValueError, match=r"top_k must be at least 0, not a number of 33220 bits"):
        SamplingParams(top_k=-(10**10000))
    with pytest.raises(ValueError, match="temperature must be a finite number") as caught:
        SamplingParams(temperature="x" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 600
