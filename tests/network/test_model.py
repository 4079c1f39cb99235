"""The attention and the decoder against the articles' arithmetic, PyTorch's fused attention and transformers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES
from tiny import TINY, from_hf, hf_model

from minigpt import GPT2, GPT2Config, KVCache, MultiHeadAttention, PromptError
from minigpt.files.tensors import parameter_counts
from minigpt.network.model import Record

OFFICIAL = {
    "gpt2": ((768, 12, 12), 124_439_808),
    "gpt2-medium": ((1024, 16, 24), 354_823_168),
    "gpt2-large": ((1280, 20, 36), 774_030_080),
    "gpt2-xl": ((1600, 25, 48), 1_557_611_200),
}


def config(**overrides: object) -> GPT2Config:
    return GPT2Config(**{**TINY, **overrides})


def attention(seed: int = 0, **options: object) -> MultiHeadAttention:
    """An attention of width 24 with every parameter random."""
    torch.manual_seed(seed)
    module = MultiHeadAttention(**{"embed_dim": 24, "n_head": 3, "max_len": 32, **options}).eval()  # type: ignore[arg-type]
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3)
    return module


def cache_for(module: MultiHeadAttention, rows: int) -> KVCache:
    """A one-block cache that fits the attention (made for its heads, whatever its embed_dim)."""
    width = module.n_head * module.head_dim
    return KVCache(GPT2Config(n_embd=width, n_head=module.n_head, n_layer=1, n_positions=32), rows)


# The attention


@pytest.mark.parametrize("options", [{}, {"head_dim": 5}, {"head_dim": 16, "bias": False}, {"scale": 0.7}])
@pytest.mark.parametrize("past, new", [(0, 10), (9, 1), (6, 4)], ids=["square", "one on a cache", "four on a cache"])
@torch.no_grad()
def test_written_out_and_fused_attention_agree(options: dict[str, object], past: int, new: int) -> None:
    module = attention(**options)
    x = torch.randn(2, past + new, 24)
    whole, _ = module.written_out(x)
    fused, written = cache_for(module, 2), cache_for(module, 2)
    for cache in (fused, written):
        if past:
            module(x[:, :past], cache)
            cache.advance(past)
    out = module(x[:, past:], fused)
    reference, weights = module.written_out(x[:, past:], written)
    assert weights.shape == (2, 3, new, past + new)
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    assert (out - reference).abs().max() < 1e-5  # measured: 2e-6
    assert (out - whole[:, past:]).abs().max() < 1e-5  # a cached call gives what the whole sequence gives


@torch.no_grad()
def test_fused_c_attn_is_three_separate_projections() -> None:
    """The articles' W_Q, W_K, W_V, W_O and scaled_dot_product_attention, against the one c_attn of GPT-2."""
    module = attention(bias=False)
    H, D = module.n_head, module.head_dim
    x = torch.randn(2, 10, 24)
    W_q, W_k, W_v = module.c_attn.weight.split(H * D)
    q, k, v = (F.linear(x, W).view(2, 10, H, D).transpose(1, 2) for W in (W_q, W_k, W_v))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = F.linear(heads.transpose(1, 2).reshape(2, 10, H * D), module.c_proj.weight)
    assert (module(x) - expected).abs().max() < 1e-5  # measured: 0


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    module = attention()
    x = torch.randn(1, 10, 24)
    before = module(x)
    x[:, 6:] += 1
    after = module(x)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])
    _, weights = module.written_out(x)
    assert weights.triu(1).abs().max() == 0


def test_the_mask_is_a_buffer_but_not_in_the_state_dict() -> None:
    module = attention()
    assert torch.equal(dict(module.named_buffers())["mask"], torch.tril(torch.ones(32, 32, dtype=torch.bool)))
    assert "mask" not in module.state_dict()


def test_an_embed_dim_that_no_head_count_divides_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embed_dim \(10\) must be a multiple of n_head \(3\)"):
        MultiHeadAttention(10, 3)


@torch.no_grad()
def test_upcast_takes_scores_and_softmax_in_float32() -> None:
    """Visible in half precision only."""
    module, plain = (attention(upcast=flag).to(torch.bfloat16) for flag in (True, False))
    x = torch.randn(2, 12, 24).bfloat16()
    q, k, _ = (part.view(2, 12, 3, 8).transpose(1, 2) for part in module.c_attn(x).split(24, dim=-1))
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(8)
    expected = scores.masked_fill(~torch.tril(torch.ones(12, 12, dtype=torch.bool)), -math.inf).softmax(-1).bfloat16()
    out, weights = module.written_out(x)
    assert (weights - expected).abs().max() < 0.01  # a step of bfloat16; measured: 0
    assert not torch.equal(plain.written_out(x)[1], weights)
    assert torch.equal(module(x), out)


def test_more_tokens_than_max_len_are_refused_by_both_paths() -> None:
    module = attention(max_len=4)
    for call in (module.forward, module.written_out):
        with pytest.raises(PromptError, match="5 tokens are more than the 4 that this attention was made for"):
            call(torch.zeros(1, 5, 24))


def test_dropout_is_active_in_training_only_and_keeps_the_expectation() -> None:
    """Inverted dropout on the weights: E[dropout(A)] = A, so the mean output over many draws is the eval output."""
    module = attention(attention_dropout=0.2, bias=False)
    x = torch.randn(1, 8, 24)
    with torch.no_grad():
        expected = module(x)
        assert torch.equal(module(x), expected)
        module.train()
        draws = torch.stack([module(x) for _ in range(4000)])
        _, weights = module.written_out(x)
    assert not torch.equal(draws[0], draws[1])
    assert ((weights == 0).sum() > (torch.ones(8, 8).triu(1) == 1).sum() * 3).item()  # some visible weights dropped
    error = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(4000) + 1e-9)
    assert error.max() < 5  # standard errors; 192 values


def test_gradients_reach_every_parameter() -> None:
    module = attention(attention_dropout=0.1, output_dropout=0.1).train()
    module(torch.randn(2, 6, 24)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in module.parameters())


# Counts


@pytest.mark.parametrize("name", OFFICIAL)
def test_parameter_counts_of_the_official_sizes(name: str) -> None:
    (n_embd, n_head, n_layer), expected = OFFICIAL[name]
    with torch.device("meta"):
        model = GPT2(GPT2Config(n_embd=n_embd, n_head=n_head, n_layer=n_layer))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert sum(parameter_counts(model.config).values()) == expected


def test_the_attention_share_of_gpt2_small() -> None:
    """4 * 768^2 weights a block, as the article counts them, biases left out."""
    with torch.device("meta"):
        model = GPT2(GPT2Config())
    for block in model.h:
        assert block.attn.c_attn.weight.numel() + block.attn.c_proj.weight.numel() == 2_359_296
    biases = 12 * (3 * 768 + 768)
    assert parameter_counts(model.config)["attention"] - biases == 28_311_552


def test_initialisation_is_gpt2s() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=500, n_embd=96, n_head=4, n_layer=8))
    for name, parameter in model.named_parameters():
        if "ln_" in name or name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, float("ln_" in name and name.endswith("weight"))))
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert abs(parameter.std().item() / std - 1) < 0.05, name


# The whole model against transformers

VARIANTS = {
    "plain": {},
    "odd vocabulary": {"vocab_size": 131},
    "513 positions": {"n_positions": 513},
    "n_inner": {"n_inner": 40},
    "untied head": {"tie_word_embeddings": False},
    "no scaling": {"scale_attn_weights": False},
    "inverse layer scaling": {"scale_attn_by_inverse_layer_idx": True},
    "upcast": {"reorder_and_upcast_attn": True},
    "both": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "epsilon": {"layer_norm_epsilon": 1e-2},
    **{name: {"activation_function": name} for name in ("gelu_pytorch_tanh", "gelu", "relu", "silu", "tanh")},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers_at_every_position(name: str, device: str) -> None:
    reference = hf_model(**VARIANTS[name])
    model = from_hf(reference).to(device)
    ids = torch.randint(0, reference.config.vocab_size, (2, min(reference.config.n_positions, 100)))
    expected = reference(ids).logits
    assert (model(ids.to(device)).cpu() - expected).abs().max() < 5e-5  # of logits up to 15; measured: 3e-6


@torch.no_grad()
def test_the_variants_differ_visibly() -> None:
    """The test above can fail: each setting moves the logits by far more than its tolerance."""
    ids = torch.randint(0, 64, (2, 32))
    plain = hf_model()(ids).logits
    for name, overrides in VARIANTS.items():
        if name not in (
            "plain",
            "odd vocabulary",
            "513 positions",
            "n_inner",
            "untied head",
            "upcast",
            "gelu_pytorch_tanh",
        ):
            assert (hf_model(**overrides)(ids).logits - plain).abs().max() > 1e-3, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [[1] * 32, [31, 1], [1, 31], [7, 1, 1, 9, 14], [16, 16]], ids=str)
@torch.no_grad()
def test_any_split_over_a_cache_gives_the_logits_of_one_call(splits: list[int], device: str) -> None:
    model = from_hf(hf_model()).to(device)
    ids = torch.randint(0, 64, (3, 32), device=device)
    cache = KVCache(model.config, 3, device=device)
    parts = [model(part, cache) for part in ids.split(splits, dim=1)]
    assert (torch.cat(parts, dim=1) - model(ids)).abs().max() < 5e-5  # measured: 4e-6
    assert cache.lengths == [32, 32, 32]


@pytest.mark.parametrize(
    "dtype, tolerance",  # of logits up to 6; measured: 3e-6, 0.006, 0.05
    [(torch.float32, 5e-5), (torch.float16, 0.06), (torch.bfloat16, 0.5)],
)
@torch.no_grad()
def test_rows_of_different_lengths_give_what_each_gives_alone(dtype: torch.dtype, tolerance: float) -> None:
    """And what hides the padding is finite in every format, where -1e10 is not, and no weight is 0 / 0."""
    model = from_hf(hf_model()).to(dtype)
    ids = torch.randint(0, 64, (3, 32))
    cache = KVCache(model.config, 3, dtype=dtype)
    lengths = [1, 20, 7]
    for row, length in enumerate(lengths):
        model(ids[row : row + 1, :length], cache.row(row))
    assert cache.lengths == lengths
    for n_new in (1, 3):
        new = torch.stack([ids[row, at : at + n_new] for row, at in enumerate(cache.lengths)])
        starts = list(cache.lengths)
        logits = model(new, cache)
        for row, at in enumerate(starts):
            alone = model(ids[row : row + 1, : at + n_new])[0, at:]
            assert (logits[row] - alone).abs().max() < tolerance  # False for NaN


@torch.no_grad()
def test_recording_gives_the_attention_of_transformers_and_the_same_logits() -> None:
    reference = hf_model(attn_implementation="eager")
    model = from_hf(reference)
    ids = torch.randint(0, 64, (2, 12))
    theirs = reference(ids, output_attentions=True, output_hidden_states=True)
    record = Record()
    hidden = model.hidden(ids, record=record)
    assert (model.head(hidden) - model(ids)).abs().max() < 5e-5  # measured: 3e-6
    assert len(record.attentions) == 3
    for ours, expected in zip(record.attentions, theirs.attentions, strict=True):
        assert (ours - expected).abs().max() < 1e-5  # measured: 1e-6
    for ours, expected in zip(record.residuals[:3], theirs.hidden_states[:3], strict=True):
        assert (ours - expected).abs().max() < 1e-5


@torch.no_grad()
def test_last_only_projects_the_last_position_alone() -> None:
    model = from_hf(hf_model())
    ids = torch.randint(0, 64, (2, 12))
    last = model(ids, last_only=True)
    assert last.shape == (2, 1, 64)
    assert (last - model(ids)[:, -1:]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (torch.tensor([1, 2]), r"a tensor \[B,T\] of int64 or int32, not \[2\] of torch.int64"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"not \[1, 2, 3\] of torch.int64"),
        (torch.zeros(1, 2), r"not \[1, 2\] of torch.float32"),
        (torch.zeros(1, 2, dtype=torch.uint8), r"not \[1, 2\] of torch.uint8"),
        ([[1, 2]], "not list"),
        (torch.tensor([[64]]), "token ids go from 0 to 63"),
        (torch.tensor([[3, -1]]), "token ids go from 0 to 63"),
    ],
    ids=str,
)
@torch.no_grad()
def test_ids_that_are_none_are_one_sentence(ids: object, problem: str) -> None:
    """They were a ValueError of unpacking, a RuntimeError of embedding, and an IndexError."""
    cache = KVCache(config())
    for call in (GPT2(config()), lambda ids: GPT2(config())(ids, cache)):
        with pytest.raises(PromptError, match=problem):
            call(ids)
    assert cache.lengths == [0]


@torch.no_grad()
def test_int32_ids_are_ids() -> None:
    model = GPT2(config()).eval()
    assert torch.equal(model(torch.tensor([[3, 4]], dtype=torch.int32)), model(torch.tensor([[3, 4]])))


@torch.no_grad()
def test_the_mask_is_looked_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of L blocks copied the lengths of ragged rows to the device, and gathered the mask anew."""
    model, cache = GPT2(config()).eval(), KVCache(config(), 2)
    model(torch.tensor([[3]]), cache.row(0))
    made = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **more: made.append(args) or tensor(*args, **more))
    ids = tensor([[1, 2], [3, 4]])
    seen = {id(cache.visible(block.attn.mask, 2)) for block in model.h}
    model(ids, cache)
    assert len(seen) == 1 and len(made) == 1


@torch.no_grad()
def test_more_tokens_than_positions_is_a_prompt_error_naming_both() -> None:
    model = GPT2(config())
    with pytest.raises(PromptError, match="33 tokens are more than the model's 32 positions"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match="the cache has 3 rows, but the ids have 1"):
        model(torch.zeros(1, 5, dtype=torch.long), KVCache(model.config, 3))
    cache = KVCache(model.config, 1, max_len=4)
    with pytest.raises(PromptError, match="5 tokens do not fit a cache made for 4"):
        model(torch.zeros(1, 5, dtype=torch.long), cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_on_cuda_is_close_and_finite(dtype: torch.dtype) -> None:
    reference = hf_model()
    ids = torch.randint(0, 64, (2, 32))
    ours = from_hf(reference).to("cuda", dtype)(ids.cuda()).float().cpu()
    assert ours.isfinite().all()
    assert F.cosine_similarity(ours, reference(ids).logits, dim=-1).min() > 0.999
