"""Looking inside: attention patterns, what kinds of heads there are, what each is worth, and the lens. Numbers only.

Shapes: L blocks, H heads, T tokens, E embed_dim, V vocabulary. A pattern's row p is how much the token at position p
attends to each position q <= p; it sums to 1.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt import scoring
from minigpt.errors import CheckpointError, PromptError
from minigpt.network.config import GPT2Config
from minigpt.network.linear import Linear
from minigpt.network.model import GPT2, Record, undisturbed
from minigpt.network.products import Packed

Module = TypeVar("Module", bound=nn.Module)


def without_heads(model: GPT2, heads: Iterable[tuple[int, int]]) -> GPT2:
    """The model with heads, (layer, head) pairs, switched off: their columns of W_O are zero.

    It shares every tensor and every packed product with `model`, but for W_O of the layers named: a change within a
    shared weight is seen in both. W_O, the modules and their hooks are those that `model` has now: a hook set later
    runs on the one it was set on.
    Raises ValueError for a head that does not exist, and for a model whose own methods or W_O were replaced.
    """
    chosen: dict[int, set[int]] = defaultdict(set)
    for layer, head in heads:
        if not (0 <= layer < model.config.n_layer and 0 <= head < model.config.n_head):
            raise ValueError(f"the model has no head {layer}.{head}")
        chosen[layer].add(head)
    ablated = _sharing(model)
    for layer, off in chosen.items():
        attention: Any = ablated.h[layer].attn
        D, projection = attention.head_dim, attention.c_proj
        if type(projection) not in (Linear, nn.Linear):
            raise ValueError(f"no head can be switched off: W_O of block {layer} is {type(projection).__name__} now")
        weight = projection.weight
        with torch.inference_mode(False), torch.no_grad():
            zeroed = weight.clone()  # (E, H*D)
            for head in off:
                zeroed[:, head * D : (head + 1) * D] = 0
            projection.weight = nn.Parameter(zeroed, requires_grad=weight.requires_grad)
        if getattr(projection, "packed", None) is not None:
            projection.packed = Packed(projection.packed.dtype)
    return ablated


def _sharing(module: Module) -> Module:
    """A copy of the module and of those in it, with the same tensors, products and hooks."""
    replaced = [name for name in vars(module) if callable(getattr(type(module), name, None))]
    if replaced:  # it may be bound to the original, and so to the original's W_O
        raise ValueError(f"no head can be switched off: {type(module).__name__}.{replaced[0]} was replaced")
    shared = copy.copy(module)
    vars(shared).update({name: value.copy() for name, value in vars(module).items() if isinstance(value, dict)})
    for name, child in module.named_children():
        shared.add_module(name, _sharing(child))
    return shared


def patterns(model: GPT2, ids: Sequence[int], ablate: Collection[tuple[int, int]] = ()) -> Tensor:
    """The attention weights of every head, [L,H,T,T] float32 on the CPU: [layer, head, p, q] is p's weight on q.

    ablate: (layer, head) pairs whose output is zeroed before W_O. Their own weights stay; what comes after changes.
    Raises PromptError for fewer than two tokens (there would be nothing to see) or more than the model's context, and
    CheckpointError for weights that are not finite.
    """
    if len(ids) < 2:
        raise PromptError(
            f"the text has {len(ids)} token{'s' * (not ids)}: attention needs at least two to choose from"
        )
    _check_length(model, ids)
    record = Record()
    L, H, T = model.config.n_layer, model.config.n_head, len(ids)
    with undisturbed(model):
        model.hidden(torch.tensor([list(ids)], device=model.wte.weight.device), record=record, ablate=ablate)
        weights = torch.empty(L, H, T, T)
        for layer in reversed(range(L)):
            weights[layer] = record.attentions.pop()[0]  # one at a time, so that they are never all here twice
    if not weights.sum().isfinite():  # weights are at least 0: nothing cancels
        raise CheckpointError("the attention weights hold NaN or infinity: the model's weights are damaged")
    return weights


def named_heads(config: GPT2Config, names: Iterable[str]) -> list[tuple[int, int]]:
    """Heads named "layer.head" as pairs; ValueError for a name that the model does not have."""
    heads = []
    for name in [names] if isinstance(names, str) else names:
        match = re.fullmatch(r"(\d+)\.(\d+)", name) if isinstance(name, str) else None  # 4.10 is not "4.10"
        if not match or int(match[1]) >= config.n_layer or int(match[2]) >= config.n_head:
            last = f"{config.n_layer - 1}.{config.n_head - 1}"
            raise ValueError(f"ablate names heads as layer.head, from 0.0 to {last}, not {name!r}")
        heads.append((int(match[1]), int(match[2])))
    return heads


def _check_length(model: GPT2, ids: Sequence[int]) -> None:
    if len(ids) > model.config.n_positions:
        raise PromptError(f"the text has {len(ids)} tokens, but the model's context is {model.config.n_positions}")


def role_targets(ids: Sequence[int]) -> dict[str, Tensor]:
    """For each role, the positions that such a head attends to: [T,T] bool, True at [p, q] if p should look at q.

    previous: q = p - 1.    current: q = p.    first: q = 0, the attention sink.
    duplicate: any earlier q with the same token as p.
    induction: any q < p that follows an earlier occurrence of p's token: what came next the last time.
    The row p = 0 has no choice, so it counts for no role.
    """
    tokens = torch.tensor(list(ids))
    T = len(tokens)
    before = torch.ones(T, T, dtype=torch.bool).tril(-1)  # q < p
    same = (tokens[:, None] == tokens) & before
    first = torch.zeros(T, T, dtype=torch.bool)
    first[1:, 0] = True
    current = torch.eye(T, dtype=torch.bool)
    current[0, 0] = False
    previous = before & ~before.tril(-2)
    return {
        "previous": previous,
        "current": current,
        "first": first,
        "duplicate": same,
        "induction": F.pad(same, (1, 0))[:, :-1] & before,  # same[p, q - 1]
    }


def head_roles(weights: Tensor, ids: Sequence[int]) -> dict[str, Tensor]:
    """How much each head plays each role: attention weights [L,H,T,T] and their token ids -> {role: [L,H]}, 0 to 1.

        score = mean over the rows p that have a target of (sum over p's targets q of A[p, q])

    with the targets of `role_targets`. A role without any target in this text scores NaN: duplicate and induction
    need a token that comes again.

    Sources. previous, current and first are the detectors of ARENA (https://github.com/callummcdougall/ARENA_3.0,
    chapter 1.2), here without row 0. duplicate: Wang et al., https://arxiv.org/abs/2211.00593. induction: the prefix
    matching score of Olsson et al., https://arxiv.org/abs/2209.11895. On a random sequence that comes twice they are
    the mean diagonals of TransformerLens' Exploratory_Analysis_Demo, whose induction diagonal starts one row earlier.
    """
    scores = {}
    for role, target in role_targets(ids).items():
        rows = target.any(-1).sum()
        # (L, H, T*T) @ (T*T) -> (L, H); 0 / 0 is NaN
        scores[role] = weights.flatten(2) @ target.flatten().to(weights.dtype) / rows
    return scores


def repeated_random(candidates: Sequence[int], n_positions: int, seed: int = 0) -> list[int]:
    """Up to 100 different ids drawn at random from `candidates`, twice in a row: text that nobody has learned.

    Whatever a head does in the second half it does by looking back. The global random state is not touched.
    Raises PromptError if the context or the candidates leave no room for two tokens twice.
    """
    length = min(100, n_positions // 2, len(candidates))
    if length < 2:
        raise PromptError("a repeated random sequence needs two tokens and a context of at least four")
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:length]
    return [candidates[at] for at in order.tolist()] * 2


def ablation_losses(
    model: GPT2, ids: Sequence[int], heads: Iterable[tuple[int, int]], ablate: Collection[tuple[int, int]] = ()
) -> Iterator[tuple[int, int, float]]:
    """What heads are worth: (layer, head, increase of the text's mean loss in nats when it is ablated).

    heads: (layer, head) pairs, each one forward pass and yielded when that is done.
    ablate: heads that are off all the while.
    Raises PromptError, at the first one, for fewer than two tokens or more than the context.
    """
    if len(ids) < 2:
        raise PromptError(f"the text has {len(ids)} token{'s' * (not ids)}: there is no loss with fewer than two")
    _check_length(model, ids)

    def loss(*without: tuple[int, int]) -> float:
        with undisturbed(model):  # not around the loop: between two heads the caller's own settings hold
            logprobs = scoring.log_probabilities(without_heads(model, [*ablate, *without]), ids)
        return -sum(logprobs) / len(logprobs)

    plain = loss()
    for layer, head in heads:
        yield layer, head, loss((layer, head)) - plain


@dataclass(frozen=True)
class Lens:
    """The residual stream from block to block: stage 0 is the embeddings, stage n what block n - 1 leaves.

    norms: Euclidean length at every position, [L+1, T].
    logits: what the head would predict after the last token from each stage, [L+1, V]; the last are the model's own.
    """

    norms: Tensor
    logits: Tensor


def lens(model: GPT2, ids: Sequence[int], ablate: Collection[tuple[int, int]] = ()) -> Lens:
    """Each stage's residual x as a prediction: head(ln_f(x)), in float32 on the CPU.

    Source: the logit lens, https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens.
    Raises PromptError for an empty text, or more tokens than the model's context.
    """
    if not ids:
        raise PromptError("the text is empty: the lens needs at least one token")
    _check_length(model, ids)
    record = Record(weights=False)
    with undisturbed(model):
        model.hidden(torch.tensor([list(ids)], device=model.wte.weight.device), record=record, ablate=ablate)
        residuals = torch.cat(record.residuals)  # (L+1, T, E)
        logits = model.head(model.ln_f(residuals[:, -1]))
        return Lens(residuals.float().norm(dim=-1).cpu(), logits.float().cpu())
