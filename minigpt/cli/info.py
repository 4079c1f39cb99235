"""TODO."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
from minigpt.cli.machine import _print_json


def run(args: argparse.Namespace) -> None:
    from minigpt.files import checkpoint, locate

    folder = locate.locate(args.model, revision=args.revision, offline=args.offline, progress=True)
    config = checkpoint.read_config(folder)
    checkpoint.check(folder, config)
    counts = checkpoint.empty_model(config).parameter_counts()
    total = sum(counts.values())
    files = checkpoint.describe(folder)
    cache = 2 * 4 * config.n_layer * config.n_positions * config.n_embd  # keys and values in float32
    if args.json:
        record = {"model": args.model, "folder": str(folder), "config": config.to_dict(), "parameters": counts, **files}
        _print_json({**record, "bytes_full_context": cache})
        return
    print(f"model     {args.model}\nfolder    {folder}\n")
    for name, value in asdict(config).items():
        print(f"{name:32} {value}")
    print("\nparameters")
    for name, count in counts.items():
        tied = "  (tied to the embeddings)" if name == "head" and config.tie_word_embeddings else ""
        print(f"  {name:12} {count:>15,} {count / total:>7.1%}{tied}")
    print(f"  {'total':12} {total:>15,}")
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in files["dtypes"].items())
    print(f"\n{files['tensors']} tensors ({dtypes}), {files['bytes']:,} bytes")
    for file in files["files"]:
        print(f"  {file['name']}  {file['bytes']:,} bytes  sha256 {file['sha256']}")
    print(f"\nmemory in float32: {4 * total / 2**20:,.1f} MiB of weights, and")
    print(f"{cache / 2**20:,.1f} MiB of keys and values for a full context of {config.n_positions} tokens")
