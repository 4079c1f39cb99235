"""`python -m minigpt`, and the command `minigpt`."""

import os

from minigpt.cli.main import end_on_signals, main


def start() -> None:
    end_on_signals()
    os._exit(main())  # Python's own shutdown takes a quarter of a second with torch


if __name__ == "__main__":
    start()
