"""Which files make a folder the folder of a model, and what to do about one that is nearly so. No torch: hub.py, which
must tell whether the cache holds a whole model, is imported where torch is not."""

from __future__ import annotations

import re
from pathlib import Path

from minigpt.errors import CheckpointError
from minigpt.files.reading import INDEX, PICKLES, TOKENIZER_FILES, WEIGHTS, cure, is_file, read_json


def is_model(folder: Path) -> bool:
    """Whether there is a model in this folder, or what somebody might take for one."""
    names = ("config.json", "adapter_config.json", "*.safetensors", *PICKLES, "checkpoint-*")
    return any(True for name in names for _ in folder.glob(name))


def weight_files(folder: Path) -> list[Path]:
    """The weight files to read: model.safetensors if it is there, else the shards that the index lists; nothing else.

    Raises CheckpointError if there are none, if a shard is missing, or if there are only pickles.
    """
    if is_file(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if is_file(folder / INDEX):
        files = [folder / name for name in shards(folder / INDEX)]
        missing = [path.name for path in files if not is_file(path)]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            names = ", ".join(missing[:5]) + more
            raise CheckpointError(f"{folder} lacks {names}, listed in {INDEX}: download it again")
        return files
    raise CheckpointError(f"{folder} has no {WEIGHTS}{almost(folder) or ': is this the folder of a model?'}")


def shards(index: Path) -> list[str]:
    """The names of the files that an index lists, which must lie beside it."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map that gives a file for each tensor: {cure(index)}")
    names = sorted(set(places.values()))
    for name in names:
        if re.search(r"[/\\:\0]", name) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} lists {name!r}: a shard must be a safetensors file in the same folder")
    return names


def almost(folder: Path) -> str:
    """Why a folder that lacks config.json or weights is not a model yet, and the cure; "" where nothing tells."""
    target = f"{folder}-safetensors"
    if (folder / "adapter_config.json").exists():
        return (
            ": it is a LoRA adapter, which needs its base model: merge the two, and load the result: "
            'python -c "from peft import AutoPeftModelForCausalLM as M; '
            f'M.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained({f"{folder}-merged"!r})"'
        )
    saved = [path for path in folder.glob("checkpoint-*") if (path / "config.json").exists()]
    if saved:
        newest = max(saved, key=lambda path: (len(path.name), path.name))
        return f", but {newest.name} inside has: did you mean {newest}?"
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles and not (folder / "config.json").exists() and pickles[0].endswith(".pt"):
        return (
            f", only {', '.join(pickles)}, a pickle, which can run code and is never opened. If it is nanoGPT's and "
            f"you trust it, convert it: python scripts/convert_nanogpt.py {folder / pickles[0]} {target}"
        )
    if pickles:
        tokenizer = (
            ""
            if not any((folder / name).exists() for name in TOKENIZER_FILES)
            else (
                f"; from transformers import AutoTokenizer as T; T.from_pretrained({str(folder)!r})"
                f".save_pretrained({target!r})"
            )
        )
        return (
            f", only {', '.join(pickles)}, a pickle, which can run code and is never opened. "
            'If you trust it, convert it: python -c "from transformers import GPT2LMHeadModel as M; '
            f'M.from_pretrained({str(folder)!r}).save_pretrained({target!r}){tokenizer}"'
        )
    return ""
