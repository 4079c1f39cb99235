"""Checks of arguments, each an error that names the argument and the value."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any


def short_repr(value: Any) -> str:
    """`value` for a message: never too long, and never an error of its own (as a number of 5000 digits is)."""
    huge = isinstance(value, int) and value.bit_length() > 10_000
    return f"a number of {value.bit_length()} bits" if huge else repr(value)[:500]


def integer(name: str, value: Any, low: float, high: float = math.inf) -> int:
    """`value` as an int in [low, high], else a ValueError that names both."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # no floats, not even 3.0
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be an integer, not {short_repr(value)}")
    if not low <= number <= high:
        bound = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} must be {bound}, not {short_repr(value)}")
    return number


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a finite float in [low, high], else a ValueError that names both."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) or type(value).__name__ == "bool" else float(value)
    except (TypeError, ValueError, OverflowError):  # a list, an array of several numbers, 10**400
        number = math.nan
    if not math.isfinite(number) or not low <= number <= high:
        bound = f" from {low:g} to {high:g}" if high < math.inf else f" of at least {low:g}" if low > -math.inf else ""
        raise ValueError(f"{name} must be a finite number{bound}, not {short_repr(value)}")
    return number


def without_surrogates(text: str) -> str:
    """`text` without lone surrogates, which stand for the bytes of an argument that the locale could not decode.

    Those bytes are read as UTF-8, whatever the locale; what is not UTF-8 either becomes U+FFFD, as in the tokenizer.
    """
    try:
        return text.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # other lone surrogates, as arguments have them on Windows, and JSON anywhere
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
