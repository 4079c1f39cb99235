"""Looking inside a model: patterns, roles of heads, what a head is worth, the lens. Numbers only.

Shapes: L blocks, H heads, T tokens, E embed_dim, V vocabulary. Row p of a pattern is how much the
token at position p attends to each position q <= p; it sums to 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt import scoring
from minigpt.errors import CheckpointError, PromptError
from minigpt.network.config import GPT2Config
from minigpt.network.linear import Linear
from minigpt.network.model import GPT2, Record, undisturbed
from minigpt.network.products import Packed, sharing

Head = tuple[int, int]  # layer, head


def named_heads(config: GPT2Config, names: Iterable[str]) -> list[Head]:
    """Heads named "layer.head" as pairs; ValueError for a name that the model does not have."""
    last, heads = f"{config.n_layer - 1}.{config.n_head - 1}", []
    for name in [names] if isinstance(names, str) else names:
        match = re.fullmatch(r"(\d+)\.(\d+)", name) if isinstance(name, str) else None  # 4.10 is not "4.10"
        if not match or int(match[1]) >= config.n_layer or int(match[2]) >= config.n_head:
            raise ValueError(f"ablate names heads as layer.head, from 0.0 to {last}, not {name!r}")
        heads.append((int(match[1]), int(match[2])))
    return heads


def without_heads(model: GPT2, heads: Iterable[Head]) -> GPT2:
    """The model with heads switched off: their columns of W_O are zero.

    It shares every tensor and every packed product with `model`, but for W_O of those layers: a
    change within a shared weight is seen in both. It has the hooks that `model` has now.
    Raises ValueError where a head does not exist, or a method or W_O was replaced.
    """
    try:
        ablated: GPT2 = sharing(model)
    except ValueError as error:
        raise ValueError(f"no head can be switched off: {error}") from None
    for layer, head in heads:
        if not (0 <= layer < model.config.n_layer and 0 <= head < model.config.n_head):
            raise ValueError(f"the model has no head {layer}.{head}")
        W_O = ablated.get_submodule(f"h.{layer}.attn.c_proj")
        if type(W_O) is not Linear:
            raise ValueError(f"no head can be switched off: W_O of block {layer} is {type(W_O).__name__} now")
        with torch.inference_mode(False), torch.no_grad():
            if W_O.weight is model.get_parameter(f"h.{layer}.attn.c_proj.weight"):
                W_O.weight = nn.Parameter(W_O.weight.clone(), W_O.weight.requires_grad)
                W_O.packed = Packed(W_O.packed.dtype) if W_O.packed else None
            W_O.weight.view(len(W_O.weight), model.config.n_head, -1)[:, head] = 0  # (E, H*D) -> (E, H, D)
    return ablated


def _batch(model: GPT2, ids: Sequence[int], least: int) -> Tensor:
    """The ids on the model's device, [1,T]; PromptError for too few or more than the context."""
    if not least <= len(ids) <= model.config.n_positions:
        raise PromptError(f"the text must have {least} to {model.config.n_positions} tokens, not {len(ids)}")
    return torch.tensor([list(ids)], device=model.wte.weight.device)


def patterns(model: GPT2, ids: Sequence[int]) -> Tensor:
    """The attention weights of every head, [L,H,T,T] float32 on the CPU: [..., p, q] is p's on q.

    Raises PromptError for fewer than two tokens or more than the context, CheckpointError for NaN.
    """
    L, H, T, record = model.config.n_layer, model.config.n_head, len(ids), Record()
    with undisturbed(model):
        model.hidden(_batch(model, ids, 2), record=record)
        weights = torch.empty(L, H, T, T, dtype=torch.float32, device="cpu")
        for layer in reversed(range(L)):  # one at a time, so that they are never all here twice
            weights[layer] = record.attentions.pop()[0]
    if not weights.sum().isfinite():  # weights are at least 0: nothing cancels
        raise CheckpointError("the attention weights hold NaN or infinity: the model's weights are damaged")
    return weights


def role_targets(ids: Sequence[int]) -> dict[str, Tensor]:
    """For each role, where such a head looks: [T,T] bool, True if position p should attend to q.

    previous: q = p - 1.    current: q = p.    first: q = 0, the attention sink.
    duplicate: any earlier q with p's token.    induction: any q < p that follows such a one.
    The row p = 0 has no choice, so it counts for no role.
    """
    tokens = torch.tensor(list(ids), dtype=torch.long, device="cpu")
    q = torch.arange(len(tokens), device="cpu")
    p = q[:, None]
    same = (tokens[:, None] == tokens) & (q < p)
    return {
        "previous": q == p - 1,
        "current": (q == p) & (p > 0),
        "first": (q == 0) & (p > 0),
        "duplicate": same,
        "induction": F.pad(same, (1, 0))[:, :-1] & (q < p),  # same[p, q - 1]
    }


def head_roles(weights: Tensor, ids: Sequence[int]) -> dict[str, Tensor]:
    """How much each head plays each role: weights [L,H,T,T] and their ids -> {role: [L,H]}, 0 to 1.

    A score is the mean, over the rows that have `role_targets`, of the weight on them; else NaN.
    Sources. previous, current, first: https://github.com/callummcdougall/ARENA_3.0, chapter 1.2, here
    without row 0. duplicate: https://arxiv.org/abs/2211.00593. induction: the prefix matching score
    of https://arxiv.org/abs/2209.11895. On a random sequence that comes twice they are the diagonals
    of TransformerLens' Exploratory_Analysis_Demo, whose induction diagonal starts one row earlier.
    """
    return {  # (L, H, T*T) @ (T*T) -> (L, H); 0 / 0 is NaN
        role: weights.flatten(2) @ target.flatten().to(weights) / target.any(-1).sum()
        for role, target in role_targets(ids).items()
    }


def repeated_random(candidates: Sequence[int], n_positions: int, seed: int = 0) -> list[int]:
    """Up to 100 different ids drawn from `candidates`, twice: a text that nobody has learned.

    Raises PromptError where there is no room for two tokens twice.
    """
    length = min(100, n_positions // 2, len(candidates))
    if length < 2:
        raise PromptError("a repeated random sequence needs two tokens and a context of at least four")
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator, device="cpu")[:length]
    return [candidates[at] for at in order.tolist()] * 2


def ablation_losses(model: GPT2, ids: Sequence[int], heads: Iterable[Head]) -> Iterator[tuple[int, int, float]]:
    """What heads are worth: (layer, head, how much the text's mean loss in nats rises without it).

    Raises PromptError, at the first one, for fewer than two tokens or more than the context.
    """
    _batch(model, ids, 2)

    def loss(model: GPT2) -> float:
        with undisturbed(model):  # not around the loop: between two heads the caller's own settings hold
            return -sum(scoring.log_probabilities(model, ids)) / (len(ids) - 1)

    plain = loss(model)
    for layer, head in heads:
        yield layer, head, loss(without_heads(model, [(layer, head)])) - plain


class Lens(NamedTuple):
    """The residual stream from block to block: stage 0 is the embeddings, n what block n - 1 leaves.

    norms: Euclidean length at every position, [L+1, T].
    logits: what the head predicts after the last token, [L+1, V]; the last are the model's own.
    """

    norms: Tensor
    logits: Tensor


def lens(model: GPT2, ids: Sequence[int]) -> Lens:
    """Each stage's residual x as a prediction, head(ln_f(x)), in float32 on the CPU.

    Source: https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens.
    Raises PromptError for an empty text, or more tokens than the model's context.
    """
    batch, record = _batch(model, ids, 1), Record(weights=False)
    with undisturbed(model):
        model.hidden(batch, record=record)
        residuals = torch.cat(record.residuals)  # (L+1, T, E)
        logits = model.head(model.ln_f(residuals[:, -1]))
        return Lens(residuals.float().norm(dim=-1).cpu(), logits.float().cpu())
