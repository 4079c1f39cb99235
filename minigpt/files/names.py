"""Every name of a tensor: the official ones with their shapes, and those that other programs put around them."""

from __future__ import annotations

import re

from minigpt.network.config import GPT2Config

# OpenAI's Conv1D keeps its weight as (in, out), torch's Linear as (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Wrappers put names before those of the body: torch.compile, DataParallel, transformers, PEFT, TRL.
_PREFIX = re.compile(r"^(module\.|transformer\.|base_model\.model\.|pretrained_model\.)+")
_MASK = re.compile(r"\.attn\.(masked_)?bias$")  # not attn.c_attn.bias, which is a parameter
_OTHER_HEAD = re.compile(r"^(score|classifier|multiple_choice_head|qa_outputs|v_head)\.")


def plain(stored: str) -> str:
    """A stored tensor's name without the prefixes of wrappers."""
    return _PREFIX.sub("", stored.replace("_orig_mod.", ""))


def is_mask(name: str) -> bool:
    """Whether it is a causal mask, which older files hold."""
    return bool(_MASK.search(name))


def is_other_head(name: str) -> bool:
    """Whether it belongs to a head for another task, beside the language model."""
    return bool(_OTHER_HEAD.match(name))


def shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the official layout with its shape, (in, out) for the weights in TRANSPOSED."""
    E, inner = config.n_embd, config.inner_dim
    block = {
        "ln_1.weight": (E,),
        "ln_1.bias": (E,),
        "attn.c_attn.weight": (E, 3 * E),
        "attn.c_attn.bias": (3 * E,),
        "attn.c_proj.weight": (E, E),
        "attn.c_proj.bias": (E,),
        "ln_2.weight": (E,),
        "ln_2.bias": (E,),
        "mlp.c_fc.weight": (E, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, E),
        "mlp.c_proj.bias": (E,),
    }
    return {
        "wte.weight": (config.vocab_size, E),
        "wpe.weight": (config.n_positions, E),
        **{f"h.{layer}.{name}": shape for layer in range(config.n_layer) for name, shape in block.items()},
        "ln_f.weight": (E,),
        "ln_f.bias": (E,),
        **({} if config.tie_word_embeddings else {"lm_head.weight": (config.vocab_size, E)}),
    }
