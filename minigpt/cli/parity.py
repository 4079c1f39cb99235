"""`minigpt parity`: a model's numbers against those published for it, and against transformers."""

from __future__ import annotations

import argparse
import json

from minigpt.checks import without_surrogates
from minigpt.errors import MiniGPTError


def run(args: argparse.Namespace) -> None:
    import torch

    from minigpt.network.device import usable_cpus
    from minigpt.parity.check import Check, row, to_json
    from minigpt.parity.run import run as compare

    torch.set_num_threads(usable_cpus())
    prompts = [without_surrogates(text) for text in args.prompt]
    places = {"device": args.device, "revision": args.revision, "offline": args.offline, "progress": True}
    done: list[Check] = []
    if not args.json:
        print(f"parity of {args.model}, torch {torch.__version__}")
    for check in compare(args.model, prompts=prompts, dtypes=args.dtype or ["float32"], **places):
        if not args.json:
            print(row(check, done[-1] if done else None), flush=True)
        done.append(check)
    passed, failed, skipped = (sum(check.passed is kind for check in done) for kind in (True, False, None))
    if args.json:
        record = {"model": args.model, "torch": torch.__version__, "passed": passed, "failed": failed}
        print(json.dumps({**record, "skipped": skipped, "checks": [to_json(check) for check in done]}), flush=True)
    else:
        print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    if failed:
        names = [check.name for check in done if check.passed is False]
        more = f" and {failed - 3} more" if failed > 3 else ""
        raise MiniGPTError(f"parity fails for {args.model}: {'; '.join(names[:3])}{more}")
