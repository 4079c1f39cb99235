"""The command line: arguments in, text or JSON lines out. Everything else lives in the library.

Exit codes: 0; 1 a problem with the model, the prompt, a file or the device; 2 usage, or a parameter that is refused;
130 Ctrl-C; 143 SIGTERM. A reader that closes the pipe ends the run quietly.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from minigpt.cli.machine import _on_signal, _Stopped, note, one_line
from minigpt.cli.parser import make_parser
from minigpt.errors import MiniGPTError

if TYPE_CHECKING:
    pass


class _Closed(io.TextIOBase):
    """Standard output where the caller closed it: what would be lost is an error."""

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "it is closed", "standard output")
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Usage errors and --help raise SystemExit, as argparse does."""
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:  # closed: print would take standard output for it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" in its place
    args = make_parser().parse_args(argv)
    # Nothing here needs numpy, and PyTorch warns where it is missing.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        with _on_signal(_leave):
            import_module(f"minigpt.cli.{args.command}").run(args)
            print(end="", flush=True)
        return 0
    except _Stopped as stopped:
        return 128 + int(stopped.args[0])
    except BrokenPipeError:
        # Python flushes stdout again at exit: give it somewhere to write.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MiniGPTError as error:
        return _fail(1, str(error))
    except ValueError as error:
        return _fail(2, str(error))
    except MemoryError:
        return _fail(1, "out of memory: use a smaller model or a smaller batch")
    except ImportError as error:
        return _fail(1, f"{error}: the installation is broken, or there is too little memory to load it")
    except OSError as error:
        return _fail(1, f"{error.filename or 'output'}: {error.strerror or error}")
    except RuntimeError as error:
        # PyTorch has no class of its own for a failed allocation on the CPU.
        if not re.search("out of memory|allocate memory|not enough memory", str(error)):
            raise
        return _fail(1, "out of memory: use a smaller model or a smaller batch")


def _fail(code: int, message: str) -> int:
    note(f"minigpt: error: {one_line(message)}")
    return code


def _leave(number: int, _: object) -> None:
    """While loading there is nothing to keep; but a download unwinds, so that it removes what has come so far."""
    hub = sys.modules.get("minigpt.hub")
    if hub is not None and hub.downloading:
        raise _Stopped(number)
    os._exit(128 + number)
