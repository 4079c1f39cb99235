"""Write what Hugging Face transformers gives for a model, to compare minigpt with: minigpt parity --against FILE.

    python scripts/record_transformers.py weights/mine mine.json -p "A text of mine"

The file has the format of `minigpt parity --record`, and nothing of minigpt is imported to make it: the numbers are
another engine's, and the format is read a second time. Its first lines document it. MODEL is a folder, or the id of a
model in the local cache. The prompts are those of -p and --ids, else three texts, or ids where there is no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

TEXTS = ["The meaning of life is", "def fibonacci(n):\n    if n < 2:\n", "Ünïcödé: 東京 🙂, don't   stop"]
SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_k": 4, "seed": 0}]
ABOUT = ["Numbers of transformers, in the format that data/record.txt of minigpt documents."]
ABOUT += [
    "tolerances: those of minigpt in float32 (tests/README.md), as fractions of lengths and of the logits' spread."
]


def signs(size: int) -> Tensor:
    """[size,8] of -1 and 1, by a hash of the index."""
    x = torch.arange(1, size + 1)
    for _ in range(2):
        x = torch.bitwise_and(torch.bitwise_xor(x >> 16, x) * 73244475, 2**32 - 1)
    x = torch.bitwise_xor(x >> 16, x)
    return torch.stack([torch.where(torch.bitwise_and(x, 2**bit) > 0, -1.0, 1.0) for bit in range(8)], 1).double()


def projections(x: Tensor) -> list[float]:
    """Eight of a vector."""
    found: list[float] = (x.double() @ signs(len(x)) / math.sqrt(len(x))).tolist()
    return found


def module(name: str, rows: Tensor) -> dict[str, Any]:
    """The figures of a module's output, [T,W]."""
    rows = rows.double()
    lengths = rows.norm(dim=1).clamp_min(1e-6)
    even = rows / lengths[:, None] * math.sqrt(rows.shape[1])
    return {"layer": name, "length": lengths.log().mean().exp().item(), "projections": projections(even.flatten())}


def layers(model: Any, ids: list[int]) -> list[dict[str, Any]]:
    """Every module with parameters of its own, every block, and the attention weights."""
    found: list[dict[str, Any]] = []

    def hook(name: str) -> Any:
        def keep(module_: Any, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            found.append(module(name, output.reshape(-1, output.shape[-1])))
            if name.endswith("c_attn"):
                found.append({"layer": name.replace("c_attn", "weights")})  # to be filled in

        return keep

    body = model.transformer
    named = [(name, part) for name, part in body.named_modules() if name.count(".") == 1 or list(part._parameters)]
    handles = [part.register_forward_hook(hook(name)) for name, part in named if name]
    attentions = body(torch.tensor([ids[:64]]), output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    for line in found:
        if "length" not in line:
            line |= module(line["layer"], attentions[int(line["layer"].split(".")[1])].flatten(0, 2))
    return found


def logits(row: Tensor, at: int) -> dict[str, Any]:
    """The figures of one logit vector."""
    row, (values, best) = row.double(), row.double().topk(5)
    apart = row - row.mean()
    figures = {"lse": row.logsumexp(0).item(), "mean": row.mean().item(), "spread": apart.abs().max().item()}
    pairs = [[id, value] for id, value in zip(best.tolist(), values.tolist(), strict=True)]
    return {"at": at, **figures, "projections": projections(apart), "best": pairs}


def new(model: Any, ids: list[int], options: dict[str, Any], room: int) -> dict[str, Any]:
    """Ids that transformers draws, and by how much each was ahead."""
    seed = options.get("seed")
    given = {name: value for name, value in options.items() if name != "seed"}
    torch.manual_seed(seed or 0)
    inputs = torch.tensor([ids])
    settings = {"do_sample": seed is not None, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": room}
    config = transformers.GenerationConfig(**given, **settings, output_scores=True, return_dict_in_generate=True)
    model.generation_config = config  # in place of the end ids and the sampling that the model comes with
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs))
    margins, random, generator = [], {}, torch.Generator().manual_seed(seed or 0)
    for scores in out.scores:
        scores = scores[0].float()
        if seed is not None:
            q = torch.empty_like(scores).exponential_(1, generator=generator)
            random = random or {"random": [float(f"{x:.4g}") for x in q[:4].tolist()]}
            scores = scores.log_softmax(0) - q.log()
        best, second = scores.topk(2).values.tolist()
        margins.append(min(99.0, best - second))
    return {"options": options, **random, "new": out.sequences[0, len(ids) :].tolist(), "margins": margins}


@torch.no_grad()
def numbers(model: Any, ids: list[int]) -> list[dict[str, Any]]:
    """The lines of one prompt."""
    rows, room = model(torch.tensor([ids])).logits[0], model.config.n_positions - len(ids)
    lines = layers(model, ids) + [logits(rows[at], at) for at in range(0, len(ids), -(-len(ids) // 80))]
    if len(ids) > 1:
        loss = torch.nn.functional.cross_entropy(rows[:-1].double(), torch.tensor(ids[1:]))
        lines.append({"loss": loss.item()})
    return lines + [new(model, ids, options, min(16, room)) for options in OPTIONS if room > 0]


def tokenizer_of(name: str) -> tuple[Any, list[int] | None]:
    """The tokenizer, and the ids whose own text does not encode to that id alone; None without one."""
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None, None
    if not tokenizer.encode("a", add_special_tokens=False):  # what transformers makes of a folder without one
        return None, None
    ids = sorted({*tokenizer.get_vocab().values()})
    texts = tokenizer.batch_decode([[id] for id in ids], clean_up_tokenization_spaces=False)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return tokenizer, [id for id, found in zip(ids, encoded, strict=True) if found != [id]]


def record(name: str, texts: list[str], given: list[list[int]]) -> dict[str, Any]:
    """The whole record."""
    load = transformers.GPT2LMHeadModel.from_pretrained
    model = load(name, local_files_only=True, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer, tokens = tokenizer_of(name)
    if not texts and not given:
        texts, given = (TEXTS, []) if tokenizer else ([], [[id % model.config.vocab_size for id in range(3, 15, 2)]])
    size = model.config.n_positions
    prompts = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)[:size]} for text in texts]
    prompts += [{"text": None, "ids": ids} for ids in given]
    engine, machine = f"transformers {transformers.__version__}", platform.machine()
    return {
        "format": "minigpt parity record 1",
        "about": ABOUT,
        "made": {"engine": engine, "torch": torch.__version__, "machine": machine, "device": "cpu", "dtype": "float32"},
        "files": {},
        "model": {size: getattr(model.config, size) for size in SHAPE},
        "tolerances": {"layers": 1e-4, "logits": 4e-5},
        "tokens": tokens,
        "prompts": prompts,
        "numbers": [{"prompt": at, **line} for at, one in enumerate(prompts) for line in numbers(model, one["ids"])],
    }


def main(argv: list[str] | None = None) -> int:
    """Write the file; 1 where that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT")
    parser.add_argument("--ids", nargs="+", type=int, action="append", default=[], metavar="ID")
    args = parser.parse_args(argv)
    try:
        made = record(args.model, args.prompt, args.ids)
    except (OSError, ValueError) as error:
        print(f"{args.model}: {error}", file=sys.stderr)
        return 1

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        return (
            [*map(short, value)]
            if isinstance(value, list)
            else float(f"{value:.8g}")
            if type(value) is float
            else value
        )

    lines = {key: value for key, value in short(made).items()}
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items() if key != "numbers")
    numbers_ = ",\n".join(json.dumps(line) for line in lines["numbers"])
    args.file.write_text(f'{{\n{body},\n"numbers": [\n{numbers_}\n]\n}}\n', encoding="utf-8")
    print(f"{args.file}: {len(lines['numbers'])} results of {len(lines['prompts'])} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
