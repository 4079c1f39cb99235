"""GPT-2, readable from top to bottom: MultiHeadAttention, MLP, Block, GPT2. No files, no sampling.

Shapes: B batch, T new tokens, S cached + new tokens, E embed_dim, H heads, D head_dim, L blocks, V vocabulary.
Names are those of the Hugging Face checkpoints (whose c_attn, c_proj and c_fc weights are stored transposed). Skip two
files at first: cache.py, the keys and values of earlier tokens; linear.py, torch.nn's layers but for their speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.errors import PromptError
from minigpt.network.cache import KVCache
from minigpt.network.config import GPT2Config
from minigpt.network.linear import ACTIVATIONS, Dropout, Embedding, Linear


def causal_mask(max_len: int, device: torch.device | str | None = None) -> Tensor:
    """[max_len, max_len] bool, lower triangular: row p is True where a token at position p may look."""
    return torch.tril(torch.ones(max_len, max_len, dtype=torch.bool, device=device))


def visible_keys(mask: Tensor, T: int, cache: KVCache | None = None) -> Tensor | None:
    """The rows of the causal mask at T new positions: [T,S]; [B,1,T,S] if rows differ in length; None: all True."""
    past = 0 if cache is None else max(cache.lengths)
    if past + T > len(mask):
        raise PromptError(f"{past + T} tokens are more than the {len(mask)} that this attention was made for")
    if cache is not None and cache.start is None:
        return cache.visible(mask, T)
    return None if T == 1 else mask[past : past + T, : past + T]  # a single token is the last


def split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, ...]:
    """The output of c_attn, [B,T,3*H*D], as each head's queries, keys and values: 3 x [B,H,T,D]."""
    B, T, width = qkv.shape
    parts = qkv.view(B, T, 3 * n_head, width // (3 * n_head))  # (B, T, 3*H*D) -> (B, T, 3*H, D)
    return torch.split(parts.transpose(1, 2), n_head, dim=1)  # (B, 3*H, T, D) -> 3 x (B, H, T, D)


def attention_weights(
    q: Tensor, k: Tensor, visible: Tensor | None, scale: float, dropout: float = 0.0, upcast: bool = False
) -> Tensor:
    """softmax(Q K^T * scale + mask), [B,H,T,S]: each row sums to 1 (until dropout, in training)."""
    keys = k.transpose(-2, -1)  # (B, H, S, D) -> (B, H, D, S)
    dtype, q, keys = q.dtype, q.float() if upcast else q, keys.float() if upcast else keys
    if visible is not None and visible.is_floating_point():  # 0 or -inf, [B,H,T,S], from CUDA graphs: one operator
        parts = (part.flatten(0, 1) for part in (visible, q, keys))  # (B, H, ...) -> (B*H, ...)
        scores = torch.baddbmm(*parts, alpha=scale).view_as(visible)
    else:
        scores = q @ keys * scale  # (B, H, T, S)
        scores = scores if visible is None else scores.masked_fill(~visible, float("-inf"))
    weights = F.softmax(scores, dim=-1).to(dtype)
    return F.dropout(weights, dropout) if dropout else weights


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, dropout: float = 0.0, upcast: bool = False
) -> Tensor:
    """softmax(Q K^T * scale + mask) V, [B,H,T,D], mostly by PyTorch's fused attention, which holds no weights."""
    # It takes the scores in the dtype of q and k. For one query, on a CPU, the formula is up to 1.4 times as fast.
    T = q.shape[2]
    if T == 1 or (upcast and q.dtype != torch.float32):
        return attention_weights(q, k, visible, scale, dropout, upcast) @ v  # (B, H, T, S) @ (B, H, S, D)
    # is_causal aligns its triangle at the top left, which is right only where no token came before.
    square = visible is not None and visible.dim() == 2 and q.shape == k.shape
    if q.is_cuda and not square:
        return attention_weights(q, k, visible, scale, dropout) @ v
    if q.is_cuda:  # cuDNN plans for each new shape, 0.1 s and more: it meets multiples of 64, the padding hidden
        q, k, v = (F.pad(x, (0, 0, 0, -T % 64)) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True, scale=scale)[:, :, :T]
    return F.scaled_dot_product_attention(q, k, v, None if square else visible, dropout, is_causal=square, scale=scale)


def join_heads(heads: Tensor) -> Tensor:
    """The heads' outputs side by side: [B,H,T,D] -> [B,T,H*D]."""
    return heads.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H, D) -> (B, T, H*D)


class MultiHeadAttention(nn.Module):
    """Masked multi-head self-attention ("Attention Is All You Need", https://arxiv.org/abs/1706.03762, section 3.2).

        head_i = softmax(Q_i K_i^T * scale + causal mask) V_i          output = concat(head_1 ... head_H) W_O

    embed_dim: E.    n_head: H.    head_dim: D, by default E / H; H * D need not be E.
    max_len: the longest sequence, cached tokens included.    bias: whether c_attn and c_proj have one.
    attention_dropout, output_dropout: probabilities, active only in train().
    scale: factor on the scores, by default 1 / sqrt(D).    upcast: scores and softmax are float32 in any case.
    """

    mask: Tensor

    def __init__(
        self,
        embed_dim: int,
        n_head: int,
        head_dim: int | None = None,
        max_len: int = 1024,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
        upcast: bool = False,
    ) -> None:
        super().__init__()
        if head_dim is None and embed_dim % n_head:
            raise ValueError(f"embed_dim ({embed_dim}) must be a multiple of n_head ({n_head}), or give head_dim")
        head_dim = head_dim or embed_dim // n_head
        self.n_head, self.head_dim, self.upcast, self.attention_dropout = n_head, head_dim, upcast, attention_dropout
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.c_attn = Linear(embed_dim, 3 * n_head * head_dim, bias=bias)  # W_Q, W_K and W_V side by side
        self.c_proj = Linear(n_head * head_dim, embed_dim, bias=bias)  # W_O
        self.output_dropout = Dropout(output_dropout)
        self.register_buffer("mask", causal_mask(max_len), persistent=False)

    def forward(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """[B,T,E] -> [B,T,E]; with a cache, the new tokens also attend to block `layer`'s earlier ones."""
        q, k, v = split_heads(self.c_attn(x), self.n_head)  # (B, T, 3*H*D) -> 3 x (B, H, T, D)
        visible = visible_keys(self.mask, x.shape[1], cache)  # (T, S): row p is what position p may see
        if cache is not None:
            k, v = cache.update(layer, k, v)  # (B, H, S, D), the earlier tokens first
        dropout = self.training * self.attention_dropout
        heads = attend(q, k, v, visible, self.scale, dropout, self.upcast)  # (B, H, T, D)
        return self.output_dropout(self.c_proj(join_heads(heads)))  # (B, T, H*D) -> W_O -> (B, T, E)

    def written_out(self, x: Tensor, cache: KVCache | None = None, layer: int = 0) -> tuple[Tensor, Tensor]:
        """The reference for `forward`, never fused: [B,T,E] -> [B,T,E] and the attention weights [B,H,T,S]."""
        q, k, v = split_heads(self.c_attn(x), self.n_head)
        visible = visible_keys(self.mask, x.shape[1], cache)
        if cache is not None:
            k, v = cache.update(layer, k, v)
        weights = attention_weights(q, k, visible, self.scale, self.training * self.attention_dropout, self.upcast)
        return self.output_dropout(self.c_proj(join_heads(weights @ v))), weights


class MLP(nn.Module):
    """Two linear layers with the activation between them, the same at every position."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, config.inner_dim)
        self.c_proj = Linear(config.inner_dim, config.n_embd)
        self.activation = ACTIVATIONS[config.activation_function]
        self.dropout = Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,E] -> [B,T,E]."""
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


@dataclass
class Record:
    """What `GPT2.hidden` collects on request."""

    attentions: list[Tensor] = field(default_factory=list)  # each block's attention weights, [B,H,T,S]
    residuals: list[Tensor] = field(default_factory=list)  # [B,T,E], L + 1: the embeddings, then after each block
    weights: bool = True  # False leaves the attention fused, and collects no attentions


class Block(nn.Module):
    """One decoder block: attention, then the MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        scale = 1 / math.sqrt(config.n_embd // config.n_head) if config.scale_attn_weights else 1.0
        scale /= layer + 1 if config.scale_attn_by_inverse_layer_idx else 1
        self.layer = layer
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        rates, upcast = (config.attn_pdrop, config.resid_pdrop), config.reorder_and_upcast_attn
        sizes = config.n_embd, config.n_head, None, config.n_positions
        self.attn = MultiHeadAttention(*sizes, *rates, scale=scale, upcast=upcast)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None, record: Record | None = None) -> Tensor:
        """[B,T,E] -> [B,T,E]."""
        if record is None or not record.weights:
            x = x + self.attn(self.ln_1(x), cache, self.layer)
        else:
            out, weights = self.attn.written_out(self.ln_1(x), cache, self.layer)
            record.attentions.append(weights)
            x = x + out
        x = x + self.mlp(self.ln_2(x))
        if record is not None:
            record.residuals.append(x)
        return x


class GPT2(nn.Module):
    """The decoder: token and position embeddings, L blocks, a final LayerNorm, and the output head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.dropout = Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.make_masks()
        self.reset_parameters()

    def make_masks(self, device: torch.device | str | None = None) -> None:
        """(Re)create the causal mask on `device`, one tensor for all blocks: it is in no checkpoint."""
        mask = causal_mask(self.config.n_positions, device or self.wte.weight.device)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                module.mask = mask

    def reset_parameters(self) -> None:
        """As in section 2.3 of "Language Models are Unsupervised Multitask Learners" (2019) and its released code."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # 2L layers add to the residual stream: their sum is to be as large as one
                summed = 2 * self.config.n_layer if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=self.config.initializer_range / math.sqrt(summed))

    def positions(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """The positions of token ids [B,T], after those in the cache: [T] or [B,T]. Raises as `hidden` does."""
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            found = f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise PromptError(f"token ids must be a tensor [B,T] of int64 or int32, not {found}")
        B, T = ids.shape
        if cache is not None and len(cache.lengths) != B:
            raise ValueError(f"the cache has {len(cache.lengths)} rows, but the ids have {B}")
        if (total := T + (max(cache.lengths) if cache is not None else 0)) > self.config.n_positions:
            raise PromptError(f"{total} tokens are more than the model's {self.config.n_positions} positions")
        return torch.arange(T, device=ids.device) if cache is None else cache.indices(T)[1]

    def hidden(self, ids: Tensor, cache: KVCache | None = None, *, record: Record | None = None) -> Tensor:
        """Token ids [B,T] -> hidden states [B,T,E] after the final LayerNorm.

        cache: earlier tokens. The new ones take the positions after them and are added to it.
        record: collects attention weights (the attention is then written out, not fused) and residuals.
        Raises PromptError for other shapes and dtypes, too many tokens and, on the CPU alone, ids out of range.
        """
        positions = self.positions(ids, cache)
        try:
            x = self.dropout(self.wte(ids) + self.wpe(positions))  # (B, T, E)
        except IndexError:  # on CUDA, looking at the ids would make every call wait for the device
            raise PromptError(f"token ids go from 0 to {self.config.vocab_size - 1}, but one here does not") from None
        if record is not None:
            record.residuals.append(x)
        for block in self.h:
            x = block(x, cache, record)
        if cache is not None:
            cache.advance(ids.shape[1])
        out: Tensor = self.ln_f(x)
        return out

    @property
    def output(self) -> Embedding | Linear:
        """The layer that the logits come from: the token embeddings, where the head is tied to them."""
        return self.wte if self.config.tie_word_embeddings else self.lm_head

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [...,E] -> logits [...,V]."""
        return self.wte.logits(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden)

    def forward(self, ids: Tensor, cache: KVCache | None = None, *, last_only: bool = False) -> Tensor:
        """Token ids [B,T] -> logits [B,T,V]; with `last_only`, of the last position alone, [B,1,V]."""
        return self.head(self.hidden(ids, cache)[:, -1 if last_only else 0 :])


def has_hooks(model: GPT2) -> bool:
    """Whether a forward hook is to run on any of its modules: what does not call them must not be used then."""
    everywhere = vars(nn.modules.module)
    own = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return bool(own or everywhere["_global_forward_hooks"] or everywhere["_global_forward_pre_hooks"])


@contextmanager
def undisturbed(model: GPT2) -> Iterator[None]:
    """No dropout (the model stays in eval), gradients or autocast. Inference mode, which is more, generation adds."""
    if model.training:  # setting it takes as long as a tenth of a token
        model.eval()
    with torch.no_grad(), torch.autocast(model.wte.weight.device.type, enabled=False):
        yield
