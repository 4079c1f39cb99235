"""scripts/convert_nanogpt.py against a network written out as nanoGPT's is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import minigpt

ROOT = Path(__file__).resolve().parents[2]
ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 65, "dropout": 0.1}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def state(bias: bool, **changes: int) -> dict[str, torch.Tensor]:
    """Random weights under nanoGPT's names, in Linear's (out, in) layout."""
    E, shapes = 16, {}
    for layer in range(2):
        here = f"transformer.h.{layer}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{here}{norm}.weight": (E,), f"{here}{norm}.bias": (E,)}
        for name, out, inner in (
            ("attn.c_attn", 48, E),
            ("attn.c_proj", E, E),
            ("mlp.c_fc", 64, E),
            ("mlp.c_proj", E, 64),
        ):
            shapes |= {f"{here}{name}.weight": (out, inner), f"{here}{name}.bias": (out,)}
    shapes |= {"transformer.wte.weight": ({**ARGS, **changes}["vocab_size"], E), "transformer.wpe.weight": (8, E)}
    shapes |= {"transformer.ln_f.weight": (E,), "transformer.ln_f.bias": (E,)}
    weights = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items() if bias or not name.endswith(".bias")}
    return {**weights, "lm_head.weight": weights["transformer.wte.weight"]}


def logits(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """nanoGPT's forward pass, with the exact GELU."""
    get = {name.removeprefix("transformer."): value for name, value in weights.items()}.get

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (16,), get(f"{name}.weight"), get(f"{name}.bias"))

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, get(f"{name}.weight"), get(f"{name}.bias"))

    x = get("wte.weight")[IDS] + get("wpe.weight")[: IDS.shape[1]]
    for layer in range(2):
        q, k, v = (
            part.view(1, -1, 2, 8).transpose(1, 2)
            for part in linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(16, dim=2)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, -1, 16)
        x = x + linear(heads, f"h.{layer}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")), f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ get("wte.weight").T


def convert(*args: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "scripts" / "convert_nanogpt.py", *map(str, args)], text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_same_logits(tmp_path: Path, bias: bool, compiled: bool) -> None:
    weights = state(bias)
    stored = {f"_orig_mod.{name}" if compiled else name: value for name, value in weights.items()}
    data = {"model": stored, "model_args": {**ARGS, "bias": bias}, "iter_num": 7, "best_val_loss": torch.tensor(1.5)}
    torch.save({**data, "optimizer": {"state": {}}, "config": {"device": "cuda"}}, tmp_path / "ckpt.pt")
    # The folder itself says what to do, in the words of the command that does it.
    with pytest.raises(minigpt.CheckpointError, match=r"ckpt\.pt.*scripts/convert_nanogpt\.py") as caught:
        minigpt.load(tmp_path, device="cpu")
    assert str(caught.value).endswith(f"convert_nanogpt.py {tmp_path}/ckpt.pt {tmp_path}-safetensors")
    run = convert(tmp_path / "ckpt.pt", tmp_path / "new")
    assert (run.returncode, run.stderr) == (0, "")
    lm = minigpt.load(tmp_path / "new", device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(lm.model(IDS), logits(weights), rtol=0, atol=1e-5)  # measured: 1e-6
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    assert lm.limits.end_ids == ()  # 65 characters have no end of text


@pytest.mark.slow
def test_a_padded_vocabulary_stays_and_has_gpt2s_tokens(tmp_path: Path) -> None:
    torch.save(
        {"model": state(True, vocab_size=50304), "model_args": {**ARGS, "vocab_size": 50304}}, tmp_path / "ckpt.pt"
    )
    assert convert(tmp_path / "ckpt.pt", tmp_path / "new").returncode == 0
    lm = minigpt.load(tmp_path / "new", device="cpu")
    assert lm.config.vocab_size == 50304 and lm.tokenizer.encode("hello world") == [31373, 995]


@pytest.mark.slow
def test_errors_are_a_sentence(tmp_path: Path) -> None:
    whole = state(True)

    def said(content: Any) -> str:
        path = tmp_path / "ckpt.pt"
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        run = convert(path, tmp_path / "new")
        assert run.returncode == 1 and not (tmp_path / "new").exists()
        assert run.stderr.startswith("convert_nanogpt.py: error: ") and run.stderr.count("\n") == 1, run.stderr
        return run.stderr

    assert "cannot be read: No such file" in convert(tmp_path / "none.pt", tmp_path / "new").stderr
    assert "not a ckpt.pt of nanoGPT" in said({"weights": whole})
    assert "is not a ckpt.pt" in said(b"half a file")
    assert "holds more than weights" in said({"model": whole, "model_args": ARGS, "code": Path})
    assert "does not fit its model_args: h.0.attn.c_attn.bias" in said({"model": state(False), "model_args": ARGS})
    assert "n_embd" in said({"model": whole, "model_args": {**ARGS, "n_embd": 17}})
    torch.save({"model": whole, "model_args": ARGS}, tmp_path / "ckpt.pt")
    assert "holds a model already" in convert(tmp_path / "ckpt.pt", tmp_path).stderr
