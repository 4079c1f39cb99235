"""TODO."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from minigpt.checks import without_surrogates
from minigpt.errors import MiniGPTError

if TYPE_CHECKING:
    pass
from minigpt.cli.machine import _print_json


def run(args: argparse.Namespace) -> None:
    import torch

    from minigpt.network.device import _usable_threads
    from minigpt.parity.check import row, to_json
    from minigpt.parity.run import run as compare

    torch.set_num_threads(_usable_threads())
    checks = compare(
        args.model,
        prompts=[without_surrogates(text) for text in args.prompt],
        dtypes=args.dtype or ["float32"],
        device=args.device,
        revision=args.revision,
        offline=args.offline,
        progress=True,
    )
    done = []
    if not args.json:
        print(f"parity of {args.model}, torch {torch.__version__}")
    for check in checks:
        done.append(check)
        if not args.json:
            previous = done[-2] if len(done) > 1 else None
            print(row(check, previous), flush=True)
    passed, failed, skipped = (sum(check.passed is kind for check in done) for kind in (True, False, None))
    if args.json:
        record = {"model": args.model, "torch": torch.__version__, "passed": passed, "failed": failed}
        _print_json({**record, "skipped": skipped, "checks": [to_json(check) for check in done]})
    else:
        print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    if failed:
        names = [check.name for check in done if check.passed is False]
        more = f" and {failed - 3} more" if failed > 3 else ""
        raise MiniGPTError(f"parity fails for {args.model}: {'; '.join(names[:3])}{more}")
