"""`python -m minigpt`."""

import _signal as signal  # type: ignore[import-not-found]  # signal itself takes a while to import: see start
import os


def start() -> None:
    """The command `minigpt`: ends quietly on Ctrl-C and SIGTERM from here on, and at once when its work is done.

    Python's own shutdown takes a quarter of a second with torch, and handles no signals.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    from minigpt.cli.main import main

    code = main()
    try:
        print(end="", flush=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    start()
