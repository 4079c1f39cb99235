"""`minigpt info`: a model's configuration, size, tokenizer and files. Downloads no weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def run(args: argparse.Namespace) -> None:
    from minigpt.errors import TokenizerError
    from minigpt.files import checkpoint
    from minigpt.files.locate import locate, own_folder
    from minigpt.files.reading import has_weights
    from minigpt.files.tensors import parameter_counts
    from minigpt.loading import load_tokenizer

    folder = locate(args.model, revision=args.revision, offline=args.offline, progress=True, weights=False)
    config = checkpoint.read_config(folder)
    files: dict[str, Any] = {"files": []}
    if has_weights(folder) or folder == own_folder(args.model):  # else the cache holds a model without its weights
        checkpoint.check(folder, config)
        files = checkpoint.describe(folder)
    counts = parameter_counts(config)
    cache = 2 * 4 * config.n_layer * config.n_positions * config.n_embd  # keys and values in float32
    try:
        tokenizer = load_tokenizer(folder).origin
    except TokenizerError as error:
        tokenizer = f"none ({error})"
    if args.json:
        record = {"model": args.model, "folder": str(folder), "config": config.to_dict(), "parameters": counts, **files}
        print(json.dumps({**record, "tokenizer": tokenizer, "bytes_full_context": cache}), flush=True)
        return
    total = sum(counts.values())
    print(f"model     {args.model}\nfolder    {folder}\ntokenizer {tokenizer}\n")
    for name, value in asdict(config).items():
        print(f"{name:32} {value}")
    print("\nparameters")
    for name, count in counts.items():
        tied = "  (tied to the embeddings)" if name == "head" and config.tie_word_embeddings else ""
        print(f"  {name:12} {count:>15,} {count / total:>7.1%}{tied}")
    print(f"  {'total':12} {total:>15,}\n")
    _print_files(files)
    print(f"\nmemory in float32: {4 * total / 2**20:,.1f} MiB of weights, and")
    print(f"{cache / 2**20:,.1f} MiB of keys and values for a full context of {config.n_positions} tokens")


def _print_files(files: dict[str, Any]) -> None:
    if not files["files"]:
        print("the weights are not here, and info downloads none")
        return
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in files["dtypes"].items())
    print(f"{files['tensors']} tensors ({dtypes}), {files['bytes']:,} bytes")
    for file in files["files"]:
        print(f"  {file['name']}  {file['bytes']:,} bytes  sha256 {file['sha256']}")
    if files["left_out"]:
        print(f"  left out, as they belong to other heads: {', '.join(files['left_out'])}")
