"""MultiHeadAttention in training: dropout is active and unbiased, and every parameter gets a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minigpt import MultiHeadAttention


def attention(**options: float) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, max_len=8, **options).train()


@pytest.mark.parametrize("which", ["attention_dropout", "output_dropout"])
def test_dropout_is_active_only_in_training(which: str) -> None:
    module, x = attention(**{which: 0.5}), torch.randn(2, 8, 16)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    torch.testing.assert_close(module(x), attention()(x))  # the same weights, without dropout


@pytest.mark.parametrize("which", ["attention_dropout", "output_dropout"])
@pytest.mark.parametrize("path", ["fused", "written out"])
def test_dropout_keeps_the_expected_output(which: str, path: str) -> None:
    """Both paths scale what is left by 1 / (1 - p). The mean of 20,000 draws is within five standard errors."""
    module, x = attention(**{which: 0.3}), torch.randn(1, 4, 16)
    many = x.expand(20_000, -1, -1)
    with torch.no_grad():
        drawn = module(many) if path == "fused" else module.written_out(many)[0]
        expected = module.eval()(x)[0]
    error = 5 * drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - expected).abs() <= error + 1e-6).all()


@pytest.mark.parametrize("path", ["fused", "written out"])
def test_gradients_reach_every_parameter_and_no_later_token(path: str) -> None:
    module, x = attention(attention_dropout=0.1, output_dropout=0.1), torch.randn(2, 8, 16, requires_grad=True)
    out = module(x) if path == "fused" else module.written_out(x)[0]
    out[:, 3].square().sum().backward()
    # A bias of the keys moves all scores of a query alike, which softmax ignores: that third of c_attn.bias gets none.
    for name, parameter in module.named_parameters():
        grad = parameter.grad.chunk(3)[0::2] if name == "c_attn.bias" else (parameter.grad,)
        assert all(part.abs().sum() > 0 for part in grad), name
    assert (x.grad[:, :4].abs().sum(-1) > 0).all() and not x.grad[:, 4:].any()


def test_both_paths_have_the_same_gradients() -> None:
    """Measured: 1e-7 to 3e-7."""
    x, found = torch.randn(2, 8, 16), []
    for path in ("fused", "written out"):
        module = attention()
        out = module(x) if path == "fused" else module.written_out(x)[0]
        out.square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=5e-5)


def test_a_few_steps_of_training_fit_a_target() -> None:
    module, x = attention(output_dropout=0.0), torch.randn(8, 8, 16)
    target = x.cumsum(1) / torch.arange(1, 9)[:, None]  # the mean of what came before: uniform attention
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        loss = F.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
