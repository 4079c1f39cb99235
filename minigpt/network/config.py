"""GPT2Config: the shape of a model, checked. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from minigpt.checks import integer, number

ACTIVATION_NAMES = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "tanh")

# Hugging Face accepts these names for the same fields (GPT2Config.attribute_map).
_ALIASES = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions"}
_ALIASES |= {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}

# Settings that change the numbers and that this engine does not implement.
_REFUSED = ("add_cross_attention", "pruned_heads", "quantization_config")
_FLAGS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "tie_word_embeddings")

# The largest sizes. The causal mask has n_positions^2 bytes, and twice that while it is made: 512 MiB here.
_SIZES = {"n_positions": 2**14, **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head", "n_inner"), 2**31 - 1)}
_NUMBERS = {"resid_pdrop": 1.0, "embd_pdrop": 1, "attn_pdrop": 1}  # and the largest
_NUMBERS |= {"layer_norm_epsilon": math.inf, "initializer_range": math.inf}


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
        for name, most in _SIZES.items():
            if name != "n_inner" or self.n_inner is not None:
                self._set(name, integer(name, getattr(self, name), 1, most))
        for name, high in _NUMBERS.items():
            self._set(name, number(name, getattr(self, name), 0, high))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.activation_function not in ACTIVATION_NAMES:
            known = ", ".join(ACTIVATION_NAMES)
            raise ValueError(f"activation_function must be one of {known}, not {self.activation_function!r}")
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
