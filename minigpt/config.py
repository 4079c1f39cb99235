"""The two things a user configures: the model's shape (GPT2Config), how to decode (SamplingParams). No torch here."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "tanh")

# Hugging Face accepts these names for the same fields (GPT2Config.attribute_map).
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Settings that change the numbers and that this engine does not implement.
_REFUSED = ("add_cross_attention", "pruned_heads", "quantization_config")
# The largest size that a config may give: a larger one is a slip, not a model.
_MAX_SIZE = 2**31 - 1
_MAX_POSITIONS = 2**14  # the causal mask has n_positions^2 bytes, and twice that while it is made: 512 MiB here


def shown(value: Any) -> str:
    """`value` for a message: never too long, and never an error of its own (as a number of 5000 digits is)."""
    huge = isinstance(value, int) and value.bit_length() > 10_000
    return f"a number of {value.bit_length()} bits" if huge else repr(value)[:500]


def integer(name: str, value: Any, low: float, high: float = math.inf) -> int:
    """`value` as an int in [low, high], else a ValueError that names both."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # no floats, not even 3.0
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be an integer, not {shown(value)}")
    if not low <= number <= high:
        bound = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} must be {bound}, not {shown(value)}")
    return number


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a finite float in [low, high], else a ValueError that names both."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) or type(value).__name__ == "bool" else float(value)
    except (TypeError, ValueError, OverflowError):  # a list, an array of several numbers, 10**400
        number = math.nan
    if not math.isfinite(number) or not low <= number <= high:
        bound = f" from {low:g} to {high:g}" if high < math.inf else f" of at least {low:g}" if low > -math.inf else ""
        raise ValueError(f"{name} must be a finite number{bound}, not {shown(value)}")
    return number


def well_formed(text: str) -> str:
    """`text` without lone surrogates, which stand for the bytes of an argument that the locale could not decode.

    Those bytes are read as UTF-8, whatever the locale; what is not UTF-8 either becomes U+FFFD, as in the tokenizer.
    """
    try:
        return text.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # other lone surrogates, as arguments have them on Windows, and JSON anywhere
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2 model's shape, with Hugging Face's field names and defaults (the defaults are GPT-2 small).

    Raises ValueError, naming the field and the value, for anything that no GPT-2 can have.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # width of the MLP; None: 4 * n_embd
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            limit = _MAX_POSITIONS if name == "n_positions" else _MAX_SIZE
            self._set(name, integer(name, getattr(self, name), 1, limit))
        if self.n_inner is not None:
            self._set("n_inner", integer("n_inner", self.n_inner, 1, _MAX_SIZE))
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            self._set(name, number(name, getattr(self, name), 0, 1))
        self._set("initializer_range", number("initializer_range", self.initializer_range, 0))
        self._set("layer_norm_epsilon", number("layer_norm_epsilon", self.layer_norm_epsilon, 0))
        for name in (
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "tie_word_embeddings",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function must be one of {', '.join(ACTIVATIONS)}, not {self.activation_function!r}"
            )
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        if self.bos_token_id is not None:
            self._set("bos_token_id", integer("bos_token_id", self.bos_token_id, -math.inf))
        self._set("eos_token_id", _end_ids("eos_token_id", self.eos_token_id))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

    @property
    def inner_dim(self) -> int:
        """Width of the MLP's hidden layer: n_inner, or 4 * n_embd where it is not given."""
        return self.n_inner or 4 * self.n_embd

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GPT2Config:
        """The config that a config.json holds. Missing fields take the defaults; those without effect here are ignored.

        Raises ValueError for a field that would change the numbers in a way that this engine does not implement.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a config must map field names to values, not be {data!r}")
        if data.get("model_type", "gpt2") != "gpt2":
            raise ValueError(f"model_type is {data['model_type']!r}: only 'gpt2' models can be loaded")
        for name in _REFUSED:
            if data.get(name):
                raise ValueError(f"{name} is set: models with it are not supported")
        values = dict(data)
        for alias, name in _ALIASES.items():
            if alias in values and values.setdefault(name, values[alias]) != values[alias]:
                raise ValueError(f"{name} is {values[name]!r} but {alias} is {values[alias]!r}: they mean the same")
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """What config.json should hold, so that Hugging Face transformers loads the same model."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **asdict(self),
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "n_ctx": self.n_positions,
        }


def _end_ids(name: str, value: Any) -> int | tuple[int, ...] | None:
    """An eos_token_id as config files write it: an id, a list, or null. Any integer: some write -1 for none."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(integer(name, item, -math.inf) for item in value)
    return integer(name, value, -math.inf)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each next token. The defaults are greedy decoding of 50 tokens.

    max_new_tokens: the most tokens to draw, the prompt not counted; 0 draws none.
    min_new_tokens: end ids are barred until this many are drawn.
    temperature: 0 is greedy; above 0 samples from softmax(logits / temperature).
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probabilities reach p, in [0, 1]; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1].
    repetition_penalty: above 1 makes tokens already in the prompt or the output less likely; 1 is off.
    no_repeat_ngram_size: no n-gram of this size occurs twice, the prompt included; 0 is off.
    logit_bias: {token id: value added to its logit}.
    suppress_tokens: ids that are never drawn.
    stop: text(s) at which to stop; the text before it is kept. One str is accepted.
    stop_ids: ids at which to stop; None is the model's own end id(s), () is none.
    seed: makes sampling repeatable, in [0, 2^64); None is a fresh one, which the result reports.
    samples: completions per prompt; sample j uses seed + j.
    logprobs: None is off; 0 gives each drawn token's log-probability, k also those of the k best tokens.
    overflow: at the context limit "stop", or "slide": keep the last half of the context and go on.

    Raises ValueError, naming the parameter and the value.
    """

    max_new_tokens: int = 50
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    seed: int | None = None
    samples: int = 1
    logprobs: int | None = None
    overflow: str = "stop"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

        for name in ("max_new_tokens", "min_new_tokens", "no_repeat_ngram_size"):
            put(name, integer(name, getattr(self, name), 0))
        put("top_k", 0 if self.top_k is None else integer("top_k", self.top_k, 0))
        put("samples", integer("samples", self.samples, 1))
        if self.logprobs is not None:
            put("logprobs", integer("logprobs", self.logprobs, 0))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, 2**64 - 1))
        put("temperature", number("temperature", self.temperature, 0))
        put("top_p", number("top_p", self.top_p, 0, 1))
        put("min_p", number("min_p", self.min_p, 0, 1))
        put("repetition_penalty", number("repetition_penalty", self.repetition_penalty))
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, not {self.repetition_penalty!r}")
        put("logit_bias", _bias(self.logit_bias))
        put("suppress_tokens", _ids("suppress_tokens", self.suppress_tokens))
        put("stop", _texts(self.stop))
        if self.stop_ids is not None:
            put("stop_ids", _ids("stop_ids", self.stop_ids))
        if self.overflow not in ("stop", "slide"):
            raise ValueError(f"overflow must be 'stop' or 'slide', not {self.overflow!r}")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(integer(f"each id in {name}", item, 0) for item in value)


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must be a non-empty string or a list of them, not {value!r}")
    return tuple(map(well_formed, texts))


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias = {}
    for key, item in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON has no other keys than text
        bias[integer("each id in logit_bias", token, 0)] = number(f"logit_bias of id {key}", item)
    return bias
