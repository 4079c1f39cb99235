"""minigpt: a minimal GPT-2 inference engine. `lm = minigpt.load("gpt2"); print(lm.generate("Hello").text)`.

The public names and their homes are listed once, in __init__.pyi, for type checkers and for the code below: it imports
a name on its first use (PEP 562), so that importing the package, and --help, never imports torch.
"""

from __future__ import annotations

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(_homes())
    from importlib import import_module

    if name.startswith("_") or name not in (homes := _homes()):
        raise AttributeError(f"module 'minigpt' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(homes[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})


def _homes() -> dict[str, str]:
    """{public name: the module that defines it}, from the lines `from HOME import NAME as NAME` of __init__.pyi."""
    import re
    from importlib.resources import files

    table = files("minigpt").joinpath("__init__.pyi").read_text("utf-8")
    return {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as \2$", table, re.MULTILINE)}
