"""`python -m minigpt`."""

import _signal as signal  # type: ignore[import-not-found]  # signal itself takes a while to import: see start
import os
import sys


def start() -> int:
    """The command `minigpt`: ends quietly on Ctrl-C and SIGTERM while Python starts and while it shuts down, too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    from minigpt.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
