"""`python -m minigpt`."""

import _signal as signal  # type: ignore[import-not-found]  # signal itself takes a while to import: see start
import os


def start() -> None:
    """The command `minigpt`: ends quietly on Ctrl-C and SIGTERM from here on, and at once when its work is done.

    Python's own shutdown takes a quarter of a second with torch, and handles no signals.
    """
    # Read by PyTorch, once: Linux then keeps weights and cache in pages of 2 MB. Measured on a virtual machine (Zen 5):
    # a step takes 2 to 11 % less time, loading from 0.15 s less to 0.15 s more.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    from minigpt.cli import main

    code = main()
    try:
        print(end="", flush=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    start()
