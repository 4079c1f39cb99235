"""The command line: arguments in, text or JSON lines out. Everything else lives in the library.

Exit codes: 0; 1 a problem with the model, the prompt, a file or the device; 2 usage, or a parameter that is refused;
130 Ctrl-C; 143 SIGTERM. A reader that closes the pipe ends the run quietly.
"""

from __future__ import annotations

import os
import sys

# PyTorch has no class of its own for a failed allocation on the CPU.
_NO_ROOM = ("out of memory", "allocate memory", "not enough memory")


def end_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process quietly from here on, unless the caller ignores them (nohup).

    While a model is at work, or downloaded, they raise KeyboardInterrupt, as there is something to keep. At other times
    they end the process at once: the imports of large libraries can lose what a handler raises.
    """
    import _signal as signal  # type: ignore[import-not-found]  # signal itself takes longer to import

    def stop(number: int, _: object) -> None:
        for name, flag in (("minigpt.cli.machine", "at_work"), ("minigpt.files.hub", "downloading")):
            if getattr(sys.modules.get(name), flag, False):
                raise KeyboardInterrupt(number)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Usage errors and --help raise SystemExit, as argparse does."""
    import warnings
    from importlib import import_module

    from minigpt.cli import machine
    from minigpt.cli.parser import parse

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it: print would take stdout for a missing stderr
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" in its place
    args = parse(argv)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # PyTorch's; nothing here needs it
        warnings.showwarning = lambda message, *_: machine.note(str(message))
        try:
            try:
                import_module(f"minigpt.cli.{args.command}").run(args)
            finally:
                machine.at_work = False
                print(end="", flush=True)
        except BaseException as error:
            return _ended(error)
    return 0


def _ended(error: BaseException) -> int:
    """The exit code for what ended a command, and its message on stderr. What nobody expects is raised again."""
    from contextlib import suppress

    from minigpt.cli.machine import note
    from minigpt.errors import MiniGPTError

    code, message = 1, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 128 + int((error.args or (2,))[0])
    if isinstance(error, BrokenPipeError):
        with suppress(OSError, ValueError):  # Python flushes stdout again at exit: give it somewhere to write
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, ValueError) and not isinstance(error, MiniGPTError):
        code = 2
    elif isinstance(error, ImportError):
        message += ": the installation is broken, or there is too little memory to load it"
    elif isinstance(error, OSError):
        message = f"{error.filename or 'output'}: {error.strerror or error}"
    elif isinstance(error, MemoryError) or any(words in message for words in _NO_ROOM):
        message = "out of memory: use a smaller model or a smaller batch"
    elif not isinstance(error, MiniGPTError):
        raise error
    note(f"error: {message}")
    return code
