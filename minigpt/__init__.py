"""minigpt: a minimal GPT-2 inference engine. `lm = minigpt.load("gpt2"); print(lm.generate("Hello").text)`.

Names are resolved on first use (PEP 562), so that importing the package, and --help, never imports torch.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as in typing, whose import takes longer than all the rest before the command answers Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from minigpt.cache import KVCache
    from minigpt.checkpoint import save
    from minigpt.config import GPT2Config, SamplingParams
    from minigpt.errors import (
        CheckpointError,
        DeviceError,
        MiniGPTError,
        ModelNotFoundError,
        PromptError,
        TokenizerError,
    )
    from minigpt.generation import LanguageModel, load
    from minigpt.model import GPT2, MultiHeadAttention
    from minigpt.scoring import Score
    from minigpt.sequence import Completion, Step, TokenLogprob
    from minigpt.tokenizer import Tokenizer

__version__ = "0.1.0"

_MODULES = {
    "cache": ["KVCache"],
    "checkpoint": ["save"],
    "config": ["GPT2Config", "SamplingParams"],
    "errors": [
        "CheckpointError",
        "DeviceError",
        "MiniGPTError",
        "ModelNotFoundError",
        "PromptError",
        "TokenizerError",
    ],
    "generation": ["LanguageModel", "load"],
    "model": ["GPT2", "MultiHeadAttention"],
    "scoring": ["Score"],
    "sequence": ["Completion", "Step", "TokenLogprob"],
    "tokenizer": ["Tokenizer"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "GPT2",
    "CheckpointError",
    "Completion",
    "DeviceError",
    "GPT2Config",
    "KVCache",
    "LanguageModel",
    "MiniGPTError",
    "ModelNotFoundError",
    "MultiHeadAttention",
    "PromptError",
    "SamplingParams",
    "Score",
    "Step",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerError",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minigpt' has no attribute {name!r}")
    return getattr(import_module(f"minigpt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
