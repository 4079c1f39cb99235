"""Convert a checkpoint of nanoGPT, ckpt.pt, into a folder that minigpt and transformers load.

    python scripts/convert_nanogpt.py out/ckpt.pt weights/mine

The file is a pickle: it is read with weights_only=True, which runs no code. nanoGPT's names are GPT-2's with Linear
layers in place of Conv1D, and minigpt's network has the same ones. A model trained with bias=False gets biases of zero,
which change nothing. A padded vocabulary (50304) is kept. A model over GPT-2's tokens gets GPT-2's tokenizer files;
one over its own (meta.pkl) none: it takes token ids.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

import minigpt
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.files.checkpoint import write_checkpoint
from minigpt.files.reading import WEIGHTS

SIZES = {"vocab_size": "vocab_size", "block_size": "n_positions", "n_layer": "n_layer", "n_head": "n_head"}
SIZES |= {"n_embd": "n_embd", "dropout": "resid_pdrop"}


def read(path: Path, activation: str) -> minigpt.GPT2:
    """The model in a ckpt.pt. Raises CheckpointError for a file that is not one."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        sizes, state = data["model_args"], data["model"]
        fields: dict[str, Any] = {ours: sizes[theirs] for theirs, ours in SIZES.items() if theirs in sizes}
        weights = {name.replace("_orig_mod.", "").removeprefix("module."): value for name, value in state.items()}
        weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path} is no ckpt.pt of nanoGPT, or holds more than weights: not opened") from None
    except (AttributeError, EOFError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a ckpt.pt of nanoGPT, or is damaged ({type(error).__name__})") from None
    dropout = fields.get("resid_pdrop", 0.0)
    fields |= {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, "activation_function": activation}
    if fields.get("vocab_size", 50304) < 50257:
        fields |= {"bos_token_id": None, "eos_token_id": None}
    try:
        with torch.device("cpu"):
            model = minigpt.GPT2(minigpt.GPT2Config(**{"vocab_size": 50304, **fields}))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return fill(path, model, weights, sizes.get("bias", True))


def fill(path: Path, model: minigpt.GPT2, weights: dict[str, Any], biased: bool) -> minigpt.GPT2:
    """`model` with these weights. Raises CheckpointError if they are others than it needs."""
    head = weights.pop("lm_head.weight", None)  # tied in nanoGPT: the same numbers twice
    weights = {name: value for name, value in weights.items() if not name.endswith(".attn.bias")}  # causal masks
    wanted = dict(model.named_parameters())
    if head is not None and not ("wte.weight" in weights and torch.equal(head, weights["wte.weight"])):
        raise CheckpointError(f"{path} has a head of its own, which nanoGPT's models do not")
    for name, parameter in wanted.items():
        if not biased and name.endswith(".bias"):
            weights[name] = torch.zeros_like(parameter)
    wrong = [*(wanted.keys() ^ weights.keys())]
    wrong += [name for name in wanted.keys() & weights.keys() if wanted[name].shape != weights[name].shape]
    if wrong:
        raise CheckpointError(f"{path} does not fit its model_args: {', '.join(sorted(wrong)[:5])}")
    model.load_state_dict(weights, strict=False)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="nanoGPT's file, such as out/ckpt.pt")
    parser.add_argument("folder", type=Path, help="where to write the model; must not hold one")
    help = "nanoGPT's GELU since June 2023 is the exact one, the default; before, as in GPT-2, it was gelu_new"
    parser.add_argument("--activation", default="gelu", choices=["gelu", "gelu_new"], help=help)
    args = parser.parse_args()
    try:
        model = read(args.checkpoint, args.activation)
        gpt2 = model.config.vocab_size >= 50257
        others = minigpt.Tokenizer.gpt2().files() if gpt2 else {}
        write_checkpoint(model, args.folder, torch.float32, others)
    except MiniGPTError as error:
        sys.exit(f"convert_nanogpt.py: error: {error}")
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()):,} parameters in {WEIGHTS}")


if __name__ == "__main__":
    main()
